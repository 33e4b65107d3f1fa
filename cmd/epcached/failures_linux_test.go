package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// failures lists what the daemon remembers.
func (d *epcached) failures() []*wire.Failure {
	d.Helper()
	reply, err := unixsock.Ask[wire.JobsReply](limited(d), d.dial(), &wire.Jobs{}, nil)
	require.NoError(d, err)
	return reply.Failures
}

// fails asks for the model, and requires an error with the reason.
func (d *epcached) fails(t *testing.T, reason, path string,
	change ...func(*wire.Acquire)) *unixsock.Error {
	t.Helper()
	c, err := d.tryDial()
	require.NoError(t, err)
	defer c.Close()
	_, err = tryGet(t, c, path, change...)
	require.ErrorIs(t, err, unixsock.ErrCompileFailed)
	var e *unixsock.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, reason, e.Facts["reason"], "%v", err)
	return e
}

// failsFromMemory requests a model again that failed, and requires the same answer without a
// compile.
func (d *epcached) failsFromMemory(t *testing.T, first *unixsock.Error, path string,
	change ...func(*wire.Acquire)) {
	t.Helper()
	before := d.status().Failures
	start := time.Now()
	again := d.fails(t, first.Facts["reason"], path, change...)
	t.Logf("answered from memory in %v", time.Since(start))
	require.Equal(t, before, d.status().Failures, "nothing is compiled")
	for key, value := range first.Facts {
		require.Equal(t, value, again.Facts[key], key)
	}
	require.Contains(t, again.Text, "failed once, last at ")
	require.Contains(t, again.Hint, "epcachectl jobs retry")
}

func TestRealRefusalNamesTheUsersModel(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	path := filepath.Join(t.TempDir(), "broken.onnx")
	broken := bytes.ReplaceAll(compilertest.Dense(1, 16, 1), []byte("MatMul"), []byte("MatMux"))
	require.NoError(t, os.WriteFile(path, broken, 0o644))
	e := d.fails(t, "refused", path)
	require.Equal(t, "10", e.Facts["code"])
	require.True(t,
		strings.HasPrefix(e.Text,
			`model "broken.onnx" does not compile: 10 INVALID_GRAPH: `+
				`Load model from broken.onnx failed`), e.Text)
	require.Equal(t, 1, strings.Count(e.Text, "INVALID_GRAPH"), e.Text)
	require.NotContains(t, fmt.Sprint(e.Text, e.Facts), d.state,
		"where the daemon has its copy is nothing that a user can use")
	list := d.failures()
	require.Len(t, list, 1)
	require.Contains(t, list[0].Text, "Load model from broken.onnx failed")
}

// QNN's compiler crashes on this model when nothing of it was optimised before.
func TestRealCrashIsRemembered(t *testing.T) {
	t.Parallel() // the compiler takes seconds before it crashes, on one processor
	path := realModel(t, "minilm-int8")
	d := newSite(t, runtimeDir(t, qnn)).start(t)
	pid := d.status().Pid
	how := []func(*wire.Acquire){withEPs(qnnProvider()), func(r *wire.Acquire) {
		r.GraphOptimizationLevel = "disable_all"
		r.FreeDimensions = map[string]int64{"batch": 1, "sequence": 128}
	}}
	first := d.fails(t, "crash", path, how...)
	require.Contains(t, first.Text, "compiler crashed (SIGSEGV)")
	require.Equal(t, "SIGSEGV", first.Facts["signal"])
	require.NotEmpty(t, first.Facts["stderr"], "its last words")
	require.Equal(t, pid, d.status().Pid)
	require.Empty(t, keepersOf(d.pid()))
	require.Empty(t, entriesOf(t, d.state, "staging"))
	d.failsFromMemory(t, first, path, how...)

	known := d.failures()
	require.Len(t, known, 1)
	require.Equal(t, "crash", known[0].Reason)
	require.EqualValues(t, 1, known[0].Count)
	require.Greater(t, known[0].RetryMs, known[0].LastMs)
	forgotten, err := unixsock.Ask[wire.JobsReply](limited(t), d.dial(),
		&wire.RetryJobs{Entries: []string{known[0].Build[:12]}}, nil)
	require.NoError(t, err)
	require.Len(t, forgotten.Failures, 1)
	require.Empty(t, d.failures())
	d.fails(t, "crash", path, how...)
	require.EqualValues(t, 2, d.status().Failures, "it was tried again")
	d.stop()

	d = d.site.start(t)
	d.failsFromMemory(t, first, path, how...)
}

// realModel returns a model that make deps fetches, and skips the test loudly where it is not
// there.
func realModel(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(os.Getenv("EPCACHED_MODELS"), name, "model.onnx")
	if _, err := os.Stat(path); err != nil {
		t.Skipf("SKIPPED: model %s is not there: %v; make deps fetches it", name, err)
	}
	return path
}

