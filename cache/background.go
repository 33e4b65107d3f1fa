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
func (c *Cache) compileLater(ctx context.Context, r *Request, id modelIdentity, p *plan, rt *runtime, rc *runtimeContent, why string) (*Answer, error) {
	key, scope := c.flightKey(r, id, p)
	if scope == "" {
		return nil, apierr.New(apierr.BadRequest, nil, "model %q: nothing is to be kept of it, so there is nothing to compile in the background", r.Name).
			WithHint("ask with on_miss wait")
	}
	f, first, err := c.flights.send(key, c.asking(r, nil), c.begin(r, id, p, rc, scope))
	if err != nil {
		return nil, flightError(ctx, r, err)
	}
	if !first {
		why = "it is being compiled already"
		if err := c.inherit(f, key, r, id, p, rc); err != nil {
			return nil, apierr.New(apierr.Internal, err, "model %q", r.Name)
		}
	}
	c.keepWanted(f, r, p)
	return &Answer{Outcome: Later, Job: f.id, RequestKey: p.requestKey, ModelDigest: id.Digest, Record: p.recordJSON, Runtime: rt.name, Why: why}, nil
}

// heir is for whom a job is done here after all. Who is strict may need it where the same user's other request does not.
type heir struct {
	uid    uint32
	strict bool
}

func heirOf(r *Request) heir { return heir{r.Peer.UID, r.StrictORT} }

// inherit has the job done here if what is under way may not do: an application's, which may bring nothing, and for a request
// that is strict about ONNX Runtime another's. For each user that goes on without it a request is kept until then.
func (c *Cache) inherit(f *flight, key flightKey, r *Request, id modelIdentity, p *plan, rc *runtimeContent) error {
	f.mu.Lock()
	_, there := f.heirs[heirOf(r)]
	stays := (f.about.claim || r.StrictORT) && !there
	if stays {
		if f.heirs == nil {
			f.heirs = make(map[heir]int)
		}
		f.heirs[heirOf(r)] = len(r.descriptors())
	}
	f.mu.Unlock()
	if !stays {
		return nil
	}
	own, err := r.own()
	if err != nil {
		return err
	}
	c.later(func(ctx context.Context) {
		defer own.close()
		select {
		case <-f.done:
		case <-ctx.Done():
			return
		}
		if !errors.As(f.err, new(*claimEnd)) && (f.err != nil || !own.otherORT(rc, f.result.build.ORTVersion)) {
			return
		}
		next, _, err := c.flights.send(key, c.asking(own, nil), c.begin(own, id, p, rc, key.scope))
		switch {
		case err == nil:
			c.keepWanted(next, own, p)
		case ctx.Err() == nil: // else the daemon ends, and nothing failed
			c.log.Info("not compiled after a claim that ended without a result", "model", own.Name, "error", err)
			c.happened(event.For(event.About{Peer: own.Peer, Key: f.about.RequestKey, Model: own.Name},
				event.Failed, "%v", err))
		}
	})
	return nil
}

// asking says how the request takes part in a job.
func (c *Cache) asking(r *Request, t *telling) asking {
	who := asking{uid: r.Peer.UID, name: r.Name, keep: r.KeepGoing && r.OnMiss != Bypass && r.Store != "none"} // else nobody would have it
	if who.keep || r.OnMiss == Background {
		who.owner = c.reports.owners.of(r.Peer.UID)
	}
	if t != nil {
		who.since, who.tell = t.since, t.tell
	}
	return who
}

// flightKey says which job the request is for, and in which scope its build goes; "": it is not kept, and the job is shared
// with nobody.
func (c *Cache) flightKey(r *Request, id modelIdentity, p *plan) (key flightKey, scope string) {
	scope, _ = c.scopes(r, id)
	if scope == "" || r.OnMiss == Bypass {
		return flightKey{build: p.buildKey, alone: newID()}, ""
	}
	return flightKey{build: p.buildKey, scope: scope}, scope
}
