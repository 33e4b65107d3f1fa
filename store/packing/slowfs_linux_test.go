package packing

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// restless is a file system where each change of names takes its time, so that others come in
// between, and where nothing waits for a disk.
type restless struct {
	cas.FS
	*trail
}

func (r restless) Sync(*os.File) error  { pause(); return nil }
func (r restless) SyncDir(string) error { pause(); return nil }

func (r restless) Link(from, to string) error {
	return r.change("link", to, func() error { return r.FS.Link(from, to) })
}

func (r restless) Remove(path string) error {
	return r.change("remove", path, func() error { return r.FS.Remove(path) })
}

func (r restless) Rename(from, to string) error {
	return r.change("rename", to, func() error { return r.FS.Rename(from, to) })
}

func (r restless) change(what, path string, do func() error) error {
	pause()
	defer pause()
	err := do()
	dir, name := filepath.Split(path)
	if d, noBlob := cas.ParseDigest(name); noBlob == nil {
		state := filepath.Join(dir, "..", "..")
		made, _ := dedupe.ReadRecipeStore(state).Get(d) // of what has none, nil
		if kind := filepath.Base(filepath.Dir(filepath.Clean(dir))); kind == "recipes" &&
			made != nil {
			r.add("%s recipe of %s, which takes from %v: %v", what, d, made.Bases, err)
		} else {
			r.add("%s %s of %s: %v", what, kind, d, err)
		}
	}
	return err
}

// pause lets others go first, now and then for longer.
func pause() {
	switch n := rand.IntN(20); {
	case n == 0:
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
	case n < 8:
		runtime.Gosched()
	}
}

// trail is what was done, in order, by which goroutine. It is a slog.Handler.
type trail struct {
	mu    sync.Mutex
	lines []string          // guarded by mu
	names *strings.Replacer // of digests
}

func (t *trail) add(format string, args ...any) {
	line := fmt.Sprintf("%s %s", goroutine(), fmt.Sprintf(format, args...))
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = append(t.lines, line)
}

// take returns what was done since it was called last.
func (t *trail) take() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := strings.Join(t.lines, "\n")
	t.lines = nil
	return t.names.Replace(all)
}

// goroutine names the one that calls it, as stack traces do.
func goroutine() string {
	var b [64]byte
	name, _, _ := strings.Cut(string(b[:runtime.Stack(b[:], false)]), " [")
	return name
}

func (t *trail) Enabled(context.Context, slog.Level) bool { return true }
func (t *trail) WithAttrs([]slog.Attr) slog.Handler       { return t }
func (t *trail) WithGroup(string) slog.Handler            { return t }

func (t *trail) Handle(_ context.Context, r slog.Record) error {
	line := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool { line += " " + a.String(); return true })
	t.add("%s", line)
	return nil
}
