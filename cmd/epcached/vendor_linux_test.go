package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Vendor code that does what vendor code does, in the place of QNN's library beside a real ONNX
// Runtime.
const (
	crashes = `#include <signal.h>
		void *CreateEpFactories(void) { raise(SIGSEGV); return 0; }
		void *ReleaseEpFactory(void) { return 0; }`
	aborts = `#include <stdio.h>
		#include <stdlib.h>
		void *CreateEpFactories(void) { fprintf(stderr, "licence server on fire\n"); abort(); }
		void *ReleaseEpFactory(void) { return 0; }`
	leaves = `#include <stdlib.h>
		void *CreateEpFactories(void) { exit(0); }
		void *ReleaseEpFactory(void) { return 0; }`
	hangs = `#include <unistd.h>
		void *CreateEpFactories(void) { for (;;) pause(); }
		void *ReleaseEpFactory(void) { return 0; }`
	crashesAtLoad = `__attribute__((constructor)) static void begin(void) { *(volatile int *)0 ` +
		`= 1; }
		void *CreateEpFactories(void) { return 0; }
		void *ReleaseEpFactory(void) { return 0; }`
	lacksSymbols = `int nothing;`
)

// vendorLibrary compiles C to a shared library.
func vendorLibrary(t *testing.T, path, source string) {
	t.Helper()
	compiler, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("SKIPPED: no C compiler to build the faulty execution provider with")
	}
	file := filepath.Join(t.TempDir(), "ep.c")
	require.NoError(t, os.WriteFile(file, []byte(source), 0o644))
	out, err := exec.Command(compiler, "-shared", "-fPIC", "-o", path, file).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// faultyRuntime is a runtime with the real ONNX Runtime of another, and the library as QNN's.
func faultyRuntime(t *testing.T, of string, make func(path string)) string {
	t.Helper()
	real, err := compilers.Find(of)
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t,
		os.Symlink(real.ORTLibrary, filepath.Join(dir, filepath.Base(real.ORTLibrary))))
	make(filepath.Join(dir, "libonnxruntime_providers_qnn.so"))
	return dir
}

func TestLibrariesThatDoNotWork(t *testing.T) {
	t.Parallel()
	real := runtimeDir(t, openVINO)
	s := newSite(t, real)
	r := newRefusals(t, s)
	hurried := newSite(t, real)
	// for what hangs: a busy machine takes as long for the others
	hurried.config = unmeasured + "[limits]\nwall = \"4s\"\n"
	fromC := func(source string) func(*testing.T) string {
		return func(t *testing.T) string {
			return faultyRuntime(t, real, func(path string) { vendorLibrary(t, path, source) })
		}
	}
	ofBytes := func(text string) func(*testing.T) string {
		return func(t *testing.T) string {
			return faultyRuntime(t, real,
				func(path string) { require.NoError(t, os.WriteFile(path, []byte(text), 0o755)) })
		}
	}
	cases := map[string]struct {
		runtime func(*testing.T) string
		says    []string
	}{
		"text": {ofBytes("no library"),
			[]string{"libonnxruntime_providers_qnn.so"}},
		"empty": {ofBytes(""), []string{"libonnxruntime_providers_qnn.so"}},
		"an ELF header only": {ofBytes("\x7fELF\x02\x01\x01"),
			[]string{"libonnxruntime_providers_qnn.so"}},
		"no entry points":        {fromC(lacksSymbols), []string{"CreateEpFactories"}},
		"SIGSEGV":                {fromC(crashes), []string{"segmentation fault"}},
		"SIGSEGV when loaded":    {fromC(crashesAtLoad), []string{"segmentation fault"}},
		"abort with a last word": {fromC(aborts), []string{"abort", "licence server on fire"}},
		"exit":                   {fromC(leaves), []string{"exit"}},
		"hang":                   {fromC(hangs), []string{"time limit"}},
		"ONNX Runtime is broken": {func(t *testing.T) string {
			dir := t.TempDir()
			for _, name := range []string{"libonnxruntime.so.1.31.1",
				"libonnxruntime_providers_qnn.so"} {
				require.NoError(t,
					os.WriteFile(filepath.Join(dir, name), []byte("no library"), 0o755))
			}
			return dir
		}, []string{"libonnxruntime.so.1.31.1"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			request := forModel(r.good, qnnProvider())
			request.Runtime = &wire.Runtime{Directory: c.runtime(t)}
			r := r
			if name == "hang" {
				r = newRefusals(t, hurried)
			}
			r.refused(t, request, []*os.File{openFile(t, r.good)}, nil, unixsock.ErrUnavailable,
				c.says...)
			require.Empty(t, keepersOf(r.pid()), "no process stays behind")
		})
	}
}

