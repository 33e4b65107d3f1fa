package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// linkRuntime makes a runtime directory in which each file is a link to the one of a real runtime,
// so that directories can be renamed and files replaced without copying hundreds of megabytes.
func linkRuntime(t *testing.T, dir, of string) {
	t.Helper()
	err := filepath.WalkDir(of, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(of, path)
		if err != nil {
			return err
		}
		to := filepath.Join(dir, name)
		if d.IsDir() {
			return os.MkdirAll(to, 0o755)
		}
		if !strings.Contains(d.Name(), ".so") {
			return nil
		}
		return replaceLink(path, to)
	})
	require.NoError(t, err)
}

// replaceLink puts a link in the place of whatever is there, by one rename.
func replaceLink(to, path string) error {
	if err := os.Symlink(to, path+".new"); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// swap is a runtime in one place that is now one SDK and now another.
type swap struct {
	*testing.T
	place string
	trees [2]string // the likenesses, or the real ones
}

// The ways in which an SDK gets into the place of another.
var waysToSwap = map[string]struct {
	prepare func(s *swap, real [2]string)
	change  func(s *swap, from, to int)
}{
	"symbolic link switched": {
		func(s *swap, real [2]string) {
			s.trees = real
			require.NoError(s, os.Symlink(real[0], s.place))
		},
		func(s *swap, _, to int) { require.NoError(s, replaceLink(s.trees[to], s.place)) },
	},
	"directories renamed": {
		func(s *swap, real [2]string) {
			for i := range real {
				s.trees[i] = filepath.Join(filepath.Dir(s.place), []string{"a", "b"}[i])
				linkRuntime(s.T, s.trees[i], real[i])
			}
			require.NoError(s, os.Rename(s.trees[0], s.place))
		},
		func(s *swap, from, to int) {
			require.NoError(s, os.Rename(s.place, s.trees[from]))
			time.Sleep(20 * time.Millisecond) // a moment without any
			require.NoError(s, os.Rename(s.trees[to], s.place))
		},
	},
	"files replaced one by one": {
		func(s *swap, real [2]string) {
			s.trees = real
			linkRuntime(s.T, s.place, real[0])
		},
		func(s *swap, _, to int) { linkRuntime(s.T, s.place, s.trees[to]) },
	},
	"uninstalled and installed": {
		func(s *swap, real [2]string) {
			s.trees = real
			linkRuntime(s.T, s.place, real[0])
		},
		func(s *swap, _, to int) {
			require.NoError(s, os.RemoveAll(s.place))
			linkRuntime(s.T, s.place, s.trees[to])
		},
	},
}

// TestRuntimeIsReplaced has an SDK updated, and the update taken back, under a running daemon with
// an application at work: no answer is ever for the SDK of before, and what was compiled for it is
// there again when it is.
func TestRuntimeIsReplaced(t *testing.T) {
	t.Parallel()
	real := [2]string{runtimeDir(t, qnn), runtimeDir(t, olderQNN)}
	for name, way := range waysToSwap {
		t.Run(name, func(t *testing.T) {
			s := &swap{T: t, place: filepath.Join(shortDir(t), "runtime")}
			way.prepare(s, real)
			d := newSite(t, s.place).start(t)
			model := writeModel(t, t.TempDir(), 1)
			c := d.dial()
			first := get(t, c, model, withEPs(qnnProvider()))
			require.Equal(t, "compiled", first.Outcome)
			require.Equal(t, "hit", get(t, c, model, withEPs(qnnProvider())).Outcome)

			watch := d.watch(t, model)
			from := time.Now()
			way.change(s, 0, 1)
			until := time.Now()
			second := get(t, c, model, withEPs(qnnProvider()))
			require.NotEqual(t, first.SdkVersion, second.SdkVersion)
			require.NotEqual(t, first.Build, second.Build)
			require.Equal(t, first.RequestKey, second.RequestKey)
			second.requireRight(t)
			watch.requireOnly(t, from, until, first.SdkVersion, second.SdkVersion)

			watch = d.watch(t, model)
			from = time.Now()
			way.change(s, 1, 0)
			until = time.Now()
			back := get(t, c, model, withEPs(qnnProvider()), onMissFail)
			require.Equal(t, "hit", back.Outcome)
			require.Equal(t, first.Build, back.Build)
			require.Equal(t, first.names(), back.names())
			back.requireRight(t)
			watch.requireOnly(t, from, until, second.SdkVersion, first.SdkVersion)
			require.EqualValues(t, 2, d.status().Compiles)
		})
	}
}

// An application that has loaded an SDK goes on with it when another SDK replaces it on disk. A
// build for the new SDK does not fit the application, although the path is the same. A build for
// the earlier one does not either, because the rest of that SDK is loaded by path, when a session
// is made.
func TestApplicationOfTheReplacedRuntime(t *testing.T) {
	t.Parallel()
	real := [2]string{runtimeDir(t, qnn), runtimeDir(t, olderQNN)}
	s := &swap{T: t, place: filepath.Join(shortDir(t), "runtime")}
	way := waysToSwap["symbolic link switched"]
	way.prepare(s, real)
	found, err := compilers.Find(s.place)
	require.NoError(t, err)
	library, err := found.Library("QNNExecutionProvider")
	require.NoError(t, err)
	loaded := openFile(t, library.Path)
	model, other := openFile(t, writeModel(t, t.TempDir(), 1)),
		openFile(t, writeModel(t, t.TempDir(), 2))
	request := forModel(model.Name(), qnnProvider())
	fd := uint32(1)
	request.Runtime = &wire.Runtime{OrtVersion: found.ORTVersion, OrtLibrary: found.ORTLibrary,
		EpLibraries: []*wire.EpLibrary{{Ep: "QNNExecutionProvider", Path: library.Path, Fd: &fd}}}

	for name, registered := range map[string][]string{"registered": {s.place},
		"named by the application": nil} {
		t.Run(name, func(t *testing.T) {
			c := newSite(t, registered...).start(t).dial()
			acquire := func(model *os.File) (lease, error) {
				reply, view, err := c.Acquire(limited(t), request, []*os.File{model, loaded}, nil,
					nil)
				if view != nil {
					t.Cleanup(func() { view.Close() })
				}
				return lease{reply, view}, err
			}
			first, err := acquire(model)
			require.NoError(t, err)
			way.change(s, 0, 1)
			defer likeBefore(s, way.change)
			_, err = acquire(other)
			require.ErrorIs(t, err, unixsock.ErrUnavailable,
				"nothing can be compiled with what is not there")
			require.ErrorContains(t, err, library.Path)
			_, err = acquire(model)
			require.ErrorIs(t, err, unixsock.ErrUnavailable)
			require.ErrorContains(t, err, library.Path)
			likeBefore(s, way.change)
			back, err := acquire(model)
			require.NoError(t, err)
			require.Equal(t, "hit", back.Outcome)
			require.Equal(t, first.Build, back.Build)
		})
	}
}

// likeBefore puts the first SDK back, if it is not there.
func likeBefore(s *swap, change func(s *swap, from, to int)) {
	if at, err := filepath.EvalSymlinks(s.place); err == nil && at != s.trees[0] {
		change(s, 1, 0)
	}
}

// onlooker is an application that asks for a model all the time.
type onlooker struct {
	stop context.CancelFunc
	done sync.WaitGroup
	mu   sync.Mutex
	seen []sight // guarded by mu
}

type sight struct {
	asked, answered time.Time
	sdk             string
	err             error
}

func (d *epcached) watch(t *testing.T, model string) *onlooker {
	ctx, stop := context.WithCancel(t.Context())
	w := &onlooker{stop: stop}
	c := d.dial()
	f := openFile(t, model)
	w.done.Go(func() {
		for ctx.Err() == nil {
			one := sight{asked: time.Now()}
			reply, view, err := c.Acquire(limited(t), forModel(model, qnnProvider()), []*os.File{f},
				nil, nil)
			one.answered, one.err = time.Now(), err
			if err == nil {
				one.sdk = reply.SdkVersion
				one.err = lease{reply, view}.wrong()
				view.Close()
			}
			w.mu.Lock()
			w.seen = append(w.seen, one)
			w.mu.Unlock()
		}
	})
	require.Eventually(t, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.seen) > 0
	}, patience, time.Millisecond, "no answer")
	return w
}

