//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

// standBy gives a job with a worker that stands by for it.
func standBy(t *testing.T, c *compilers.ORT, r compilers.Runtime, ep compilers.EP) compilers.Job {
	job := writeJob(t, r, ep, tinymodel.Relu())
	s, err := c.StandBy(r, []compilers.EP{ep}, job.Folder, filepath.Dir(job.Model))
	require.NoError(t, err)
	t.Cleanup(s.Close)
	job.Standby = s
	return job
}

func isGone(s *compilers.Standby) bool {
	select {
	case <-s.Gone():
		return true
	default:
		return false
	}
}

func TestStandbyCompiles(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
	job := standBy(t, c, r, testEP(nil))
	var phases []string
	result, err := c.Compile(t.Context(), job, func(phase string) { phases = append(phases, phase) })
	require.NoError(t, err)
	require.True(t, isGone(job.Standby), "it did the job, and one only")
	require.Equal(t, "compiling", phases[len(phases)-1])
	require.Equal(t, newestORT, result.ORTVersion)
	require.NotEmpty(t, result.EPs[0].Devices)
	check, err := c.Check(t.Context(), compilers.CheckJob{Runtime: r, EPs: job.EPs, Graph: filepath.Join(job.Folder, result.Graph)})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, check.Outcome)
	require.Greater(t, check.ReadyRSS, int64(10<<20), "ONNX Runtime alone takes that much")
	require.GreaterOrEqual(t, check.MaxRSS, check.ReadyRSS)

	made := make(map[string][]byte)
	for _, name := range result.Files {
		path := filepath.Join(job.Folder, name)
		made[name], err = os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, os.Remove(path))
	}
	again, err := c.Compile(t.Context(), job, nil)
	require.NoError(t, err, "another worker does the next one")
	require.Equal(t, result.Files, again.Files)
	for name, bytes := range made {
		got, err := os.ReadFile(filepath.Join(job.Folder, name))
		require.NoError(t, err)
		require.Equal(t, bytes, got, name)
	}
}

// However it ends before it has begun the job, the job is done.
func TestStandbyMayEndAtAnyMoment(t *testing.T) {
	const onlyStandby = `read -r first <&3; case "$first" in *'"standby"'*) `
	const orElse = `;; *) echo > ../00112233445566_ctx.onnx; touch ../done; ` + success + `;; esac`
	for name, c := range map[string]struct {
		script string
		begun  bool
	}{
		"at once":                 {script: "kill -KILL $$"},
		"while it waits":          {script: "sleep 0.05; kill -SEGV $$"},
		"with a refusal":          {script: `echo '{"Refusal":{"Doing":"register","Code":1,"Text":"no"}}' >&4; exit 60`},
		"with nonsense":           {script: "echo hello >&4"},
		"as it gets the job":      {script: "read -r second <&3; kill -KILL $$"},
		"after it began":          {script: `read -r second <&3; echo '{"Phase":"compiling"}' >&4; kill -SEGV $$`, begun: true},
		"without reading the job": {script: "exec 3<&-; sleep 0.05; exit 61"},
	} {
		t.Run(name, func(t *testing.T) {
			o := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, onlyStandby+c.script+orElse)})
			job := standBy(t, o, fakeRuntime(), compilers.EP{Name: openVINO})
			_, err := o.Compile(t.Context(), job, nil)
			_, done := os.Stat(filepath.Join(job.Folder, "done"))
			var exit *compilers.ExitError
			if c.begun {
				require.ErrorAs(t, err, &exit, "a compile that died is no matter of who stood by")
				require.Error(t, done)
				return
			}
			require.NotErrorAs(t, err, &exit)
			require.NoError(t, done, "another worker did it")
		})
	}
}

// The process is killed, at each of the moments in which it may be.
func TestKilledStandby(t *testing.T) {
	r := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
	kill := func(t *testing.T, folder, holds string) {
		t.Helper()
		pid := 0
		require.Eventually(t, func() bool {
			pid = processIn(folder, holds)
			return pid != 0
		}, time.Minute, time.Millisecond)
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
	}
	for name, loaded := range map[string]string{"while it starts": "", "while it stands by": filepath.Base(r.EPs[0].Path)} {
		t.Run(name, func(t *testing.T) {
			c := newORT(t, compilers.ORTOptions{})
			job := standBy(t, c, r, testEP(nil))
			kill(t, job.Folder, loaded)
			// What was found may be the worker's keeper, and on a busy machine the worker outlives that for long enough to begin a job.
			require.Eventually(t, func() bool { return processIn(job.Folder, "") == 0 }, time.Minute, time.Millisecond)
			_, err := c.Compile(t.Context(), job, nil)
			require.NoError(t, err, "another worker does it")
		})
	}
	t.Run("while it compiles", func(t *testing.T) {
		c := newORT(t, compilers.ORTOptions{})
		ep := testEP(map[string]string{"fault": "hang@compile"})
		job := standBy(t, c, r, ep)
		begun := 0
		_, err := c.Compile(t.Context(), job, func(phase string) {
			if phase == "compiling" {
				begun++
				kill(t, job.Folder, filepath.Base(r.EPs[0].Path))
			}
		})
		var exit *compilers.ExitError
		require.ErrorAs(t, err, &exit)
		require.True(t, exit.FromOutside(), "%v", err)
		require.Equal(t, 1, begun, "what was begun is not begun again here")
	})
}