// The compiler crashes in the middle of a real compile, or is killed by the kernel when memory is
// short, and again when it is retried.
func TestCompilerCrash(t *testing.T) {
	t.Parallel()
	r := newRefusals(t, newSite(t, runtimeDir(t, openVINO)))
	path := filepath.Join(r.dir, "large.onnx")
	cases := []struct {
		name   string
		signal syscall.Signal
		says   string
	}{
		{"SIGSEGV", syscall.SIGSEGV, "compiler crashed (SIGSEGV): segmentation fault"},
		{"SIGABRT", syscall.SIGABRT, "compiler crashed (SIGABRT): aborted"},
		{"SIGKILL", syscall.SIGKILL, "killed"},
	}
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			// takes a while
			require.NoError(t, os.WriteFile(path, compilertest.Dense(uint64(2+i), 4000, 1), 0o644))
			ended := make(chan struct{})
			var striker sync.WaitGroup
			striker.Go(func() { r.strike(2, c.signal, ended) })
			e := r.refused(t, forModel(path), []*os.File{openFile(t, path)}, nil,
				unixsock.ErrCompileFailed, "large.onnx", "OpenVINOExecutionProvider", c.says)
			close(ended)
			striker.Wait()
			require.Equal(t, c.name, e.Facts["signal"])
			require.Empty(t, entriesOf(t, r.state, "staging"))
		})
	}
	require.Equal(t, "compiled", get(t, r.client, path, refresh).Outcome, "a crash is not for ever")
}

// strike sends the signal to the first workers that are seen with the vendor's libraries in them.
// In between looks a worker runs for a moment only, so that it cannot finish on a machine that is
// busy with something else.
func (d *epcached) strike(times int, signal syscall.Signal, ended <-chan struct{}) {
	dead := make(map[int]bool)
	for len(dead) < times {
		for _, pid := range workersOf(d.pid()) {
			if dead[pid] || len(dead) == times {
				continue
			}
			_ = syscall.Kill(pid, syscall.SIGSTOP) // it may be gone; then there are no maps
			maps, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
			struck := bytes.Contains(maps, []byte("libopenvino"))
			if struck {
				_ = syscall.Kill(pid, signal)
			}
			_ = syscall.Kill(pid, syscall.SIGCONT)
			if struck {
				dead[pid] = true
			}
		}
		select {
		case <-ended:
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// A process writes into the model, over and over, while the daemon reads it: the result is refused.
func TestModelChangedWhileBeingRead(t *testing.T) {
	t.Parallel()
	r := newRefusals(t, newSite(t, runtimeDir(t, openVINO)))
	path := filepath.Join(r.dir, "large.onnx")
	whole := compilertest.Dense(9, 3000, 1) // 36 MB: some milliseconds to hash, more to copy
	require.NoError(t, os.WriteFile(path, whole, 0o644))
	writer, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer writer.Close()
	mapped, err := unix.Mmap(int(writer.Fd()), 0, len(whole), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mapped)) }()
	at := len(whole) - 1000
	ways := map[string]func(i byte){
		"by write":          func(i byte) { _, err = writer.WriteAt([]byte{i}, int64(at)) },
		"by mapping":        func(i byte) { mapped[at] = i },
		"by growing":        func(i byte) { err = writer.Truncate(int64(len(whole)) + int64(i)) },
		"by cutting it off": func(i byte) { err = writer.Truncate(int64(len(whole)) - int64(i)) },
	}
	for name, write := range ways {
		t.Run(name, func(t *testing.T) {
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				for i := byte(0); ctx.Err() == nil; i++ {
					write(i)
					time.Sleep(200 * time.Microsecond)
				}
			}()
			for began := time.Now(); ; {
				before := storeOf(t, r.state)
				_, view, err := r.client.Acquire(limited(t), forModel(path),
					[]*os.File{openFile(t, path)}, nil, nil)
				if view != nil {
					require.NoError(t, view.Close())
				}
				if err != nil {
					require.ErrorIs(t, err, unixsock.ErrBadModel)
					require.ErrorContains(t, err, "large.onnx")
					require.Equal(t, before, storeOf(t, r.state), "the store is unchanged")
					break
				}
				// The machine had no processor for the writing process.
				require.Less(t, time.Since(began), patience, "nobody has noticed")
			}
			stop()
			<-ended
			require.NoError(t, err)
			require.NoError(t, writer.Truncate(int64(len(whole))))
		})
	}
	require.Empty(t, entriesOf(t, r.state, "staging"))
}
