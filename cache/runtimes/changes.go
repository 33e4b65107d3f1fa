package runtimes

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/watch"
)

// changes are the runtimes that are to be assessed: they are new, or other ones than before.
type changes struct {
	mu      sync.Mutex
	pending []*Runtime // guarded by mu
	wake    chan struct{}
}

func newChanges() *changes { return &changes{wake: make(chan struct{}, 1)} }

func (cs *changes) add(rt *Runtime) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if slices.Contains(cs.pending, rt) {
		return
	}
	cs.pending = append(cs.pending, rt)
	select {
	case cs.wake <- struct{}{}:
	default: // it is woken already
	}
}

func (cs *changes) take() *Runtime {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if len(cs.pending) == 0 {
		return nil
	}
	rt := cs.pending[0]
	cs.pending = cs.pending[1:]
	return rt
}

// assessChanges runs until the context ends: what is found changed is probed, and what is stored is judged for it.
func (s *Set) assessChanges(ctx context.Context) {
	for {
		for rt := s.changes.take(); rt != nil && ctx.Err() == nil; rt = s.changes.take() {
			if s.Has(rt) {
				s.assess(ctx, rt)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-s.changes.wake:
		}
	}
}

// MachineEvery is how often the machine is looked at where nothing tells of a change.
const MachineEvery = time.Minute

// LookAtMachine reads the drivers' versions again. When they are other ones, every runtime is looked at
// again. Call it every MachineEvery.
func (s *Set) LookAtMachine(ctx context.Context) {
	lines := s.machine.Look(ctx)
	for _, line := range lines {
		s.log.Info("machine changed", "what", line)
		s.options.Event(index.Event{Kind: event.Changed, Text: line})
	}
	if len(lines) == 0 {
		return
	}
	for _, rt := range s.All() {
		if rt.Found() != nil {
			s.lookAgain(ctx, rt)
		}
	}
}

// watchedDrivers is what is watched besides runtimes.
const watchedDrivers = "drivers"

// watch has the runtime's files watched, those in other places than its folder as well. What a watcher tells is
// only the fast path: every answer compares the files anyway.
func (s *Set) watch(rt *Runtime, rc *Content) {
	if !s.Has(rt) {
		return // taken out while it was looked at
	}
	var paths []string
	if rc == nil {
		paths = append(paths, rt.Name)
	} else {
		for _, f := range rc.files {
			paths = append(paths, f.path)
		}
		for _, f := range rc.folders {
			paths = append(paths, f.path) // a library that is added counts
		}
	}
	s.watcher.Set(rt.subject, paths)
}

// heed runs until the watcher is closed: what changes is looked at without anybody asking.
func (s *Set) heed(ctx context.Context) {
	for e := range s.watcher.Events() {
		if e.Subject == watchedDrivers {
			s.work.Go(func() { s.LookAtMachine(ctx) }) // it may wait for runtimes, and others change too
			continue
		}
		for _, rt := range s.All() {
			if rt.subject == e.Subject {
				s.heedRuntime(ctx, rt, e.Kind)
			}
		}
	}
}

func (s *Set) heedRuntime(ctx context.Context, rt *Runtime, kind watch.Kind) {
	rc := rt.Found()
	if rc != nil && s.holds(rc) {
		rt.state.CompareAndSwap(&stateChanging, &stateReady) // it was touched, and is as it was
		return
	}
	if kind == watch.Changing {
		if rc != nil {
			s.changing(rt)
		}
		return
	}
	s.work.Go(func() {
		// An error has been told and logged by whoever found it.
		_, _ = s.Content(ctx, rt, func(string) {})
	})
}
