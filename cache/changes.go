package cache

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
	pending []*runtime // guarded by mu
	wake    chan struct{}
}

func newChanges() *changes { return &changes{wake: make(chan struct{}, 1)} }

func (cs *changes) add(rt *runtime) {
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

func (cs *changes) take() *runtime {
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
func (c *Cache) assessChanges(ctx context.Context) {
	for {
		for rt := c.changes.take(); rt != nil && ctx.Err() == nil; rt = c.changes.take() {
			if c.runtimes.has(rt) {
				c.assess(ctx, rt)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-c.changes.wake:
		}
	}
}

// machineEvery is how often the machine is looked at where nothing tells of a change.
const machineEvery = time.Minute

// lookAtMachine reads the drivers' versions anew. When they are other ones, every runtime is looked at again.
func (c *Cache) lookAtMachine(ctx context.Context) {
	lines := c.machine.Look(ctx)
	for _, line := range lines {
		c.log.Info("machine changed", "what", line)
		c.happened(Event{Kind: event.Changed, Text: line})
	}
	if len(lines) == 0 {
		return
	}
	for _, rt := range c.runtimes.all() {
		if rt.facts.Load() == nil {
			continue
		}
		if _, err := c.content(ctx, rt, func(string) {}); err != nil && ctx.Err() == nil {
			c.log.Warn("runtime cannot be used", "runtime", rt.name, "error", err)
		}
	}
}

// wantAnew has a build compiled anew in the background, for the runtime of that name. A request that it answers, nil if
// there is none, may bring the model.
func (c *Cache) wantAnew(b *index.Build, runtime, why string, r *Request) {
	c.log.Debug("wanted anew", "build", b.BuildKey.String(), "runtime", runtime, "why", why)
	t := rebuild{c: c, runtime: c.runtimes.named(runtime, b)}
	w := t.wish(b, why)
	w.Refresh, w.Files = true, t.files(r)
	c.rebuilds.Want(w)
}

// The subjects that are watched besides runtimes.
const watchedDrivers = "drivers"

// watchRuntime has the runtime's files watched, those in other places than its folder as well. What a watcher tells is
// only the fast path: every answer compares the files anyway.
func (c *Cache) watchRuntime(rt *runtime, rc *runtimeContent) {
	if !c.runtimes.has(rt) {
		return // taken out while it was looked at
	}
	var paths []string
	if rc == nil {
		paths = append(paths, rt.name)
	} else {
		for _, f := range rc.files {
			paths = append(paths, f.path)
		}
		for _, f := range rc.folders {
			paths = append(paths, f.path) // a library that is added counts
		}
	}
	c.watcher.Set(rt.subject, paths)
}

// heed runs until the watcher is closed: what changes is looked at without anybody asking.
func (c *Cache) heed(ctx context.Context) {
	for e := range c.watcher.Events() {
		if e.Subject == watchedDrivers {
			c.work.Go(func() { c.lookAtMachine(ctx) }) // it may wait for runtimes, and others change too
			continue
		}
		for _, rt := range c.runtimes.all() {
			if rt.subject == e.Subject {
				c.heedRuntime(ctx, rt, e.Kind)
			}
		}
	}
}

func (c *Cache) heedRuntime(ctx context.Context, rt *runtime, kind watch.Kind) {
	rc := rt.facts.Load()
	if rc != nil && c.holds(rc) {
		rt.state.CompareAndSwap(&stateChanging, &stateReady) // it was touched, and is as it was
		return
	}
	if kind == watch.Changing {
		if rc != nil {
			c.changing(rt)
		}
		return
	}
	c.work.Go(func() {
		// An error has been told and logged by whoever found it.
		_, _ = c.content(ctx, rt, func(string) {})
	})
}
