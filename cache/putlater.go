package cache

import (
	"context"
	"errors"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/refusal"
)

// queuedPut is a put that was answered before there was room for it. Until its turn comes it is descriptors of its application's files,
// and nothing of it is on the disk: the store exceeds its budget by no more than without it. It is still a claim, and who asks for the
// same meanwhile waits for that.
type queuedPut struct {
	*queued
	claim  *claim
	put    *Put // its files are descriptors of ours
	names  []string
	sizes  []int64
	stamps []cas.Stamp // of the files when the put was answered
}

// queuePut has a put kept as soon as there is room, where there is none now: why says so, and is given back if it cannot be queued.
func (c *Cache) queuePut(cl *claim, put *Put, names []string, sizes []int64, why error) (*queuedPut, error) {
	disk, _ := needOf(sizes...)
	q := &queuedPut{claim: cl, names: names, sizes: sizes}
	var ok bool
	if q.queued, ok = c.queue(cl.owner, disk, 0, len(put.Files), why); !ok {
		return nil, why
	}
	own := *put
	own.Files, q.put = nil, &own
	for _, f := range put.Files {
		file, err := duplicate(f.File)
		if err != nil {
			q.close()
			return nil, why
		}
		own.Files = append(own.Files, PutFile{Name: f.Name, File: file})
		stamp, err := cas.StampOf(file)
		if err != nil {
			q.close()
			return nil, why
		}
		q.stamps = append(q.stamps, stamp)
	}
	if !cl.detach() {
		q.close()
		return nil, why
	}
	return q, nil
}

func (q *queuedPut) close() {
	q.leave()
	for _, f := range q.put.Files {
		_ = f.File.Close() // opened for reading only: nothing can be lost
	}
}

// answerQueued tells that a put is to be kept, and that it is not yet.
func (c *Cache) answerQueued(q *queuedPut) *Answer {
	cl := q.claim
	cl.flight.tell(phaseNoRoom)
	a := &Answer{Outcome: Queued, Job: cl.flight.id, Why: "not kept yet: " + q.why.Error()}
	a = c.finish(a, cl.request, cl.id, cl.plan, &runtime{name: cl.plan.eps[0].Library})
	c.work.Go(func() { c.keepQueued(c.ctx, q) })
	return a
}

// keepQueued keeps a put when its turn comes, or ends its claim.
func (c *Cache) keepQueued(ctx context.Context, q *queuedPut) {
	defer q.close()
	cl := q.claim
	result, err := c.takeQueued(ctx, q)
	if err == nil {
		c.deliverQueued(cl, result)
		return
	}
	if ctx.Err() != nil {
		err = errors.New("the daemon stops")
	}
	if refusal.ClassOf(err) == refusal.NoSpace {
		c.index.Count("unkept", 1)
	}
	c.log.Warn("put not kept after all", "model", cl.request.Name, "uid", cl.request.Peer.UID, "why", err)
	cl.finishUpTo(claimStoring, "what was put is not kept: "+err.Error(), 0) // unless that is why
}

// deliverQueued gives those who waited what was kept, unless it has gone again.
func (c *Cache) deliverQueued(cl *claim, result *compiled) {
	done, err := c.attend.serve(result.build.ID) // or the collector might have it before those who waited
	if err != nil {
		c.log.Warn("put kept, and not served", "model", cl.request.Name, "uid", cl.request.Peer.UID, "why", err)
		cl.finishUpTo(claimStoring, "what was put was kept, and cannot be served: "+err.Error(), 0)
		return
	}
	defer done()
	cl.deliver(result)
	<-cl.flight.done
}

// takeQueued waits for room, and then does what Put would have done.
func (c *Cache) takeQueued(ctx context.Context, q *queuedPut) (*compiled, error) {
	cl := q.claim
	room, err := q.await(ctx, cl.done, func() bool { return cl.flight.job().Waiting > 0 }, func() (*reservation, error) {
		room, err := c.mayStore(ctx, cl, q.sizes, mayStore{})
		if errors.Is(err, errUserFull) { // what its user has too much goes in a moment, perhaps
			room, err = c.mayStore(ctx, cl, q.sizes, mayStore{wait: true})
		}
		return room, err
	})
	if err != nil {
		return nil, err
	}
	q.hasRoom()
	leave, err := c.enterQueued(ctx, q)
	if err != nil {
		room.release()
		return nil, err
	}
	defer leave()
	q.leave()
	for i, f := range q.put.Files {
		if now, err := cas.StampOf(f.File); err != nil || now.Size != q.stamps[i].Size || now.Mtime != q.stamps[i].Mtime {
			room.release()
			return nil, refusal.New(refusal.BadRequest, err, "model %q: put: file %q changed while it waited for room", cl.request.Name, f.Name)
		}
	}
	cl.mu.Lock()
	cl.timer.Reset(putTime)
	cl.mu.Unlock()
	return c.takeInto(ctx, cl, q.put, q.names, q.sizes, room, cl.flight.tell)
}

// enterQueued waits until no other put of the user's goes on, no longer than until what is queued is given up: there is room set aside for it.
func (c *Cache) enterQueued(ctx context.Context, q *queuedPut) (leave func(), err error) {
	lasts := c.places.lasts
	timed, cancel := context.WithDeadline(ctx, q.since.Add(lasts))
	defer cancel()
	leave, err = c.claims.puts.enter(timed, q.claim.owner, q.claim.done)
	if err != nil && timed.Err() != nil && ctx.Err() == nil {
		return nil, refusal.New(refusal.NoSpace, nil, "there was room, and other puts of uid %d went on until %s were over", q.claim.request.Peer.UID, lasts)
	}
	return leave, err
}
