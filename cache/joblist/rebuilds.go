package joblist

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

// maxRebuilds bounds the listed rebuilds, because after an update every build may have one.
const maxRebuilds = 256

// rebuildsFor returns the rebuilds that have not begun, of builds that the peer may see.
func (l *List) rebuildsFor(p request.Peer) []jobs.Info {
	var out []jobs.Info
	for _, r := range l.Rebuilds.List() {
		if len(out) == maxRebuilds {
			break
		}
		if j := l.rebuildInfo(p, &r); j != nil && r.State == upkeep.Queued {
			out = append(out, l.infoFor(p, *j))
		}
	}
	return out
}

// rebuildInfo returns a rebuild as a queued job. It returns nil if it waits for its source, or if
// the peer may not see the build.
func (l *List) rebuildInfo(p request.Peer, r *upkeep.Rebuild) *jobs.Info {
	if r.State != upkeep.Queued && r.State != upkeep.Running {
		return nil
	}
	b, err := l.Store.Index().Get(r.Build)
	if err != nil || !l.Rights.MaySee(p, b.ID, b.Scope) {
		return nil // a removed build is not rebuilt either
	}
	j := &jobs.Info{ID: r.ID, State: jobs.Queued, Phase: "queued", ModelName: r.ModelName,
		ModelDigest: b.ModelDigest, RequestKey: r.RequestKey, UID: b.UID, Background: true,
		Queued: r.Since, Elapsed: l.Now().Sub(r.Since), Why: r.Why}
	if len(b.EPs) > 0 {
		j.EP = b.EPs[0].Name
	}
	return j
}

// AwaitBegin waits until a rebuild has begun, and returns its job. A rebuild that turns out not to
// be needed is returned as done.
func (l *List) AwaitBegin(ctx context.Context, p request.Peer, j jobs.Info) (
	*jobs.Job, *jobs.Info, error) {
	tick := time.NewTicker(jobs.ProgressEvery)
	defer tick.Stop()
	for {
		select {
		case <-l.Rebuilds.Changes():
		case <-tick.C: // poll as well, because not every change of a rebuild sends a notification
		case <-ctx.Done():
			return nil, nil, request.ContextError(ctx, j.ModelName)
		}
		switch f, _, err := l.Find(p, j.ID); {
		case f != nil:
			return f, nil, nil
		case err != nil && apierr.ClassOf(err) == apierr.NotFound:
			j.State = jobs.Done
			return nil, &j, nil
		}
	}
}

// cancelRebuilds cancels all rebuilds if the peer is an administrator, and returns up to
// maxRebuilds of them.
func (l *List) cancelRebuilds(p request.Peer) []jobs.Info {
	if !l.Rights.IsAdministrator(p) {
		return nil
	}
	out := l.rebuildsFor(p)
	l.Rebuilds.DropAll()
	for i := range out {
		out[i].State = jobs.Cancelled
	}
	return out
}

// Find returns the job with the id, or with the only id that begins with name, if the peer may
// follow it. f may have ended recently. rebuild is set instead if it is a rebuild that has not
// begun.
func (l *List) Find(p request.Peer, name string) (f *jobs.Job, rebuild *jobs.Info, err error) {
	found := make(map[string]bool)
	for _, one := range l.Jobs.ListWithEnded() {
		if strings.HasPrefix(one.ID, name) && l.mayFollow(p, one) {
			found[one.ID] = true
		}
	}
	for _, j := range l.rebuildsFor(p) {
		if strings.HasPrefix(j.ID, name) {
			found[j.ID] = true
		}
	}
	id := name
	switch {
	case name == "" || found[name]:
	case len(found) > 1:
		return nil, nil, apierr.New(apierr.BadRequest, nil, "job %.80q: %d jobs have this "+
			"prefix", name, len(found)).
			WithHint("give more digits: epcachectl jobs --json")
	case len(found) == 1:
		id = slices.Collect(maps.Keys(found))[0]
	}
	if r := l.Rebuilds.ByID(id); r != nil {
		// before the jobs, because the rebuild may become a job in the meantime
		rebuild = l.rebuildInfo(p, r)
	}
	for _, one := range l.Jobs.ListWithEnded() {
		if one.ID == id { // a failed rebuild may have been begun again with the same id
			f = one
		}
	}
	switch {
	case f != nil && l.mayFollow(p, f):
		return f, nil, nil
	case f == nil && rebuild != nil:
		return nil, rebuild, nil
	}
	return nil, nil, apierr.New(apierr.NotFound, nil,
		"no job %.80q: no running job, nor one that ended within %s, has this "+
			"prefix", name, jobs.EndedFor).
		WithHint("epcachectl jobs lists waiting and running jobs")
}
