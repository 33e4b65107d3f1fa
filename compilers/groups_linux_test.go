//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

// groupJob is a job for several models, the first as writeJob writes it.
func groupJob(t *testing.T, r compilers.Runtime, ep compilers.EP, models ...[]byte) compilers.Job {
	job := writeJob(t, r, ep, models[0])
	for i, model := range models[1:] {
		name := fmt.Sprintf("00112233445566_%d", i+2)
		path := filepath.Join(job.Dir, name+".onnx")
		require.NoError(t, os.WriteFile(path, model, 0o600))
		job.Share = append(job.Share,
			compilers.ShareMember{Model: path, Output: name + "_ctx.onnx"})
	}
	return job
}

func TestMemberThatEndsTheWorkerIsNamed(t *testing.T) {
	for name, script := range map[string]string{
		"crash": `echo '{"Phase":"compiling","Member":2}' >&4; kill -SEGV $$`,
		"refusal": `echo '{"Phase":"compiling","Member":2}' >&4; ` +
			`echo '{"Refusal":{"Doing":"compile","Code":11,"Text":"no"}}' >&4; exit 60`,
	} {
		t.Run(name, func(t *testing.T) {
			job := groupJob(t, fakeRuntime(), compilers.EP{Name: openVINO}, tinymodel.Relu(),
				tinymodel.Relu())
			_, err := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, script)}).
				Compile(t.Context(), job, nil)
			var member *compilers.MemberError
			require.ErrorAs(t, err, &member)
			require.Equal(t, 1, member.Member)
			require.ErrorContains(t, err, "model 2 of the group")
		})
	}
}

func TestInvalidGroupsAreRefused(t *testing.T) {
	for name, edit := range map[string]func(*compilers.Job){
		"embedded":               func(j *compilers.Job) { j.Embed = true },
		"two graphs of one name": func(j *compilers.Job) { j.Share[0].Output = j.Output },
		"graph in another directory": func(j *compilers.Job) {
			j.Share[0].Output = "../" +
				j.Output
		},
		"model without its whole path": func(j *compilers.Job) { j.Share[0].Model = "model.onnx" },
	} {
		t.Run(name, func(t *testing.T) {
			job := groupJob(t, fakeRuntime(), compilers.EP{Name: openVINO}, tinymodel.Relu(),
				tinymodel.Relu())
			edit(&job)
			_, err := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, success)}).
				Compile(t.Context(), job, nil)
			require.ErrorContains(t, err, "compile ")
			var exit *compilers.ExitError
			require.NotErrorAs(t, err, &exit, "no worker should have been started")
		})
	}
}

// A load that would crash the worker, and prove nothing, is not tried.
func TestSharedWeightsOfQNNAreNotLoadedWithoutANPU(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{Worker: fakeWorker(t, "kill -SEGV $$")})
	ep := compilers.EP{Name: qnn, Library: "/r/ep.so", Devices: []compilers.Device{{Type: "CPU"}},
		Options: map[string]string{"enable_htp_weight_sharing": "1"}}
	check, err := c.Check(t.Context(),
		compilers.CheckJob{Runtime: fakeRuntime(), EPs: []compilers.EP{ep}, Graph: "/g/ctx.onnx"})
	require.NoError(t, err)
	require.Equal(t, compilers.NotCheckable, check.Outcome)
	require.Contains(t, check.Text, "enable_htp_weight_sharing")
	ep.Devices[0].Type = "NPU"
	check, err = c.Check(t.Context(),
		compilers.CheckJob{Runtime: fakeRuntime(), EPs: []compilers.EP{ep}, Graph: "/g/ctx.onnx"})
	require.NoError(t, err)
	require.Equal(t, compilers.Failed, check.Outcome, "there it counts")
}

