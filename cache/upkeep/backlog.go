package upkeep

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// QueuedJob is a background job as the index stores it. No client waits for it, so after a restart
// no client would request it again.
type QueuedJob struct {
	UID       uint32
	Name      string
	Record    []byte // of the request
	Model     cas.Digest
	Source    index.Source // zero: the model cannot be found again
	Members   []QueuedMember
	Runtime   string // directory; "": the default
	Store     string
	StrictORT bool
	Queued    time.Time
	// Starts counts the daemons that resumed the job and crashed before its end.
	Starts int
}

// QueuedMember is a model of a group after the first one.
type QueuedMember struct {
	Name   string
	Source index.Source
}

// validPaths reports whether the paths are valid UTF-8, which the row in the index requires.
func validPaths(s index.Source) bool {
	paths := append(slices.Collect(maps.Values(s.External)), s.Path)
	return !slices.ContainsFunc(paths, func(path string) bool { return !utf8.ValidString(path) })
}

// Backlog preserves queued background jobs over restarts: a job is in the index from its acceptance
// to its end, and the next daemon resumes it under the same id. That requires that the model can be
// opened again, so its files must belong to the daemon's own user or be readable by all. For other
// jobs an event asks the clients to repeat the request. All fields must be set.
type Backlog struct {
	Later   func(func(context.Context)) // runs a function in the background
	Sources *workspace.Sources          // opens the models
	Log     *slog.Logger

	// Acquire answers a request for a job that an earlier daemon did not finish.
	Acquire func(context.Context, *request.Request, request.ResumedJob,
		func(request.Progress)) (*request.Answer, error)
}

// maxStarts bounds how often a job is resumed, because a job that no daemon has finished may be
// what crashes them.
const maxStarts = 3

// Save stores the attempt's job in the index until the job ends.
func (l *Backlog) Save(j *jobs.Job, at *request.Attempt) {
	w := QueuedJob{UID: at.Peer.UID, Name: at.Name, Record: at.Plan.Record,
		Model: at.Plan.Canonical.Model, Runtime: at.Runtime.Directory, Store: at.Store,
		StrictORT: at.StrictORT, Queued: j.Since, Starts: at.Resumed.Starts}
	if err := l.find(&w, at.Request); err != nil {
		w.Source, w.Members = index.Source{}, nil
		l.Log.Info("a queued compile will be lost when the daemon "+
			"ends", "model", at.Name, "why", err)
	}
	save := func() bool {
		row, err := json.Marshal(w)
		if err == nil {
			err = l.Sources.Store.Index().Wanted.SaveNow([]byte(j.ID), row)
		}
		if err != nil {
			l.Log.Warn("a queued compile will be lost when the daemon "+
				"ends", "model", w.Name, "error", err)
		}
		return err == nil
	}
	if !save() {
		return
	}
	l.Later(func(ctx context.Context) {
		select {
		case <-j.Done():
			if ctx.Err() == nil || j.Info().State == jobs.Done {
				l.Sources.Store.Index().Wanted.Drop([]byte(j.ID))
				return
			} // keep it if the daemon is ending, which may have ended the job
		case <-ctx.Done():
		}
		w.Starts = 0 // a clean stop, which this job did not cause
		save()
	})
}

// find records where to open the models of a request again.
func (l *Backlog) find(w *QueuedJob, r *request.Request) error {
	for i, model := range r.AllModels() {
		s, err := l.Sources.References.RememberPaths(context.Background(), model,
			r.Peer.UID == l.Sources.UID)
		if err == nil && !validPaths(s) {
			err = errors.New("a path is not UTF-8")
		}
		if err != nil {
			return fmt.Errorf("%s: %w", model.Name, err)
		}
		if i == 0 {
			w.Source = s
		} else {
			w.Members = append(w.Members, QueuedMember{Name: model.Name, Source: s})
		}
	}
	return nil
}

