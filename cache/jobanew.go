package cache

import (
	"context"
	"time"

	"github.com/epcached/epcached/refusal"
)

// maxJobsAnew bounds what is listed of what the daemon wants by itself: after an update that may be every build.
const maxJobsAnew = 256

// jobsAnew gives what the daemon wants to compile anew and has not begun, as far as the peer may see the builds.
func (c *Cache) jobsAnew(p Peer) []Job {
	var out []Job
	for _, r := range c.rebuilds.list() {
		if len(out) == maxJobsAnew {
			break
		}
		if j := c.toBeMade(p, &r); j != nil && r.State == rebuildQueued {
			out = append(out, c.toldTo(p, *j))
		}
	}
	return out
}

// jobAnew gives one of them; nil: there is none of that id that the peer may see.
func (c *Cache) jobAnew(p Peer, id string) *Job {
	if r := c.rebuilds.named(id); r != nil {
		return c.toBeMade(p, r)
	}
	return nil
}

// toBeMade gives a rebuild as a job that has not begun; nil: it waits for a request, or is not for the peer to see.
func (c *Cache) toBeMade(p Peer, r *Rebuild) *Job {
	if r.State != rebuildQueued && r.State != rebuildRunning {
		return nil
	}
	b, err := c.index.Get(r.Build)
	if err != nil || !c.maySee(p, &b) {
		return nil // what is gone is not made anew either
	}
	j := &Job{ID: r.ID, State: JobQueued, Phase: "queued", ModelName: r.ModelName, ModelDigest: b.ModelDigest, RequestKey: r.RequestKey,
		UID: b.UID, Background: true, Queued: r.Since, Elapsed: c.now().Sub(r.Since), Why: r.Why}
	if len(b.EPs) > 0 {
		j.EP = b.EPs[0].Name
	}
	return j
}

// awaitAnew waits until a job has begun that the daemon wants by itself. One that turns out not to be needed is done.
func (c *Cache) awaitAnew(ctx context.Context, p Peer, j Job) (*flight, *Job, error) {
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.rebuilds.changes():
		case <-tick.C: // not all that happens to one changes what there is to do
		case <-ctx.Done():
			return nil, nil, contextError(ctx, &Request{Name: j.ModelName})
		}
		f, _, err := c.findJob(p, j.ID)
		if refusal.ClassOf(err) == refusal.NotFound && err != nil {
			j.State = JobDone
			return nil, &j, nil
		}
		if f != nil {
			return f, nil, nil
		}
	}
}

// dropAnew takes all of them out of the queue, for an administrator, and gives the first.
func (c *Cache) dropAnew(p Peer) []Job {
	if !c.Administrator(p) {
		return nil
	}
	out := c.jobsAnew(p)
	c.rebuilds.drop(func(*task) bool { return true })
	for i := range out {
		out[i].State = JobCancelled
	}
	return out
}

// drop takes tasks out of the queue, unless they are being worked on, and tells whether there were any. They come back
// when they are wanted again.
func (q *rebuilds) drop(which func(*task) bool) (any bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for key, t := range q.tasks {
		if t.state == rebuildQueued && which(t) {
			q.release(t)
			delete(q.tasks, key)
			any = true
		}
	}
	return any
}

// named gives the task of that id; nil: there is none.
func (q *rebuilds) named(id string) *Rebuild {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, t := range q.tasks {
		if t.id == id {
			r := t.told()
			return &r
		}
	}
	return nil
}