// A group that loads in one process computes what its models compute, whatever the order of the
// outputs' shapes.
func TestGroupComputes(t *testing.T) {
	for name, subject := range map[string]struct {
		runtime func(t *testing.T) compilers.Runtime
		ep      compilers.EP
	}{
		"OpenVINO": {func(t *testing.T) compilers.Runtime {
			return compilertest.Runtime(t,
				"openvino-1.8.1")
		}, compilers.EP{Name: openVINO, Options: f32}},
		"test EP": {func(t *testing.T) compilers.Runtime {
			return compilertest.TestEPRuntime(t, newestORT, compilertest.Release{})
		}, testEP(nil)},
	} {
		t.Run(name, func(t *testing.T) {
			r := subject.runtime(t)
			c := newORT(t, compilers.ORTOptions{})
			job := groupJob(t, r, subject.ep, compilertest.Dense(3, 64, 1),
				compilertest.Dense(3, 64, 2), compilertest.Dense(3, 64, 4))
			result, err := c.Compile(t.Context(), job, nil)
			require.NoError(t, err)
			group := compilers.CheckJob{Runtime: r, EPs: job.EPs,
				Graph:   filepath.Join(job.Dir, result.Graph),
				Session: compilers.Session{SessionOptions: compilers.ShareOptions()}}
			var want []byte
			for i, source := range append([]compilers.ShareMember{{Model: job.Model}},
				job.Share...) {
				want = append(want,
					compilertest.Outputs(t, compilers.CheckJob{Runtime: r, EPs: job.EPs,
						Graph: source.Model}, 7)...)
				if i > 0 {
					group.Share = append(group.Share, filepath.Join(job.Dir, result.Graphs[i]))
				}
			}
			require.Equal(t, want, compilertest.Outputs(t, group, 7))
		})
	}
}

// Workers of another user reach every model of a group, in whatever directory of the job's it is,
// and its graphs in the store, only for as long as they work.
func TestGroupOfAnotherUsersWorker(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root starts workers of another user")
	}
	r := compilertest.Runtime(t, "openvino-1.8.1")
	user := &compilers.Credential{UID: 65534, GID: 65534}
	if err := user.CanPass(r.ORTLibrary); err != nil {
		t.Skipf("NOT TESTED: the runtime is where other users do not come: %v", err)
	}
	// a directory of t.TempDir has parents that only root passes
	base, err := os.MkdirTemp("/var/tmp", "epcached-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(base)) })
	require.NoError(t, os.Chmod(base, 0o711))
	c := compilers.NewORT(compilers.ORTOptions{Worker: copied(t, compilertest.Worker(t), base),
		User: user, Scratch: filepath.Join(base, "staging")})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	dir, models := filepath.Join(base, "staging", "job", "out"),
		filepath.Join(base, "staging", "job", "model")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.MkdirAll(filepath.Join(models, "2"), 0o700))
	job := compilers.Job{Runtime: r, EPs: []compilers.EP{{Name: openVINO}},
		Model: filepath.Join(models, "m.onnx"), Dir: dir, Output: "m_ctx.onnx",
		Share: []compilers.ShareMember{{Model: filepath.Join(models, "2", "m_2.onnx"),
			Output: "m_2_ctx.onnx"}}}
	for i, path := range []string{job.Model, job.Share[0].Model} {
		require.NoError(t, os.WriteFile(path, compilertest.Dense(1, 32, i+1), 0o600))
	}
	result, err := c.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	for _, path := range []string{job.Model, job.Share[0].Model} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.EqualValues(t, 0o600, info.Mode().Perm(), "the model is the daemon's alone again")
	}
	store := filepath.Join(base, "store")
	require.NoError(t, os.Rename(dir, store))
	require.NoError(t, os.Chmod(store, 0o700))
	check, err := c.Check(t.Context(),
		compilers.CheckJob{Runtime: r, EPs: job.EPs, Graph: filepath.Join(store, result.Graphs[0]),
			Share:   []string{filepath.Join(store, result.Graphs[1])},
			Session: compilers.Session{SessionOptions: compilers.ShareOptions()}})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, check.Outcome, check.Text)
}