func TestNoNodeIsRemembered(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	model := tinymodel.Model{
		Nodes:   []tinymodel.Node{{Op: "Det", Inputs: []string{"x"}, Outputs: []string{"y"}}},
		Inputs:  []tinymodel.Value{{Name: "x", Type: tinymodel.Float, Shape: []any{3, 3}}},
		Outputs: []tinymodel.Value{{Name: "y", Type: tinymodel.Float, Shape: []any{}}},
	}
	path := filepath.Join(t.TempDir(), "determinant.onnx")
	require.NoError(t, os.WriteFile(path, model.Encode(), 0o644))
	first := d.fails(t, "no node taken", path)
	require.Contains(t, first.Hint, "use the model as it is")
	d.failsFromMemory(t, first, path)
}

// A limit so small that nothing at all compiles is the machine's fault, and nothing is known
// against the model afterwards.
func TestLimitsThatPreventEveryCompileAreReported(t *testing.T) {
	t.Parallel()
	s := newSite(t, runtimeDir(t, openVINO))
	d := s.start(t)
	dir := t.TempDir()
	require.Equal(t, "compiled", get(t, d.dial(), writeModel(t, dir, 1)).Outcome)
	d.stop() // it knows the runtime, and does not look at it again
	s.config = unmeasured + "[limits]\nmemory_bytes = 30000000\n"
	d = s.start(t)
	path := writeModel(t, dir, 2)
	_, err := tryGet(t, d.dial(), path)
	require.ErrorIs(t, err, unixsock.ErrUnavailable)
	var e *unixsock.Error
	require.ErrorAs(t, err, &e)
	t.Log(err)
	require.Equal(t, "sandbox", e.Facts["reason"])
	require.Contains(t, e.Hint, "epcachectl doctor")
	require.Empty(t, d.failures())
	d.stop()
	s.config = unmeasured
	d = s.start(t)
	require.Equal(t, "compiled", get(t, d.dial(), path).Outcome)
}

// misbehaving stands between ONNX Runtime and OpenVINO's library, and does what it finds in the
// model that is compiled: all other models OpenVINO gets.
const misbehaving = `
#define _GNU_SOURCE
#include <dlfcn.h>
#include <glob.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int asks(const char *what) {
	char pattern[4096], text[1 << 16];
	glob_t found;
	int is = 0;
	snprintf(pattern, sizeof pattern, "%%s/../../model/*.onnx", getenv("HOME"));
	if (glob(pattern, 0, 0, &found)) return 0;
	FILE *f = fopen(found.gl_pathv[0], "r");
	if (f) {
		size_t size = fread(text, 1, sizeof text, f);
		is = memmem(text, size, what, strlen(what)) != 0;
		fclose(f);
	}
	globfree(&found);
	return is;
}
static void leave_behind(void) {
	for (int i = 0; i < 3; i++)
		if (fork() == 0) {
			setsid();
			if (fork() == 0) {
				signal(SIGTERM, SIG_IGN);
				signal(SIGHUP, SIG_IGN);
				for (int fd = 3; fd < 64; fd++) close(fd);
				execl("/bin/sleep", "sleep", "%[2]s", (char *)0);
			}
			_exit(0);
		}
	usleep(200000);
	fprintf(stderr, "these are its last words\n");
}
void *CreateEpFactories(void *name, void *api, void *logger, void *factories, size_t room, ` +
	`void *count) {
	if (asks("misbehave: stop")) raise(SIGSTOP);
	if (asks("misbehave: hang")) { leave_behind(); for (;;) pause(); }
	if (asks("misbehave: spin")) { leave_behind(); for (;;); }
	if (asks("misbehave: hog")) { leave_behind(); for (;;) { char *p = malloc(1 << 24); ` +
	`if (!p) { perror("malloc"); abort(); } memset(p, 1, 1 << 24); } }
	if (asks("misbehave: write")) { leave_behind(); static char b[1 << 20]; for (int i = 0;; ` +
	`i++) { char n[20]; sprintf(n, "%%d", i); FILE *f = fopen(n, "w"); if (f) { fwrite(b, ` +
	`sizeof b, 1, f); fclose(f); } usleep(10000); } }
	void *real = dlopen("%[1]s", RTLD_NOW);
	if (!real) { fprintf(stderr, "%%s\n", dlerror()); abort(); }
	void *(*create)(void *, void *, void *, void *, size_t, void *) = dlsym(real, ` +
	`"CreateEpFactories");
	return create(name, api, logger, factories, room, count);
}
void *ReleaseEpFactory(void *factory) {
	void *(*release)(void *) = dlsym(dlopen("%[1]s", RTLD_NOW), "ReleaseEpFactory");
	return release(factory);
}
`

