package upkeep

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// QueuedJob is a job that was queued in the background, as the index keeps it. No client waits for it,
// so that after a restart of the daemon none would ask again.
type QueuedJob struct {
	UID       uint32
	Name      string
	Record    []byte // of the request
	Model     cas.Digest
	Source    index.Source // none: the model cannot be found again
	Members   []QueuedMember
	Runtime   string // folder; "": the default
	Store     string
	StrictORT bool
	Queued    time.Time
	Starts    int // of daemons that took it up, and died before its end; a clean stop does not count
}

// QueuedMember is a further model of a group.
type QueuedMember struct {
	Name   string
	Source index.Source
}

// SetSources remembers where the models of the job, one for each name, are found again. After an error
// of find, none is.
func (w *QueuedJob) SetSources(names []string, find func(model int) (index.Source, error)) error {
	for i, name := range names {
		s, err := find(i)
		if err == nil && !validPaths(s) {
			err = errors.New("a path is not UTF-8")
		}
		if err != nil {
			w.Source, w.Members = index.Source{}, nil
			return fmt.Errorf("%s: %w", name, err)
		}
		if i == 0 {
			w.Source = s
			continue
		}
		w.Members = append(w.Members, QueuedMember{Name: name, Source: s})
	}
	return nil
}

// validPaths reports whether the row in the index, which is text, can hold the paths.
func validPaths(s index.Source) bool {
	for _, path := range s.External {
		if !utf8.ValidString(path) {
			return false
		}
	}
	return utf8.ValidString(s.Path)
}

// Backlog has queued jobs outlive the daemon: a job is in the index from its acceptance to its end, and
// the next daemon takes it up under the same id. That needs the model to be found again, so it is for
// files of the daemon's own user, or that all users may read. Clients of other jobs are told, by an
// event, to ask again.
type Backlog struct {
	Table *index.Table                // of the jobs, by their ids
	Later func(func(context.Context)) // runs a function in the background
	Log   *slog.Logger

	// Queue queues a job again, and reports whether it is in the backlog again under its id.
	Queue func(ctx context.Context, id string, w *QueuedJob) (bool, error)

	// Dropped is called for a job that cannot be queued again.
	Dropped func(id string, w *QueuedJob, err error)
}

// maxStarts bounds how often a job is taken up again, because a job of which no daemon has seen the end
// may be what ends them.
const maxStarts = 3

// Keep has a job outlive the daemon until done is closed. completed reports whether the job was then
// successful, and not ended by the daemon's own end.
func (l *Backlog) Keep(id string, w QueuedJob, done <-chan struct{}, completed func() bool) {
	save := func() bool {
		row, err := json.Marshal(w)
		if err == nil {
			err = l.Table.SaveNow([]byte(id), row)
		}
		if err != nil {
			l.Log.Warn("a queued compile will not outlive the daemon", "model", w.Name, "error", err)
		}
		return err == nil
	}
	if !save() {
		return
	}
	l.Later(func(ctx context.Context) {
		select {
		case <-done:
			if ctx.Err() == nil || completed() {
				l.Table.Drop([]byte(id))
				return
			} // else the end of the daemon may have been that of the job
		case <-ctx.Done():
		}
		w.Starts = 0 // the daemon was ended, and did not end of this
		save()
	})
}

// Rows returns the jobs that earlier daemons had not completed. It is called before requests are
// accepted.
func (l *Backlog) Rows() map[string][]byte {
	rows, err := l.Table.All()
	if err != nil {
		l.Log.Warn("queued compiles of before not found", "error", err)
	}
	return rows
}

// TakeUp queues again what Rows returned, the oldest first.
func (l *Backlog) TakeUp(ctx context.Context, rows map[string][]byte) {
	type queued struct {
		id string
		QueuedJob
	}
	var all []*queued
	for id, row := range rows {
		w := &queued{id: id}
		if json.Unmarshal(row, &w.QueuedJob) != nil {
			l.Table.Drop([]byte(id)) // of a later epcached, perhaps
			continue
		}
		all = append(all, w)
	}
	slices.SortFunc(all, func(a, b *queued) int {
		return cmp.Or(cmp.Compare(a.Queued.UnixNano(), b.Queued.UnixNano()), cmp.Compare(a.id, b.id))
	})
	for _, w := range all {
		if w.Starts++; w.Starts > 1 && w.Starts <= maxStarts { // it may end this daemon too: others are taken up before
			l.Later(func(ctx context.Context) {
				select {
				case <-time.After(Backoff(w.Starts - 1)):
					l.takeUp(ctx, w.id, &w.QueuedJob)
				case <-ctx.Done():
				}
			})
			continue
		}
		l.takeUp(ctx, w.id, &w.QueuedJob)
	}
}

func (l *Backlog) takeUp(ctx context.Context, id string, w *QueuedJob) {
	var again bool
	err := fmt.Errorf("%d daemons ended before it did", w.Starts)
	if w.Starts <= maxStarts {
		again, err = l.Queue(ctx, id, w)
	}
	switch {
	case ctx.Err() != nil:
		return // for the next start
	case again:
		l.Log.Info("a compile that was queued before the daemon's start is queued again", "model", w.Name, "job", id)
		return
	}
	l.Table.Drop([]byte(id))
	if err != nil {
		l.Dropped(id, w, err)
		l.Log.Info("a compile that was queued before the daemon's start is not queued again", "model", w.Name, "job", id, "why", err)
	}
}
