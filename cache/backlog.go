package cache

import (
	"context"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/sources"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/index"
)

// keepQueued has a job in the background outlive the daemon, until it ends.
func (c *Cache) keepQueued(f *jobs.Job, at *request.Attempt) {
	r := at.Request
	w := upkeep.QueuedJob{UID: r.Peer.UID, Name: r.Name, Record: at.Plan.Record, Model: at.Plan.Canonical.Model, Runtime: r.Runtime.Directory, Store: r.Store,
		StrictORT: r.StrictORT, Queued: f.Since, Starts: at.Resumed.Starts}
	var names []string
	for i := range r.Models() {
		names = append(names, r.ModelFiles(i).Name)
	}
	if err := w.SetSources(names, func(i int) (index.Source, error) {
		return c.sources.Reference(context.Background(), r.ModelFiles(i), r.Peer.UID == c.uid)
	}); err != nil {
		c.log.Info("a queued compile will not outlive the daemon", "model", r.Name, "why", err)
	}
	c.backlog.Keep(f.ID, w, f.Done(), func() bool { return f.Info().State == jobs.Done })
}

func (c *Cache) openBacklog() *upkeep.Backlog {
	return &upkeep.Backlog{Table: &c.index.Wanted, Later: c.later, Log: c.log, Queue: c.queueAgain,
		Dropped: func(_ string, w *upkeep.QueuedJob, err error) {
			if failure.In(err) == nil { // else it is known that it does not compile, and was told
				c.happened(event.For(event.About{Peer: request.Peer{UID: w.UID}, Key: index.RequestKey(request.DigestOf(w.Record)), Model: w.Name},
					event.Cancelled, "not compiled after the daemon's restart: %v", err))
			}
		}}
}

// queueAgain asks for the model as the client did. It implements upkeep.Backlog.Queue.
func (c *Cache) queueAgain(ctx context.Context, id string, w *upkeep.QueuedJob) (bool, error) {
	if w.Source.Kind == "" {
		return false, sources.Gone("the daemon cannot open the model by itself; ask again")
	}
	at, err := sources.Attempt(w.UID, w.Name, w.Model, w.Record)
	if err != nil {
		return false, err
	}
	names, list := []string{w.Name}, []index.Source{w.Source}
	for _, m := range w.Members {
		names, list = append(names, m.Name), append(list, m.Source)
	}
	r, err := c.kept.Reopen(ctx, at, names, list)
	if err != nil {
		return false, err
	}
	defer r.Close()
	r.OnMiss, r.Store, r.StrictORT, r.Runtime = request.Background, w.Store, w.StrictORT, runtimes.Ref{Directory: w.Runtime}
	a, err := c.acquireResumed(ctx, r, request.ResumedJob{ID: id, Starts: w.Starts}, nil)
	switch {
	case err != nil:
		return false, err
	case a.Outcome == request.Later && a.Job == id:
		return true, nil
	case a.View != nil:
		_ = a.View.Close() // only read
	}
	return false, nil
}
