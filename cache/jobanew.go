package cache

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/internal/apierr"
)

// maxJobsAnew bounds what is listed of what the daemon wants by itself: after an update that may be every build.
const maxJobsAnew = 256

// jobsAnew gives what the daemon wants to compile anew and has not begun, as far as the peer may see the builds.
func (c *Cache) jobsAnew(p Peer) []Job {
	var out []Job
	for _, r := range c.rebuilds.List() {
		if len(out) == maxJobsAnew {
			break
		}
		if j := c.toBeMade(p, &r); j != nil && r.State == upkeep.Queued {
			out = append(out, c.toldTo(p, *j))
		}
	}
	return out
}

// jobAnew gives one of them; nil: there is none of that id that the peer may see.
func (c *Cache) jobAnew(p Peer, id string) *Job {
	if r := c.rebuilds.Named(id); r != nil {
		return c.toBeMade(p, r)
	}
	return nil
}

// toBeMade gives a rebuild as a job that has not begun; nil: it waits for a request, or is not for the peer to see.
func (c *Cache) toBeMade(p Peer, r *upkeep.Rebuild) *Job {
	if r.State != upkeep.Queued && r.State != upkeep.Running {
		return nil
	}
	b, err := c.index.Get(r.Build)
	if err != nil || !c.rights.MaySee(p, b.ID, b.Scope) {
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
		case <-c.rebuilds.Changes():
		case <-tick.C: // not all that happens to one changes what there is to do
		case <-ctx.Done():
			return nil, nil, contextError(ctx, j.ModelName)
		}
		f, _, err := c.findJob(p, j.ID)
		if apierr.ClassOf(err) == apierr.NotFound && err != nil {
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
	if !c.rights.Administrator(p) {
		return nil
	}
	out := c.jobsAnew(p)
	c.rebuilds.DropAll()
	for i := range out {
		out[i].State = JobCancelled
	}
	return out
}

// findJob gives the job that an id names, or the beginning of one, if the peer may follow it: the flight, also of one that
// ended lately, or what the daemon wants by itself and has not begun.
func (c *Cache) findJob(p Peer, name string) (f *flight, anew *Job, err error) {
	id, err := c.jobID(p, name)
	if err != nil {
		return nil, nil, err
	}
	anew = c.jobAnew(p, id) // looked for first: what it becomes then is found
	for _, one := range c.flights.known() {
		if one.id == id { // one that failed may have been begun again
			f = one
		}
	}
	switch {
	case f != nil && c.mayFollow(p, &f.about, f.askedBy(p.UID)):
		return f, nil, nil
	case f == nil && anew != nil:
		return nil, anew, nil
	}
	return nil, nil, apierr.New(apierr.NotFound, nil, "no job %.80q: none is under way, or ended within %s, whose id begins so", name, pastJobsFor).
		WithHint("epcachectl jobs shows those that wait or run")
}

// jobID completes the beginning of a job's id, among those that the peer may follow. What begins none stays as it is.
func (c *Cache) jobID(p Peer, name string) (string, error) {
	found := make(map[string]bool)
	for _, f := range c.flights.known() {
		if strings.HasPrefix(f.id, name) && c.mayFollow(p, &f.about, f.askedBy(p.UID)) {
			found[f.id] = true
		}
	}
	for _, j := range c.jobsAnew(p) {
		if strings.HasPrefix(j.ID, name) {
			found[j.ID] = true
		}
	}
	switch {
	case name == "" || found[name] || len(found) == 0:
		return name, nil
	case len(found) > 1:
		return "", apierr.New(apierr.BadRequest, nil, "job %.80q: %d jobs begin so", name, len(found)).WithHint("write more of its id: epcachectl jobs --json")
	}
	for id := range maps.Keys(found) {
		name = id
	}
	return name, nil
}

// known gives the flights that ended lately, the oldest first, and then those that have not ended.
func (fs *flights) known() []*flight {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.forget()
	return slices.AppendSeq(slices.Clone(fs.past), maps.Values(fs.all))
}
