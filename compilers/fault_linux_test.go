package compilers_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

// fakeWorker is a shell script in the worker's place: everything that the daemon's side must stand
// can be written in a line.
func fakeWorker(t *testing.T, script string) string {
	path := filepath.Join(t.TempDir(), "worker")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o700))
	return path
}

// fakeRuntime is never loaded, for the worker is fake.
func fakeRuntime() compilers.Runtime {
	return compilers.Runtime{Directory: "/r", ORTLibrary: "/r/libonnxruntime.so.1.31.1",
		EPs: []compilers.EPLibrary{{EP: openVINO, Path: "/r/ep.so"}}}
}

func fakeCompile(t *testing.T, ctx context.Context, script string,
	limits compilers.Limits) (compilers.Job, error) {
	job := writeJob(t, fakeRuntime(), compilers.EP{Name: openVINO}, tinymodel.Relu())
	c := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, script), Limits: limits})
	_, err := c.Compile(ctx, job, nil)
	return job, err
}

const success = `echo '{"Result":{"ORTVersion":"1.31.1"}}' >&4; `

func TestWorkerFaults(t *testing.T) {
	for _, c := range []struct {
		name, script string
		limits       compilers.Limits
		signal, says string
		code         int
	}{
		{name: "crash", script: "echo last words >&2; kill -SEGV $$", signal: "segmentation fault",
			says: "last words", code: -1},
		{name: "abort", script: "kill -ABRT $$", signal: "aborted", says: "aborted", code: -1},
		{name: "abort in a phase", script: `echo '{"Phase":"compiling"}' >&4; ` +
			"echo last words >&2; kill -ABRT $$", signal: "aborted",
			says: "(SIGABRT): aborted while compiling: last words", code: -1},
		{name: "exit", script: "exit 2", code: 2, says: "exit status 2"},
		{name: "success without a result", script: "exit 0", code: 0, says: "exit status 0"},
		{name: "result, then a crash", script: success + "kill -SEGV $$",
			signal: "segmentation fault", says: "segmentation", code: -1},
		{name: "half a result", script: `printf '{"Result":{' >&4`, says: "exit status 0"},
		{name: "go gives up",
			script: "echo 'fatal error: out of memory' >&2; echo >&2; echo 'gs 0x0' >&2; exit 2",
			code:   2, says: "fatal error: out of memory"},
		{name: "threads give up", script: "echo 'pthread_create failed' >&2; echo 'SIGABRT: " +
			"abort' >&2; echo 'gs 0x0' >&2; exit 2", code: 2, says: "pthread_create failed"},
		{name: "a dump of Go's alone", script: "echo 'SIGSEGV: segmentation violation' >&2; echo " +
			"'PC=0x1' >&2; echo 'gs 0x0' >&2; exit 2", code: 2,
			says: "status 2: SIGSEGV: segmentation violation"},
		{name: "no request read", script: "exec 3<&-; exit 61", code: 61, says: "61"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := fakeCompile(t, t.Context(), c.script, c.limits)
			var exit *compilers.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, c.signal, exit.Signal)
			require.Equal(t,
				map[string]string{"segmentation fault": "SIGSEGV", "aborted": "SIGABRT"}[c.signal],
				exit.Name)
			require.Equal(t, c.code, exit.Code)
			require.Equal(t, openVINO, exit.Compiler)
			require.ErrorContains(t, err, c.says)
		})
	}
}

// Whether code brought its end upon itself follows from the signal.
func TestWorkerEndNamesItsCause(t *testing.T) {
	for signal, outside := range map[string]bool{"KILL": true, "TERM": true, "INT": true,
		"SEGV": false, "BUS": false, "FPE": false, "ILL": false, "ABRT": false} {
		t.Run(signal, func(t *testing.T) {
			_, err := fakeCompile(t, t.Context(), "kill -"+signal+" $$", compilers.Limits{})
			var exit *compilers.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, "SIG"+signal, exit.Name)
			require.Equal(t, outside, exit.IsExternalSignal())
			if !outside {
				require.ErrorContains(t, err, "compiler crashed (SIG"+signal+")")
			}
		})
	}
}

// A worker that cannot make itself ready has not run anything of a vendor's.
func TestWorkerThatIsNotReady(t *testing.T) {
	_, err := fakeCompile(t, t.Context(), "echo 'no such limit' >&2; exit 62", compilers.Limits{})
	require.ErrorIs(t, err, compilers.ErrStart)
	require.ErrorContains(t, err, "no such limit")
}