// UnfinishedJobs returns the jobs that earlier daemons have not finished. Call it before the first
// request.
func (l *Backlog) UnfinishedJobs() map[string][]byte {
	rows, err := l.Sources.Store.Index().Wanted.All()
	if err != nil {
		l.Log.Warn("cannot read queued compiles", "error", err)
	}
	return rows
}

// Resume queues again what UnfinishedJobs returned, the oldest first.
func (l *Backlog) Resume(ctx context.Context, rows map[string][]byte) {
	type queued struct {
		id string
		QueuedJob
	}
	var all []*queued
	for id, row := range rows {
		w := &queued{id: id}
		if json.Unmarshal(row, &w.QueuedJob) != nil {
			// perhaps from a later version of epcached
			l.Sources.Store.Index().Wanted.Drop([]byte(id))
			continue
		}
		all = append(all, w)
	}
	slices.SortFunc(all, func(a, b *queued) int {
		return cmp.Or(cmp.Compare(a.Queued.UnixNano(), b.Queued.UnixNano()),
			cmp.Compare(a.id, b.id))
	})
	for _, w := range all {
		// A job that may crash this daemon too is resumed after the others.
		if w.Starts++; w.Starts > 1 && w.Starts <= maxStarts {
			l.Later(func(ctx context.Context) {
				select {
				case <-time.After(Backoff(w.Starts - 1)):
					l.resume(ctx, w.id, &w.QueuedJob)
				case <-ctx.Done():
				}
			})
			continue
		}
		l.resume(ctx, w.id, &w.QueuedJob)
	}
}

func (l *Backlog) resume(ctx context.Context, id string, w *QueuedJob) {
	var again bool
	err := fmt.Errorf("%d daemons ended before it was compiled", w.Starts)
	if w.Starts <= maxStarts {
		again, err = l.queue(ctx, id, w)
	}
	switch {
	case ctx.Err() != nil:
		return // keep it for the next start
	case again:
		l.Log.Info("a compile from before the daemon's restart is queued again",
			"model", w.Name, "job", id)
		return
	}
	l.Sources.Store.Index().Wanted.Drop([]byte(id))
	if err != nil {
		// other failures are remembered and reported already
		if failure.FromError(err) == nil {
			l.Sources.Store.RecordEvent(event.For(event.About{Peer: request.Peer{UID: w.UID},
				Key: index.RequestKey(request.DigestOf(w.Record)), Model: w.Name},
				event.Cancelled, "not compiled after the daemon's restart: %v", err))
		}
		l.Log.Info("a compile from before the daemon's restart is dropped",
			"model", w.Name, "job", id, "why", err)
	}
}

// queue requests the model as the client did, and reports whether the job is in the backlog again.
func (l *Backlog) queue(ctx context.Context, id string, w *QueuedJob) (bool, error) {
	if w.Source.Kind == "" {
		return false, workspace.NoSource("the daemon cannot open the model by itself; request " +
			"it again")
	}
	at, err := workspace.Attempt(w.UID, w.Name, w.Model, w.Record)
	if err != nil {
		return false, err
	}
	names, list := []string{w.Name}, []index.Source{w.Source}
	for _, m := range w.Members {
		names, list = append(names, m.Name), append(list, m.Source)
	}
	r, err := l.Sources.Reopen(ctx, at, names, list)
	if err != nil {
		return false, err
	}
	defer r.Close()
	r.OnMiss, r.Store, r.StrictORT = request.Background, w.Store, w.StrictORT
	r.Runtime = runtimes.Ref{Directory: w.Runtime}
	a, err := l.Acquire(ctx, r, request.ResumedJob{ID: id, Starts: w.Starts}, nil)
	switch {
	case err != nil:
		return false, err
	case a.Outcome == request.Later && a.Job == id:
		return true, nil
	case a.View != nil:
		_ = a.View.Close() // opened for reading, so no data can be lost
	}
	return false, nil
}
