package cache

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/internal/apierr"
)

// maxJobsAnew bounds what is listed of what the daemon wants by itself: after an update that may be every build.
const maxJobsAnew = 256

// jobsAnew gives what the daemon wants to compile anew and has not begun, as far as the peer may see the builds.
func (c *Cache) jobsAnew(p request.Peer) []jobs.Info {
	var out []jobs.Info
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

// toBeMade gives a rebuild as a job that has not begun; nil: it waits for a request, or is not for the peer to see.
func (c *Cache) toBeMade(p request.Peer, r *upkeep.Rebuild) *jobs.Info {
	if r.State != upkeep.Queued && r.State != upkeep.Running {
		return nil
	}
	b, err := c.index.Get(r.Build)
	if err != nil || !c.rights.MaySee(p, b.ID, b.Scope) {
		return nil // what is gone is not made anew either
	}
	j := &jobs.Info{ID: r.ID, State: jobs.Queued, Phase: "queued", ModelName: r.ModelName, ModelDigest: b.ModelDigest, RequestKey: r.RequestKey,
		UID: b.UID, Background: true, Queued: r.Since, Elapsed: c.now().Sub(r.Since), Why: r.Why}
	if len(b.EPs) > 0 {
		j.EP = b.EPs[0].Name
	}
	return j
}

// awaitAnew waits until a job has begun that the daemon wants by itself. One that turns out not to be needed is done.
func (c *Cache) awaitAnew(ctx context.Context, p request.Peer, j jobs.Info) (*jobs.Job, *jobs.Info, error) {
	tick := time.NewTicker(jobs.ProgressEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.rebuilds.Changes():
		case <-tick.C: // not all that happens to one changes what there is to do
		case <-ctx.Done():
			return nil, nil, request.ContextError(ctx, j.ModelName)
		}
		f, _, err := c.findJob(p, j.ID)
		if apierr.ClassOf(err) == apierr.NotFound && err != nil {
			j.State = jobs.Done
			return nil, &j, nil
		}
		if f != nil {
			return f, nil, nil
		}
	}
}

// dropAnew takes all of them out of the queue, for an administrator, and gives the first.
func (c *Cache) dropAnew(p request.Peer) []jobs.Info {
	if !c.rights.Administrator(p) {
		return nil
	}
	out := c.jobsAnew(p)
	c.rebuilds.DropAll()
	for i := range out {
		out[i].State = jobs.Cancelled
	}
	return out
}

// findJob gives the job that an id names, or the beginning of one, if the peer may follow it: the job, also one that
// ended lately, or what the daemon wants by itself and has not begun.
func (c *Cache) findJob(p request.Peer, name string) (f *jobs.Job, anew *jobs.Info, err error) {
	found := make(map[string]bool)
	for _, one := range c.jobs.Known() {
		if strings.HasPrefix(one.ID, name) && c.mayFollow(p, one.About(), one.AskedBy(p.UID)) {
			found[one.ID] = true
		}
	}
	for _, j := range c.jobsAnew(p) {
		if strings.HasPrefix(j.ID, name) {
			found[j.ID] = true
		}
	}
	id := name
	switch {
	case name == "" || found[name]:
	case len(found) > 1:
		return nil, nil, apierr.New(apierr.BadRequest, nil, "job %.80q: %d jobs begin so", name, len(found)).WithHint("write more of its id: epcachectl jobs --json")
	case len(found) == 1:
		id = slices.Collect(maps.Keys(found))[0]
	}
	if r := c.rebuilds.Named(id); r != nil {
		anew = c.toBeMade(p, r) // looked for first: what it becomes then is found
	}
	for _, one := range c.jobs.Known() {
		if one.ID == id { // one that failed may have been begun again
			f = one
		}
	}
	switch {
	case f != nil && c.mayFollow(p, f.About(), f.AskedBy(p.UID)):
		return f, nil, nil
	case f == nil && anew != nil:
		return nil, anew, nil
	}
	return nil, nil, apierr.New(apierr.NotFound, nil, "no job %.80q: none is under way, or ended within %s, whose id begins so", name, jobs.PastFor).
		WithHint("epcachectl jobs shows those that wait or run")
}
