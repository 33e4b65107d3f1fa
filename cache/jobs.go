package cache

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/internal/apierr"
)

// mayFollow: who asked for a job, or has what it is to replace. Administrators may follow all.
func (c *Cache) mayFollow(p request.Peer, a *jobs.About, asked bool) bool {
	return asked || c.rights.Administrator(p) ||
		!a.Replaces.IsZero() && c.rights.MaySee(p, a.Replaces, a.Scope) // else it is of a request of another user
}

// toldTo is what the peer may hear of a job.
func (c *Cache) toldTo(p request.Peer, i jobs.Info) jobs.Info {
	return i.For(p.UID, c.rights.Administrator(p))
}

// Jobs gives the jobs that the peer may see, in the order in which they run: its own, those that make a build anew that
// it had, and for administrators all. Of those that the daemon wants by itself and has not begun there are the ones
// that have waited longest; the most used of all of them is the next.
func (c *Cache) Jobs(ctx context.Context, p request.Peer) ([]jobs.Info, error) {
	all := c.jobs.InOrder(func(j *jobs.Job) bool { return c.mayFollow(p, j.About(), j.AskedBy(p.UID)) })
	if ctx.Err() != nil {
		return nil, apierr.New(apierr.Cancelled, ctx.Err(), "jobs")
	}
	for i := range all {
		all[i] = c.toldTo(p, all[i])
	}
	return append(all, c.jobsAnew(p)...), nil
}

// underWay gives the job that the request would wait for, nil if there is none.
func (c *Cache) underWay(at *request.Attempt) *jobs.Job {
	key := at.JobKey()
	own := jobs.Key{Build: key.Build, Scope: rights.OwnScope(at.Peer)} // where an application of the same user's holds the claim
	return c.jobs.Open(key, own)
}

// notYet is the error of a request that does not wait for the compile that is under way.
func (c *Cache) notYet(at *request.Attempt, f *jobs.Job) *apierr.Error {
	j := f.Info()
	text := fmt.Sprintf("no build yet for model %q: it is being compiled (%s, for %s", at.Name, cmp.Or(j.Phase, j.State), j.Elapsed.Round(time.Second))
	if j.Estimate > 0 {
		text += fmt.Sprintf(", of about %s", j.Estimate.Round(time.Second))
	}
	e := apierr.New(apierr.NotFound, nil, "%s)", text).WithFact("request_key", at.Plan.RequestKey.String()).WithFact("phase", cmp.Or(j.Phase, j.State)).
		WithFact("elapsed_ms", fmt.Sprint(j.Elapsed.Milliseconds())).WithFact("estimate_ms", fmt.Sprint(j.Estimate.Milliseconds()))
	if !c.mayFollow(at.Peer, f.About(), f.AskedBy(at.Peer.UID)) {
		return e.WithHint("wait for it: ask with on_miss wait")
	}
	return e.WithFact("job", j.ID).WithHint("wait for it: ask with on_miss wait, or epcachectl jobs follow %s", j.ID)
}

// Follow waits until the job ends, and gives its end; that of one which ended lately at once. progress is called at each
// change of phase, and not after Follow returned. Who only follows a job does not keep it going.
func (c *Cache) Follow(ctx context.Context, p request.Peer, id string, progress func(request.Progress)) (jobs.Info, error) {
	f, anew, err := c.findJob(p, id)
	if err == nil && f == nil {
		f, anew, err = c.awaitAnew(ctx, p, *anew)
	}
	if err != nil {
		return jobs.Info{}, err
	}
	if f == nil {
		return c.toldTo(p, *anew), nil
	}
	since := c.now()
	told := jobs.NewTelling(progress, since)
	defer told.End()
	if !f.Follow(ctx, p.UID, since, told.Tell) {
		return jobs.Info{}, request.ContextError(ctx, f.About().ModelName)
	}
	return c.toldTo(p, f.Info()), nil
}

// CancelJobs ends jobs, or all that the peer asked for, for administrators all there are, and gives them as they are then. A
// user who is no administrator gives up the own part: others who wait for the same job have it go on.
func (c *Cache) CancelJobs(ctx context.Context, p request.Peer, ids []string, all bool) ([]jobs.Info, error) {
	if all == (len(ids) > 0) {
		return nil, apierr.New(apierr.BadRequest, nil, "cancel: name jobs, or say all")
	}
	named, past, err := c.named(p, ids, all)
	if err != nil {
		return nil, err
	}
	for _, f := range named {
		ends, held := f.GiveUp(p.UID, c.rights.Administrator(p))
		if held != nil {
			held() // for the next who wants it, if somebody does
		}
		if ends && f.About().Compiles() {
			c.happened(event.For(event.About{Peer: request.Peer{UID: f.About().UID}, Key: f.About().RequestKey, Model: f.About().ModelName},
				event.Cancelled, "by uid %d", p.UID))
		}
	}
	for _, f := range named {
		if !f.Stopped() {
			past = append(past, c.toldTo(p, f.Info()))
			continue
		}
		select { // the worker is being killed
		case <-f.Done():
			past = append(past, c.toldTo(p, f.Info()))
		case <-ctx.Done():
			return past, request.ContextError(ctx, f.About().ModelName)
		}
	}
	return past, nil
}

// named gives the jobs that are meant. Those that ended already are given as they are.
func (c *Cache) named(p request.Peer, ids []string, all bool) (named []*jobs.Job, past []jobs.Info, err error) {
	if all {
		for _, f := range c.jobs.List() {
			if f.AskedBy(p.UID) || c.rights.Administrator(p) {
				named = append(named, f)
			}
		}
		return named, c.dropAnew(p), nil
	}
	for _, id := range ids {
		f, anew, err := c.findJob(p, id)
		switch {
		case err != nil:
			return nil, nil, err
		case f != nil && !waits(f.Done()):
			past = append(past, c.toldTo(p, f.Info()))
		case !c.rights.Administrator(p) && (f == nil || !f.AskedBy(p.UID)):
			return nil, nil, apierr.New(apierr.NotAllowed, nil, "job %.80q: you did not ask for it", id)
		case f == nil:
			if c.rebuilds.Drop(id) {
				anew.State = jobs.Cancelled
			}
			past = append(past, c.toldTo(p, *anew))
		default:
			named = append(named, f)
		}
	}
	return named, past, nil
}

// Idle tells whether nothing is being compiled and nobody holds what was served since the start: who keeps the cache open for others
// only may close it. It looks into the folder of every view that is in use, so it is not for each request.
func (c *Cache) Idle() bool {
	if c.jobs.Count() > 0 {
		return false
	}
	return !c.views.AnyHeld()
}