// processIn finds a process whose working directory is in a folder, and that has a library of such a name loaded, if one is given. 0: there is none.
func processIn(folder, library string) int {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd") // only a malformed pattern fails
	for _, link := range links {
		if at, err := os.Readlink(link); err == nil && strings.HasPrefix(at, folder+"/") && hasLoaded(filepath.Dir(link), library) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(link))) // the pattern has digits there
			return pid
		}
	}
	return 0
}

func hasLoaded(process, library string) bool {
	if library == "" {
		return true
	}
	mapped, err := os.ReadFile(filepath.Join(process, "maps"))
	return err == nil && strings.Contains(string(mapped), "/"+library+"\n")
}

// It is kept to just what a worker that is started for the job would be kept to, in the same environment.
func TestStandbyIsKeptToTheSame(t *testing.T) {
	report := filepath.Join(t.TempDir(), "report")
	const reports = `(echo "$1 $2"; pwd; env | sort; ls /proc/self/fd; ulimit -a) > REPORT.new; mv REPORT.new REPORT; cat <&3 > /dev/null & wait $!; exit 9`
	o := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, strings.ReplaceAll(reports, "REPORT", report))})
	told := func() string {
		data, err := os.ReadFile(report)
		require.NoError(t, err)
		require.NoError(t, os.Remove(report))
		return string(data)
	}
	r := fakeRuntime()
	r.EPs[0].Files = []string{"/beside/the/library"}
	job := standBy(t, o, r, compilers.EP{Name: openVINO, Options: map[string]string{"a": "b"}})
	require.Eventually(t, func() bool {
		_, err := os.Stat(report)
		return err == nil
	}, time.Minute, time.Millisecond)
	job.Standby.Close()
	standing := told()
	_, err := o.Compile(t.Context(), job, nil)
	require.Error(t, err)
	require.Equal(t, told(), standing)
}

func TestStandbyIsForOneKindOfJob(t *testing.T) {
	for name, edit := range map[string]func(*compilers.Job){
		"other ONNX Runtime": func(j *compilers.Job) { j.Runtime.ORTLibrary = "/other/libonnxruntime.so" },
		"other EP library":   func(j *compilers.Job) { j.EPs[0].Library = "/other/ep.so" },
		"other device":       func(j *compilers.Job) { j.EPs[0].Devices = []compilers.Device{{Type: "NPU"}} },
		"more EPs":           func(j *compilers.Job) { j.EPs = append(j.EPs, compilers.EP{Name: "Other", Library: "/other.so"}) },
		"other folder":       func(j *compilers.Job) { j.Folder = t.TempDir() },
		"model elsewhere":    func(j *compilers.Job) { j.Model = filepath.Join(t.TempDir(), filepath.Base(j.Model)) },
		"nobody waits":       func(j *compilers.Job) { j.Idle = make(chan struct{}) },
	} {
		t.Run(name, func(t *testing.T) {
			took := filepath.Join(t.TempDir(), "took")
			o := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, "read -r first <&3; read -r second <&3 && touch "+took+"; exit 9")})
			job := standBy(t, o, fakeRuntime(), compilers.EP{Name: openVINO})
			edit(&job)
			_, err := o.Compile(t.Context(), job, nil)
			require.Error(t, err)
			require.True(t, isGone(job.Standby), "it would be in the way")
			require.NoFileExists(t, took, "another worker was started")
		})
	}
}

func TestStandbyJobEnds(t *testing.T) {
	const script = `cat <&3 > /dev/null; echo '{"Phase":"compiling"}' >&4; sleep 60`
	t.Run("cancelled", func(t *testing.T) {
		o := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, script)})
		job := standBy(t, o, fakeRuntime(), compilers.EP{Name: openVINO})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := o.Compile(ctx, job, nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.True(t, isGone(job.Standby))
	})
	t.Run("takes too long", func(t *testing.T) {
		o := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, script), Limits: compilers.Limits{Wall: 100 * time.Millisecond}})
		job := standBy(t, o, fakeRuntime(), compilers.EP{Name: openVINO})
		time.Sleep(200 * time.Millisecond)
		require.False(t, isGone(job.Standby), "waiting is not working")
		_, err := o.Compile(t.Context(), job, nil)
		require.ErrorIs(t, err, compilers.ErrTimeout)
	})
}
