package cache

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// A job that was queued in the background outlives the daemon: nobody waits for it who would ask again. What it is stands in the index from
// its acceptance to its end, and the next daemon takes it up under the same id. That needs the model to be found again, so it goes for files
// of the daemon's own user, asked for by that user; others' are told, by an event, to ask again.

// queuedJob is such a job, as it is kept.
type queuedJob struct {
	UID       uint32
	Name      string
	Record    []byte // of the request
	Model     cas.Digest
	Source    index.Source // none: the model cannot be found again
	Members   []queuedMember
	Runtime   string // folder; "": the default
	Store     string
	StrictORT bool
	Queued    time.Time
	Starts    int // of daemons that took it up, and died before its end; a clean stop does not count
}

type queuedMember struct {
	Name   string
	Source index.Source
}

// maxStarts bounds how often a job is taken up again. One that no daemon has seen the end of may be what ends them.
const maxStarts = 3

// keepWanted has the job outlive the daemon, until it ends.
func (c *Cache) keepWanted(f *flight, at *attempt) {
	r := at.Request
	w := queuedJob{UID: r.Peer.UID, Name: r.Name, Record: at.plan.record, Model: at.plan.canonical.Model, Runtime: r.Runtime.Directory, Store: r.Store,
		StrictORT: r.StrictORT, Queued: f.queued, Starts: at.resumed.starts}
	for i := range r.models() {
		m := r.model(i)
		s, err := c.sources.Reference(context.Background(), m, r.Peer.UID == c.uid)
		if err == nil && !validPaths(s) {
			err = errors.New("a path is not UTF-8")
		}
		if err != nil {
			c.log.Info("a queued compile will not outlive the daemon", "model", m.Name, "why", err)
			w.Source, w.Members = index.Source{}, nil
			break
		}
		if i == 0 {
			w.Source = s
			continue
		}
		w.Members = append(w.Members, queuedMember{Name: m.Name, Source: s})
	}
	save := func() error {
		row, err := json.Marshal(w)
		if err != nil {
			return err
		}
		return c.index.Wanted.SaveNow([]byte(f.id), row)
	}
	if err := save(); err != nil {
		c.log.Warn("a queued compile will not outlive the daemon", "model", r.Name, "error", err)
		return
	}
	c.later(func(ctx context.Context) {
		select {
		case <-f.done:
			if ctx.Err() == nil || f.job().State == JobDone {
				c.index.Wanted.Drop([]byte(f.id))
				return
			} // else the end of the daemon may have been that of the job
		case <-ctx.Done():
		}
		w.Starts = 0 // the daemon was ended, and did not end of this
		if err := save(); err != nil {
			c.log.Warn("a queued compile will not outlive the daemon", "model", w.Name, "error", err)
		}
	})
}

// validPaths tells whether the record in the index, which is text, can hold the paths.
func validPaths(s index.Source) bool {
	for _, path := range s.External {
		if !utf8.ValidString(path) {
			return false
		}
	}
	return utf8.ValidString(s.Path)
}

// wantedBefore gives what earlier daemons had not done when they ended. It is asked before this one takes requests.
func (c *Cache) wantedBefore() map[string][]byte {
	rows, err := c.index.Wanted.All()
	if err != nil {
		c.log.Warn("queued compiles of before not found", "error", err)
	}
	return rows
}

// takeUp queues again what wantedBefore gave.
func (c *Cache) takeUp(ctx context.Context, rows map[string][]byte) {
	all := make(map[string]*queuedJob)
	for id, row := range rows {
		w := new(queuedJob)
		if json.Unmarshal(row, w) != nil {
			c.index.Wanted.Drop([]byte(id)) // of a later epcached, perhaps
			continue
		}
		all[id] = w
	}
	ids := sortedKeys(all)
	slices.SortStableFunc(ids, func(a, b string) int { return cmp.Compare(all[a].Queued.UnixNano(), all[b].Queued.UnixNano()) })
	for _, id := range ids {
		w := all[id]
		if w.Starts++; w.Starts > 1 && w.Starts <= maxStarts { // what it did to the last one it may do to this: others are taken up before
			c.later(func(ctx context.Context) {
				select {
				case <-time.After(upkeep.Backoff(w.Starts - 1)):
					c.takeUpOne(ctx, id, w)
				case <-ctx.Done():
				}
			})
			continue
		}
		c.takeUpOne(ctx, id, w)
	}
}

// takeUpOne asks for the model as whoever wanted it did.
func (c *Cache) takeUpOne(ctx context.Context, id string, w *queuedJob) {
	a, err := c.askAgain(ctx, id, w)
	if ctx.Err() != nil {
		return // for the next start
	}
	if err == nil && a.Outcome == Later && a.Job == id {
		c.log.Info("a compile that was queued before the daemon's start is queued again", "model", w.Name, "job", id)
		return // it is kept again
	}
	c.index.Wanted.Drop([]byte(id))
	switch {
	case err == nil && a.View != nil:
		err = a.View.Close()
	case failure.In(err) != nil: // that it does not compile is known, and was told
	case err != nil:
		c.happened(event.For(event.About{Peer: Peer{UID: w.UID}, Key: index.RequestKey(digestOf(w.Record)), Model: w.Name},
			event.Cancelled, "not compiled after the daemon's restart: %v", err))
	}
	if err != nil {
		c.log.Info("a compile that was queued before the daemon's start is not queued again", "model", w.Name, "job", id, "why", err)
	}
}

func (c *Cache) askAgain(ctx context.Context, id string, w *queuedJob) (*Answer, error) {
	switch {
	case w.Starts > maxStarts:
		return nil, fmt.Errorf("%d daemons ended before it did", w.Starts)
	case w.Source.Kind == "":
		return nil, noSource("the daemon cannot open the model by itself; ask again")
	}
	at, err := attemptAt(w.UID, w.Name, w.Model, w.Record)
	if err != nil {
		return nil, err
	}
	names, sources := []string{w.Name}, []index.Source{w.Source}
	for _, m := range w.Members {
		names, sources = append(names, m.Name), append(sources, m.Source)
	}
	r, err := c.reopened(ctx, at, names, sources)
	if err != nil {
		return nil, err
	}
	defer r.close()
	r.OnMiss, r.Store, r.StrictORT, r.Runtime = Background, w.Store, w.StrictORT, RuntimeRef{Directory: w.Runtime}
	return c.acquireResumed(ctx, r, resumedJob{id, w.Starts}, nil)
}
