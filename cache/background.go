package cache

import (
	"context"
	"errors"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/internal/apierr"
)

// A user may have so many jobs finished without waiting for them, and so many files held open for that: each holds the
// model's, until it is its turn.
const (
	maxKeptJobs  = 64
	maxKeptFiles = 1024
)

// mayKeep refuses to have yet another job finished that nobody may wait for. f is the flight, nil where it is yet to be
// begun. The caller holds fs.mu.
func (fs *flights) mayKeep(f *flight, who *asking) error {
	if !who.keep {
		return nil
	}
	jobs, files := 0, 0
	for _, one := range fs.open {
		one.mu.Lock()
		mine := false
		for _, owner := range one.kept {
			mine = mine || owner == who.owner && !one.about.inquiry
		}
		for h, n := range one.heirs { // until it is known whether their own are needed
			if owner, keeps := one.kept[h.uid]; keeps && owner == who.owner {
				files += n
			}
		}
		one.mu.Unlock()
		if mine && one == f {
			return nil
		}
		if mine {
			jobs++
			files += one.about.files
		}
	}
	if jobs >= maxKeptJobs || jobs > 0 && files >= maxKeptFiles {
		return apierr.New(apierr.Busy, nil, "%d compiles are queued for you in the background", jobs).
			WithHint("ask again when some are done, or cancel some: epcachectl jobs")
	}
	return nil
}

// compileLater has the model compiled, and answers at once with the job.
func (c *Cache) compileLater(ctx context.Context, at *attempt, why string) (*Answer, error) {
	key, scope := at.flightKey()
	if scope == "" {
		return nil, apierr.New(apierr.BadRequest, nil, "model %q: nothing is to be kept of it, so there is nothing to compile in the background", at.Name).
			WithHint("ask with on_miss wait")
	}
	f, first, err := c.flights.send(key, c.asking(at.untold()), c.begin(at, scope))
	if err != nil {
		return nil, flightError(ctx, at.Name, err)
	}
	if !first {
		why = "it is being compiled already"
		if err := c.inherit(f, key, at); err != nil {
			return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
		}
	}
	c.keepQueued(f, at)
	a := at.answer(Later)
	a.Job, a.Why = f.id, why
	return a, nil
}

// heir is for whom a job is done here after all. Who is strict may need it where the same user's other request does not.
type heir struct {
	uid    uint32
	strict bool
}

func heirOf(r *Request) heir { return heir{r.Peer.UID, r.StrictORT} }

// inherit has the job done here if what is under way may not do: an application's, which may bring nothing, and for a request
// that is strict about ONNX Runtime another's. For each user that goes on without it a request is kept until then.
func (c *Cache) inherit(f *flight, key flightKey, at *attempt) error {
	f.mu.Lock()
	_, there := f.heirs[heirOf(at.Request)]
	stays := (f.about.claim || at.StrictORT) && !there
	if stays {
		if f.heirs == nil {
			f.heirs = make(map[heir]int)
		}
		f.heirs[heirOf(at.Request)] = len(at.descriptors())
	}
	f.mu.Unlock()
	if !stays {
		return nil
	}
	files, err := at.own()
	if err != nil {
		return err
	}
	own := at.withRequest(files).untold()
	c.later(func(ctx context.Context) {
		defer files.close()
		select {
		case <-f.done:
		case <-ctx.Done():
			return
		}
		if !errors.As(f.err, new(*claimEnd)) && (f.err != nil || !own.otherORT(f.result.build.ORTVersion)) {
			return
		}
		next, _, err := c.flights.send(key, c.asking(own), c.begin(own, key.scope))
		switch {
		case err == nil:
			c.keepQueued(next, own)
		case ctx.Err() == nil: // else the daemon ends, and nothing failed
			c.log.Info("not compiled after a claim that ended without a result", "model", own.Name, "error", err)
			c.happened(event.For(event.About{Peer: own.Peer, Key: f.about.RequestKey, Model: own.Name},
				event.Failed, "%v", err))
		}
	})
	return nil
}

// asking says how the request takes part in a job.
func (c *Cache) asking(at *attempt) asking {
	who := asking{uid: at.Peer.UID, name: at.Name, keep: at.KeepGoing && at.OnMiss != Bypass && at.Store != "none"} // else nobody would have it
	if who.keep || at.OnMiss == Background {
		who.owner = c.owners.Of(at.Peer.UID)
	}
	if at.told != nil {
		who.since, who.tell = at.told.since, at.told.tell
	}
	return who
}

// flightKey says which job the request is for, and in which scope its build goes; "": it is not kept, and the job is shared
// with nobody.
func (at *attempt) flightKey() (key flightKey, scope string) {
	if at.store == "" || at.OnMiss == Bypass {
		return flightKey{build: at.plan.buildKey, alone: newID()}, ""
	}
	return flightKey{build: at.plan.buildKey, scope: at.store}, at.store
}