// misbehavingSite has a runtime with that library, and limits; the time is given in seconds.
func misbehavingSite(t *testing.T, seconds string, wall int) *site {
	t.Helper()
	real := runtimeDir(t, openVINO)
	plugin := filepath.Join(real, "onnxruntime_ep_openvino",
		"libonnxruntime_providers_openvino_plugin.so")
	require.FileExists(t, plugin)
	dir := faultyRuntime(t, real, func(string) {})
	vendorLibrary(t, filepath.Join(dir, filepath.Base(plugin)),
		fmt.Sprintf(misbehaving, plugin, seconds))
	s := newSite(t, dir)
	s.config = unmeasured + fmt.Sprintf("[limits]\nwall = \"%ds\"\nmemory_bytes = %d\n"+
		"output_bytes = %d\n[sandbox]\nread = [%q]\n",
		wall, 1<<30, 64<<20, filepath.Dir(plugin))
	return s
}

func TestHangsAndHogsEndAtTheirLimits(t *testing.T) {
	t.Parallel()
	// finds its descendants again
	seconds := fmt.Sprintf("%d.%d", 90000+os.Getpid(), time.Now().UnixNano())
	cases := map[string]struct{ reason, says string }{
		"hang":  {"timeout", "these are its last words"},
		"hog":   {"memory", ""},
		"write": {"output limit", "these are its last words"},
	}
	// A worker that hangs is given little time, and the others enough to misbehave on a busy
	// machine.
	for wall, whats := range map[int][]string{2: {"hang"}, 600: {"hog", "write"}} {
		s := misbehavingSite(t, seconds, 600)
		d := s.start(t)
		require.Equal(t, "compiled", get(t, d.dial(), writeModel(t, t.TempDir(), 1)).Outcome)
		if wall != 600 {
			d.stop() // it knows the runtime, and does not look at it again
			s.config = strings.Replace(s.config, "600s", fmt.Sprintf("%ds", wall), 1)
			d = s.start(t)
		}
		for _, what := range whats {
			c := cases[what]
			t.Run(what, func(t *testing.T) {
				model := compilertest.DenseModel(2, 16, 1)
				model.Nodes[0].Name = "misbehave: " + what
				path := filepath.Join(t.TempDir(), what+".onnx")
				require.NoError(t, os.WriteFile(path, model.Encode(), 0o644))
				first := d.fails(t, c.reason, path)
				require.Contains(t, first.Text, c.says)
				require.Contains(t, first.Hint, "[limits]")
				require.Empty(t, keepersOf(d.pid()))
				require.Empty(t, processesOf(seconds), "no descendant stays behind")
				require.Empty(t, entriesOf(t, d.state, "staging"))
				d.failsFromMemory(t, first, path)
			})
		}
		require.Len(t, d.failures(), len(whats))
		if wall == 600 {
			require.Equal(t, "compiled", get(t, d.dial(), writeModel(t, t.TempDir(), 3)).Outcome,
				"the daemon goes on")
		}
	}
}

// stoppingSite has a runtime of which a worker stops itself in the middle of the compile of a model
// that writeStopping wrote: see freeze.
func stoppingSite(t *testing.T) *site { return misbehavingSite(t, "0", 3600) }

// writeStopping is writeModel for a model at which a worker stops.
func writeStopping(t *testing.T, dir string, seed uint64) string {
	t.Helper()
	model := compilertest.DenseModel(seed, 16, 1)
	model.Nodes[0].Name = "misbehave: stop"
	path := filepath.Join(dir, fmt.Sprintf("model%d.onnx", seed))
	require.NoError(t, os.WriteFile(path, model.Encode(), 0o644))
	return path
}

// processesOf lists the processes that have a text among their arguments.
func processesOf(text string) (found []string) {
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline") // only a malformed pattern fails
	for _, path := range paths {
		if line, err := os.ReadFile(path); err == nil && strings.Contains(string(line), text) {
			found = append(found, path)
		}
	}
	return found
}

// After a worker's first death the job is retried; the second is reported to all waiters.
func TestWorkersDeath(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	for deaths, c := range []string{"compiled", "compiled", "worker died"} {
		t.Run(fmt.Sprintf("%d deaths", deaths), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "large.onnx")
			// takes a while
			require.NoError(t,
				os.WriteFile(path, compilertest.Dense(uint64(10+deaths), 2000, 1), 0o644))
			ended := make(chan struct{})
			var striker, askers sync.WaitGroup
			striker.Go(func() { d.strike(deaths, syscall.SIGKILL, ended) })
			outcomes := make([]string, 4)
			for i := range outcomes {
				askers.Go(func() { outcomes[i] = d.outcome(t, path) })
			}
			askers.Wait()
			close(ended)
			striker.Wait()
			for _, one := range outcomes {
				if one == "waited" || one == "hit" {
					one = "compiled"
				}
				require.Equal(t, c, one)
			}
			require.Empty(t, entriesOf(t, d.state, "staging"))
		})
	}
}

// outcome asks for the model, and gives the outcome, or the reason why there is none.
func (d *epcached) outcome(t *testing.T, path string) string {
	c, err := d.tryDial()
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	a, err := tryGet(t, c, path)
	var e *unixsock.Error
	switch {
	case err == nil:
		return a.Outcome
	case errors.As(err, &e):
		return e.Facts["reason"]
	}
	return err.Error()
}