// requireOnly ends the watching, and requires the old SDK before the change, the new one after it,
// and one of both or a clear error between.
func (w *onlooker) requireOnly(t *testing.T, from, until time.Time, before, after string) {
	t.Helper()
	require.Eventually(t, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.seen) > 0 && w.seen[len(w.seen)-1].asked.After(until)
	}, patience, time.Millisecond, "no answer to what was asked after the change")
	w.stop()
	w.done.Wait()
	counts := make(map[string]int)
	for _, s := range w.seen {
		switch {
		case s.answered.Before(from):
			require.NoError(t, s.err)
			require.Equal(t, before, s.sdk)
			counts["before"]++
		case s.asked.After(until):
			require.NoError(t, s.err)
			require.Equal(t, after, s.sdk, "asked %v after the change", s.asked.Sub(until))
			counts["after"]++
		case s.err != nil:
			clear := errors.Is(s.err, unixsock.ErrUnavailable) || errors.Is(s.err, unixsock.ErrBusy)
			require.True(t, clear, "%v", s.err)
			counts["refused"]++
		default:
			require.Contains(t, []string{before, after}, s.sdk)
			counts["during"]++
		}
	}
	t.Log(counts)
	require.NotZero(t, counts["before"])
	require.NotZero(t, counts["after"])
}
