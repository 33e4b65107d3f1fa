package cache

import (
	"context"

	"github.com/epcached/epcached/watch"
)

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
