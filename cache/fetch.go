package cache

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/unixsock/wire"
)

func (c *Cache) openRemotes() {
	c.remotes = remotes.New(remotes.Options{Client: c.options.RemoteClient, UID: c.uid,
		Store: c.Store, Trust: c.trust, Now: c.now, Log: c.log, Busy: c.jobs.Busy,
		Remotes: func() []remotes.Remote { return c.settings.Load().Remotes },
		Import:  c.Claims.Import, Export: c.Queries.ExportShared,
		MayPublish: func(uid uint32) bool { return c.Rights.IsPublisher(request.Peer{UID: uid}) }})
	c.remotes.Configure()
}

// askOf returns the query that the remotes get for an attempt.
func (c *Cache) askOf(at *request.Attempt,
	progress func(done, total int64, left time.Duration)) *remotes.Ask {
	var kind jobs.Kind
	for _, f := range at.Descriptors() {
		if info, err := f.Stat(); err == nil { // if it fails, the file counts as small
			kind.Size += info.Size()
		}
	}
	for _, ep := range at.Plan.EPs {
		kind.EPs = append(kind.EPs, ep.Name)
	}
	a := &remotes.Ask{Attempt: at, Progress: progress, Refresh: at.OnMiss == request.Fetch}
	_, a.Estimate = c.jobs.Costs.Estimate(kind)
	return a
}

// beginJob is called at the start of each compile of a shared build: see build.Options.Begin.
func (c *Cache) beginJob(ctx context.Context, at *request.Attempt, j *jobs.Job) (*index.Build,
	func(bool)) {
	a := c.askOf(at, j.SetTransfer)
	if !c.remotes.Concerns(a) {
		return nil, func(bool) {}
	}
	j.MarkRunning("fetching")
	return c.remotes.Begin(ctx, a)
}

// fetch queries the remotes in one job for all callers, without a compile. It reports whether the
// request should be looked up again. Without wait the job runs in the background.
func (c *Cache) fetch(ctx context.Context, at *request.Attempt, wait bool) bool {
	ask := c.askOf(at, nil)
	if ask.Patient = at.OnMiss != request.ForClaim; !c.remotes.Asks(ask) {
		return false
	}
	key := at.JobKey()
	key.Alone = "fetch"
	prepare := func() (jobs.Work, error) {
		about := at.JobAbout(key.Scope, "requested: it is fetched from a remote")
		about.Keeps = true
		return jobs.Func{Work: about,
			Do: func(ctx context.Context, j *jobs.Job) (*jobs.Result, error) {
				j.MarkRunning("fetching")
				ask.Progress = j.SetTransfer
				b := c.remotes.Fetch(ctx, ask)
				return &jobs.Result{Build: b, Fetched: b != nil}, nil
			}}, nil
	}
	caller := at.Caller(c.owners.OwnerOf)
	if !wait {
		caller.Progress = nil
		// if it cannot start, the next request tries again
		_, _, _ = c.jobs.Start(key, caller, prepare)
		return false
	}
	result, _, err := c.jobs.Join(ctx, key, caller, prepare)
	if err != nil || !result.Fetched {
		return false
	}
	c.Store.TakerDone(result.Build.ID)
	return true
}

// notFetched returns the error of a request that compiles nothing, with the answers of the remotes.
func (c *Cache) notFetched(at *request.Attempt) error {
	why := c.remotes.Explain(c.askOf(at, nil))
	if len(why) == 0 {
		why = []string{"no remote is configured"}
	}
	return apierr.New(apierr.NotFound, nil, "model %q: not fetched: %s", at.Name,
		strings.Join(why, "; ")).
		WithFact("request_key", at.Plan.RequestKey.String()).
		WithHint("compile it: repeat the request with on_miss wait")
}

// RemoteStatus returns the state of each remote.
func (c *Cache) RemoteStatus() []*wire.Remote { return c.remotes.Status() }

// Push copies shared builds to remotes now, for administrators and publishers.
func (c *Cache) Push(ctx context.Context, p request.Peer, w *wire.Push,
	progress func(request.Progress)) (*wire.PushReply, error) {
	if !c.Rights.IsPublisher(p) {
		return nil, apierr.New(apierr.NotAllowed, nil,
			"push: builds are copied to remotes for administrators and publishers")
	}
	to, err := c.remotes.ToPublish(w.Remote)
	if err != nil {
		return nil, err
	}
	builds, err := c.Queries.Find(ctx, p, w.Entries)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(builds, func(a, b index.Build) int {
		return a.Created.Compare(b.Created)
	})
	reply := &wire.PushReply{}
	for i := range builds {
		b := &builds[i]
		for j := range to {
			one := &wire.PushReply_Pushed{Model: wire.Clip(b.ModelName), Build: b.BuildKey.String(),
				Remote: to[j].Name}
			did, err := c.remotes.Publish(ctx, &to[j], b, progress)
			if ctx.Err() != nil {
				return nil, request.ContextError(ctx, "push")
			}
			if one.Done, one.Text = err == nil, string(did); err != nil {
				one.Text = wire.Valid(err.Error())
				c.Store.RecordEvent(event.Of(b, event.NotPublished, "to remote %s: %v",
					to[j].Name, err))
			}
			reply.Builds = append(reply.Builds, one)
		}
	}
	return reply, nil
}

// RemoteTrust reads or puts the trust document of a remote, for administrators, or returns those
// that are known here.
func (c *Cache) RemoteTrust(ctx context.Context, p request.Peer,
	w *wire.RemoteTrust) (*wire.RemoteTrustReply, error) {
	reply := &wire.RemoteTrustReply{}
	var err error
	switch {
	case w.Remote == "":
		reply.Documents, err = c.remotes.Documents(c.settings.Load().Claims.Trust)
	case !c.Rights.IsAdministrator(p):
		err = apierr.New(apierr.NotAllowed, nil,
			"remote revoke: the trust document of a remote is for administrators")
	case len(w.Document) == 0:
		reply.Documents, err = c.remotes.ReadDocument(ctx, w.Remote)
	default:
		var over portable.Digest
		copy(over[:], w.Over)
		err = c.remotes.PutDocument(ctx, w.Remote, w.Document, over)
	}
	return reply, err
}

// CollectRemote removes builds from a remote that no look-up can find any more.
func (c *Cache) CollectRemote(ctx context.Context, p request.Peer, w *wire.CollectRemote,
	progress func(request.Progress)) (*wire.CollectRemoteReply, error) {
	if !c.Rights.IsAdministrator(p) {
		return nil, apierr.New(apierr.NotAllowed, nil,
			"remote gc: it removes objects of the remote, and is for administrators")
	}
	return c.remotes.Collect(ctx, w.Remote, w.DryRun, progress)
}

// CheckRemote tries each operation that the daemon needs on a remote.
func (c *Cache) CheckRemote(ctx context.Context, p request.Peer,
	name string) (*wire.CheckRemoteReply, error) {
	if !c.Rights.IsAdministrator(p) {
		return nil, apierr.New(apierr.NotAllowed, nil,
			"remote check: it writes to the remote, and is for administrators")
	}
	return c.remotes.Check(ctx, name)
}