func TestDialogueFaults(t *testing.T) {
	for name, script := range map[string]string{
		"not json":           "echo hello >&4",
		"of another shape":   `echo '[1,2]' >&4`,
		"a line without end": "head -c 5000000 /dev/zero | tr '\\0' x >&4",
		"too many events": `i=0; while [ $i -lt 5000 ]; do ` +
			`echo '{"Phase":"x"}' >&4; i=$((i+1)); done`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := fakeCompile(t, t.Context(), script, compilers.Limits{})
			require.ErrorContains(t, err, "malformed dialogue")
		})
	}
}

func TestStderrIsBounded(t *testing.T) {
	_, err := fakeCompile(t, t.Context(),
		"head -c 3000000 /dev/zero | tr '\\0' x >&2; echo the end >&2; exit 7",
		compilers.Limits{StderrBytes: 1000})
	var exit *compilers.ExitError
	require.ErrorAs(t, err, &exit)
	require.LessOrEqual(t, len(exit.Stderr), 1000+len("[...]"))
	require.Contains(t, exit.Stderr, "the end")
}

func TestOutputThatIsNone(t *testing.T) {
	const graph = "../00112233445566_ctx.onnx" // the worker starts in a directory of its own
	for name, script := range map[string]string{
		"no graph":          "true",
		"a link":            "ln -s /etc/passwd " + graph,
		"a fifo":            "mkfifo " + graph,
		"another hard link": "ln ../00112233445566.onnx " + graph,
		"too many files":    "for i in 1 2 3 4 5; do echo > ../$i; done; echo > " + graph,
		"too large at once": "truncate -s 3000000 ../a; echo > " + graph,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := fakeCompile(t, t.Context(), script+"; "+success,
				compilers.Limits{Files: 3, Output: 2000000})
			require.ErrorIs(t, err, compilers.ErrOutput)
		})
	}
}

func TestOutputGrowsWithoutEnd(t *testing.T) {
	_, err := fakeCompile(t, t.Context(),
		"i=0; while true; do head -c 500000 /dev/zero > ../$i; i=$((i+1)); sleep 0.05; done",
		compilers.Limits{Output: 2000000})
	require.ErrorIs(t, err, compilers.ErrOutputLimit)
}

func TestTimeLimit(t *testing.T) {
	start := time.Now()
	_, err := fakeCompile(t, t.Context(), "sleep 600",
		compilers.Limits{Wall: 200 * time.Millisecond})
	require.ErrorIs(t, err, compilers.ErrTimeout)
	require.Less(t, time.Since(start), 5*time.Minute)
}

func TestWholeGroupIsKilled(t *testing.T) {
	for name, end := range map[string]string{"cancelled": "sleep 600", "done": success,
		"crashed": "kill -SEGV $$"} {
		t.Run(name, func(t *testing.T) {
			pids := filepath.Join(t.TempDir(), "pids")
			script := fmt.Sprintf("(trap '' TERM HUP; (sleep 600) & echo $! > %s; sleep 600) & "+
				"while [ ! -s %s ]; do sleep 0.01; done; %s", pids, pids, end)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if name == "cancelled" {
				go func() {
					for text, _ := os.ReadFile(pids); !strings.HasSuffix(string(text), "\n") &&
						ctx.Err() == nil; text, _ = os.ReadFile(pids) {
						time.Sleep(10 * time.Millisecond) // it is not there yet
					}
					cancel()
				}()
			}
			_, err := fakeCompile(t, ctx, script, compilers.Limits{})
			require.Error(t, err)
			text, err := os.ReadFile(pids)
			require.NoError(t, err)
			pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
			require.NoError(t, err)
			require.Eventually(t, func() bool { return processEnded(pid) }, time.Minute,
				10*time.Millisecond, "process %d lives", pid)
		})
	}
}

