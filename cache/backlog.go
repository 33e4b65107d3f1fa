package cache

import (
	"context"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/index"
)

// keepQueued has a job in the background outlive the daemon, until it ends.
func (c *Cache) keepQueued(f *jobs.Job, at *attempt) {
	r := at.Request
	w := upkeep.QueuedJob{UID: r.Peer.UID, Name: r.Name, Record: at.plan.record, Model: at.plan.canonical.Model, Runtime: r.Runtime.Directory, Store: r.Store,
		StrictORT: r.StrictORT, Queued: f.Since, Starts: at.resumed.starts}
	var names []string
	for i := range r.models() {
		names = append(names, r.model(i).Name)
	}
	if err := w.SetSources(names, func(i int) (index.Source, error) {
		return c.sources.Reference(context.Background(), r.model(i), r.Peer.UID == c.uid)
	}); err != nil {
		c.log.Info("a queued compile will not outlive the daemon", "model", r.Name, "why", err)
	}
	c.backlog.Keep(f.ID, w, f.Done(), func() bool { return f.Info().State == jobs.Done })
}

func (c *Cache) openBacklog() *upkeep.Backlog {
	return &upkeep.Backlog{Table: &c.index.Wanted, Later: c.later, Log: c.log, Queue: c.queueAgain,
		Dropped: func(_ string, w *upkeep.QueuedJob, err error) {
			if failure.In(err) == nil { // else it is known that it does not compile, and was told
				c.happened(event.For(event.About{Peer: Peer{UID: w.UID}, Key: index.RequestKey(digestOf(w.Record)), Model: w.Name},
					event.Cancelled, "not compiled after the daemon's restart: %v", err))
			}
		}}
}

// queueAgain asks for the model as the client did. It implements upkeep.Backlog.Queue.
func (c *Cache) queueAgain(ctx context.Context, id string, w *upkeep.QueuedJob) (bool, error) {
	if w.Source.Kind == "" {
		return false, noSource("the daemon cannot open the model by itself; ask again")
	}
	at, err := attemptAt(w.UID, w.Name, w.Model, w.Record)
	if err != nil {
		return false, err
	}
	names, sources := []string{w.Name}, []index.Source{w.Source}
	for _, m := range w.Members {
		names, sources = append(names, m.Name), append(sources, m.Source)
	}
	r, err := c.reopened(ctx, at, names, sources)
	if err != nil {
		return false, err
	}
	defer r.close()
	r.OnMiss, r.Store, r.StrictORT, r.Runtime = Background, w.Store, w.StrictORT, runtimes.Ref{Directory: w.Runtime}
	a, err := c.acquireResumed(ctx, r, resumedJob{id, w.Starts}, nil)
	switch {
	case err != nil:
		return false, err
	case a.Outcome == Later && a.Job == id:
		return true, nil
	case a.View != nil:
		_ = a.View.Close() // only read
	}
	return false, nil
}
