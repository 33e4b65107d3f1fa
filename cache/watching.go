package cache

import "context"

// watching has files watched. What it tells is only the fast path: every answer compares the files anyway.
type watching struct{ done chan struct{} }

func newWatching() *watching { return &watching{done: make(chan struct{})} }

// watchedDrivers is the subject of the drivers' files.
const watchedDrivers = "drivers"

// Set says which paths make up a subject.
func (w *watching) Set(string, []string) {}

// How says how a subject is watched.
func (w *watching) How(string) string { return "at each request" }

// Close ends heed.
func (w *watching) Close() error {
	close(w.done)
	return nil
}

// heed runs until the watching is closed.
func (c *Cache) heed(context.Context) { <-c.watcher.done }

// watchRuntime has the runtime's files watched.
func (c *Cache) watchRuntime(rt *runtime, rc *runtimeContent) {
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
	c.watcher.Set(rt.name, paths)
}