// processEnded reports whether a process has ended. A zombie counts because orphans may stay so.
func processEnded(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return true
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

// A process that left the group and keeps every descriptor open must not make the caller wait.
func TestEscapedProcessIsNotWaitedFor(t *testing.T) {
	start := time.Now()
	_, err := fakeCompile(t, t.Context(), "setsid sleep 60 & sleep 0.3; exit 5", compilers.Limits{})
	require.Error(t, err)
	require.Less(t, time.Since(start), time.Minute)
}

func TestWorkersWorldIsChosen(t *testing.T) {
	t.Setenv("EPCACHED_SECRET", "1")
	job, err := fakeCompile(t, t.Context(),
		`(env; pwd; ls /proc/self/fd; ps -o pgid= -o sid= -p $$) > ../world; exit 9`,
		compilers.Limits{})
	require.Error(t, err)
	world, err := os.ReadFile(filepath.Join(job.Dir, "world"))
	require.NoError(t, err)
	require.NotContains(t, string(world), "EPCACHED_SECRET")
	require.Contains(t, string(world), "HOME="+job.Dir)
	require.Contains(t, string(world), "TMPDIR="+job.Dir)
	require.Contains(t, string(world), "GOTRACEBACK=single")
	require.Contains(t, string(world), "GLIBC_TUNABLES=glibc.malloc.")
	require.NoDirExists(t, filepath.Join(job.Dir, ".worker"), "it is removed with what is in it")
}

// Threads of the calling process come and go while workers run: none of those may take its workers
// along (Pdeathsig is about threads).
func TestWorkersOutliveOtherThreads(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, "sleep 0.5; exit 33")})
	done := make(chan error, 4)
	for range cap(done) {
		go func() {
			job := writeJob(t, fakeRuntime(), compilers.EP{Name: openVINO}, tinymodel.Relu())
			_, err := c.Compile(t.Context(), job, nil)
			done <- err
		}()
	}
	for range 20 {
		endThread()
		time.Sleep(5 * time.Millisecond)
	}
	for range cap(done) {
		var exit *compilers.ExitError
		require.ErrorAs(t, <-done, &exit)
		require.Equal(t, 33, exit.Code)
	}
}

func TestClosedCompilerRefuses(t *testing.T) {
	c := compilers.NewORT(compilers.ORTOptions{Worker: "/nowhere"})
	require.NoError(t, c.Close())
	require.NoError(t, c.Close())
	_, err := c.Probe(t.Context(), fakeRuntime())
	require.ErrorContains(t, err, "closed")
}

func TestWorkerThatIsMissing(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{Worker: "/nowhere/epcached-ort"})
	_, err := c.Probe(t.Context(), fakeRuntime())
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorIs(t, err, compilers.ErrStart)
	require.ErrorContains(t, err, "/nowhere/epcached-ort")
}

// A load that fails as asked, and passes without optimisation, is reported with the level that it
// needs.
func TestCheckTriesWithoutOptimisation(t *testing.T) {
	script := `read request <&3; case "$request" in *disable_all*) ` + success + ` exit 0;; esac
echo '{"Refusal":{"Doing":"load","Code":11,"Text":"count of graph inputs"}}' >&4; exit 60`
	c := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, script)})
	check, err := c.Check(t.Context(),
		compilers.CheckJob{Runtime: fakeRuntime(), EPs: []compilers.EP{{Name: openVINO}},
			Graph: "/g.onnx"})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, check.Outcome)
	require.Equal(t, "disable_all", check.GraphOptimizationLevel)
}

func TestCheckWhereTheTargetIsElsewhere(t *testing.T) {
	refuse := `echo '{"Refusal":{"Doing":"load","Code":10,"Text":"INVALID_GRAPH"}}' >&4; exit 60`
	device := func(kind string) string {
		return fmt.Sprintf(
			`echo '{"EPs":[{"Name":"QNNExecutionProvider","Devices":[{"Type":"%s"}]}]}' >&4; `,
			kind)
	}
	for _, c := range []struct {
		name, script, outcome string
		code                  int
	}{
		{"simulator refuses", device("CPU") + refuse, compilers.NotCheckable, 10},
		{"simulator crashes", device("CPU") + "kill -SEGV $$", compilers.NotCheckable, -1},
		{"device refuses", device("NPU") + refuse, compilers.Failed, 10},
		{"device crashes", device("NPU") + "kill -SEGV $$", compilers.Failed, -1},
		{"simulator loads", device("CPU") + success, compilers.Passed, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := fakeRuntime()
			r.EPs[0].EP = qnn
			check, err := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, c.script)}).
				Check(t.Context(),
					compilers.CheckJob{Runtime: r, EPs: []compilers.EP{{Name: qnn}},
						Graph: "/g.onnx"})
			require.NoError(t, err)
			require.Equal(t, c.outcome, check.Outcome)
			require.Equal(t, c.code, check.Code)
		})
	}
}
