package compilers_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
	"github.com/stretchr/testify/require"
)

// subject is an implementation under test.
type subject struct {
	Compiler compilers.Compiler
	Runtime  compilers.Runtime
	EP       compilers.EP // must compile compilertest.Dense
	// NoNodes is a request with a model that the EP takes nothing of; a nil Model leaves that test
	// out.
	NoNodesModel  []byte
	NoNodesOption map[string]string
	Verdict       compilers.Verdict // of the EP on the string that its own builds carry
	Loads         bool              // builds load on this machine
	// it is a vendor's own: no ONNX Runtime gives codes for what it refuses
	Tool         bool
	GroupsLoad   bool              // so do weight-sharing groups
	ShareOptions map[string]string // provider options that groups are compiled with
}

// suite runs every promise of compilers.Compiler against one implementation.
func suite(t *testing.T, s subject) {
	t.Run("probe lists a device", s.testProbe)
	t.Run("fingerprint is reported and stays", s.testFingerprint)
	t.Run("own compatibility string is judged", s.testCompatibility)
	t.Run("compile with a sidecar", s.testSidecar)
	t.Run("compile embedded", s.testEmbedded)
	t.Run("compile an open file", s.testOpenFile)
	t.Run("control loads", s.testControl)
	t.Run("several at once", s.testConcurrent)
	t.Run("build without its binary does not load", s.testMissingBinary)
	t.Run("what is not onnx is refused", s.testNotONNX)
	t.Run("missing model is refused", s.testMissingModel)
	t.Run("model that the ep takes nothing of", s.testNoNodes)
	if s.Tool {
		t.Run("group is refused", s.testGroupRefused)
	} else {
		t.Run("group has one graph for each model and one binary", s.testGroup)
		t.Run("group without one of its graphs does not load", s.testGroupMemberMissing)
		t.Run("group fails with one of its models, and names it", s.testGroupMemberFails)
		t.Run("group with a model that the ep takes nothing of", s.testGroupMemberWithoutNodes)
	}
	t.Run("unknown ep", s.testUnknownEP)
	t.Run("cancelled before it starts", s.testCancelled)
	t.Run("deadline in the middle", s.testDeadline)
}

func TestStandInKeepsThePromises(t *testing.T) {
	c := standin.New()
	c.Delay = 10 * time.Millisecond
	r, err := standin.Library(t.TempDir(), "1.31.1", standin.SDK{Version: "1.0", Hardware: "sim-1"})
	require.NoError(t, err)
	suite(t, subject{
		Compiler: c, Runtime: r, EP: compilers.EP{Name: standin.EP},
		NoNodesModel:  tinymodel.Relu(),
		NoNodesOption: map[string]string{"fault": string(standin.NoNodes)},
		Verdict:       compilers.Optimal, Loads: true, GroupsLoad: true,
	})
}

// job writes a model into a directory of its own, as the daemon does.
func (s subject) job(t *testing.T, model []byte) compilers.Job {
	dir := t.TempDir()
	path := filepath.Join(dir, "0123456789abcdef.onnx")
	require.NoError(t, os.WriteFile(path, model, 0o600))
	return compilers.Job{Runtime: s.Runtime, EPs: []compilers.EP{s.EP}, Model: path, Dir: dir,
		Output: "0123456789abcdef_ctx.onnx"}
}

func (s subject) testProbe(t *testing.T) {
	facts, err := s.Compiler.Probe(t.Context(), s.Runtime)
	require.NoError(t, err)
	require.Equal(t, s.Runtime.ORTVersion, facts.ORTVersion)
	require.Len(t, facts.EPs, len(s.Runtime.EPs))
	for _, ep := range facts.EPs {
		require.Empty(t, ep.Error)
		require.NotEmpty(t, ep.Devices, "%s lists no device", ep.Name)
		require.Contains(t, []string{"CPU", "GPU", "NPU"}, ep.Devices[0].Type)
	}
}

func (s subject) testFingerprint(t *testing.T) {
	first, err := s.Compiler.Fingerprint(t.Context(), s.Runtime, []compilers.EP{s.EP}, nil)
	require.NoError(t, err)
	require.Len(t, first, 1)
	require.NotEmpty(t, first[0].SDKVersion)
	require.NotEmpty(t, first[0].CompatibilityString)
	require.NotEmpty(t, first[0].HardwareArchitecture)
	again, err := s.Compiler.Fingerprint(t.Context(), s.Runtime, []compilers.EP{s.EP}, nil)
	require.NoError(t, err)
	first[0].Seconds, again[0].Seconds = 0, 0
	require.Equal(t, first, again)
}

func (s subject) testCompatibility(t *testing.T) {
	prints, err := s.Compiler.Fingerprint(t.Context(), s.Runtime, []compilers.EP{s.EP}, nil)
	require.NoError(t, err)
	verdicts, err := s.Compiler.Compatibility(t.Context(), s.Runtime, s.EP,
		[]string{prints[0].CompatibilityString, "nobody's"})
	require.NoError(t, err)
	require.Len(t, verdicts, 2)
	require.Equal(t, s.Verdict, verdicts[0])
	require.NotEqual(t, compilers.Optimal, verdicts[1])
}

func (s subject) testSidecar(t *testing.T) {
	source := compilertest.Dense(1, 64, 1)
	job := s.job(t, source)
	var mu sync.Mutex
	var phases []string
	result, err := s.Compiler.Compile(t.Context(), job, func(phase string) {
		mu.Lock()
		defer mu.Unlock()
		phases = append(phases, phase)
	})
	require.NoError(t, err)
	require.Contains(t, phases, "compiling")
	require.Equal(t, job.Output, result.Graph)
	require.Len(t, result.Files, 2, "graph and binary")
	require.Equal(t, job.Output, result.Files[0])
	require.Equal(t, s.Runtime.ORTVersion, result.ORTVersion)
	require.Equal(t, s.route(), result.Route)
	require.Len(t, result.EPs, 1)
	require.NotEmpty(t, result.EPs[0].Devices)

	model := read(t, filepath.Join(job.Dir, result.Graph))
	require.Len(t, model.Contexts, 1)
	require.Equal(t, s.EP.Name, model.Contexts[0].Source)
	require.Equal(t, result.Files[1], model.Contexts[0].CacheContext)
	require.NoError(t, epmodel.Validate(model, sizes(t, job.Dir, result.Files)))
	unchanged, err := os.ReadFile(job.Model)
	require.NoError(t, err)
	require.True(t, bytes.Equal(source, unchanged), "the model was changed")
	s.requireLoads(t, job, result)
}

// The way in which a model is passed makes no difference to the artefact.
func (s subject) testOpenFile(t *testing.T) {
	opener, ok := s.Compiler.(compilers.OpenModelCompiler)
	job := s.job(t, compilertest.Dense(1, 64, 1))
	inPlace := job.Model
	require.NoError(t, os.Mkdir(filepath.Join(job.Dir, "model"), 0o700))
	job.Model = filepath.Join(job.Dir, "model", filepath.Base(inPlace))
	f, err := os.Open(inPlace)
	require.NoError(t, err)
	defer f.Close()
	job.ModelFile = f
	if !ok || !opener.AcceptsOpenModel(job) {
		require.True(t, s.Tool, "a compiler in a process of ours can have it so")
		return
	}
	require.False(t,
		opener.AcceptsOpenModel(compilers.Job{Runtime: job.Runtime, EPs: job.EPs, Model: job.Model,
			ModelFile: f, Dir: job.Dir, Output: job.Output,
			Share: []compilers.ShareMember{{Model: inPlace, Output: "2_ctx.onnx"}}}))
	var made [2]map[string][]byte
	for i := range made {
		made[i] = make(map[string][]byte)
		result, err := s.Compiler.Compile(t.Context(), job, nil)
		require.NoError(t, err)
		s.requireLoads(t, job, result)
		for _, name := range result.Files {
			made[i][name], err = os.ReadFile(filepath.Join(job.Dir, name))
			require.NoError(t, err)
			require.NoError(t, os.Remove(filepath.Join(job.Dir, name)))
		}
		if i == 0 {
			require.NoFileExists(t, job.Model)
			require.NoError(t, os.Rename(inPlace, job.Model))
			job.ModelFile = nil
		}
	}
	require.Equal(t, made[1], made[0])
}

func (s subject) route() string {
	if s.Tool {
		return compilers.RouteCommand
	}
	return compilers.RouteCompileAPI
}

func (s subject) testEmbedded(t *testing.T) {
	job := s.job(t, compilertest.Dense(1, 64, 1))
	job.Embed = true
	result, err := s.Compiler.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	require.Equal(t, []string{job.Output}, result.Files)
	model := read(t, filepath.Join(job.Dir, result.Graph))
	require.Len(t, model.Contexts, 1)
	require.EqualValues(t, 1, model.Contexts[0].EmbedMode)
	s.requireLoads(t, job, result)
}

func (s subject) requireLoads(t *testing.T, job compilers.Job, result compilers.Result) {
	if !s.Loads {
		return
	}
	check, err := s.Compiler.Check(t.Context(),
		compilers.CheckJob{Runtime: s.Runtime, EPs: job.EPs,
			Graph: filepath.Join(job.Dir, result.Graph)})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, check.Outcome, check.Text)
}

func (s subject) testControl(t *testing.T) {
	if !s.Loads {
		return // what a control says on such a machine is not promised
	}
	result, err := compilers.Control(t.Context(), s.Compiler, s.Runtime, []compilers.EP{s.EP},
		t.TempDir(), nil)
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, result.Outcome, result.Text)
}

func (s subject) testConcurrent(t *testing.T) {
	var wait sync.WaitGroup
	errs := make([]error, 4)
	jobs := make([]compilers.Job, len(errs))
	for i := range jobs {
		jobs[i] = s.job(t, compilertest.Dense(uint64(i), 32, 1))
	}
	for i := range jobs {
		wait.Go(func() { _, errs[i] = s.Compiler.Compile(t.Context(), jobs[i], nil) })
	}
	wait.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
}

func (s subject) testMissingBinary(t *testing.T) {
	job := s.job(t, compilertest.Dense(1, 64, 1))
	result, err := s.Compiler.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	require.NoError(t, os.Remove(filepath.Join(job.Dir, result.Files[1])))
	check, err := s.Compiler.Check(t.Context(),
		compilers.CheckJob{Runtime: s.Runtime, EPs: job.EPs,
			Graph: filepath.Join(job.Dir, result.Graph)})
	require.NoError(t, err)
	require.NotEqual(t, compilers.Passed, check.Outcome)
	require.NotZero(t, check.Code)
	require.NotEmpty(t, check.Text)
}

func (s subject) testNotONNX(t *testing.T) {
	job := s.job(t, []byte("this is not a model\xff\xff\xff"))
	_, err := s.Compiler.Compile(t.Context(), job, nil)
	var refused *compilers.RefusedError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, s.Tool, refused.Code < 0)
	require.NotEmpty(t, refused.Text)
}

func (s subject) testMissingModel(t *testing.T) {
	job := s.job(t, nil)
	require.NoError(t, os.Remove(job.Model))
	_, err := s.Compiler.Compile(t.Context(), job, nil)
	var refused *compilers.RefusedError
	require.ErrorAs(t, err, &refused)
	require.Contains(t, refused.Text, filepath.Base(job.Model))
}

func (s subject) testNoNodes(t *testing.T) {
	if s.NoNodesModel == nil {
		t.Skip("this compiler takes something of every model")
	}
	job := s.job(t, s.NoNodesModel)
	if s.NoNodesOption != nil {
		job.EPs[0].Options = s.NoNodesOption
	}
	_, err := s.Compiler.Compile(t.Context(), job, nil)
	var none *compilers.NoNodesError
	require.ErrorAs(t, err, &none)
	require.Equal(t, []string{s.EP.Name}, none.EPs)
	require.NotEmpty(t, none.OpTypes)
	require.ErrorContains(t, err, s.EP.Name)
}

func (s subject) testGroupRefused(t *testing.T) {
	job := s.job(t, compilertest.Dense(1, 64, 1))
	job.Share = []compilers.ShareMember{{Model: job.Model, Output: "fedcba9876543210_ctx.onnx"}}
	_, err := s.Compiler.Compile(t.Context(), job, nil)
	require.ErrorIs(t, err, compilers.ErrOption)
}

func (s subject) testUnknownEP(t *testing.T) {
	job := s.job(t, tinymodel.Relu())
	job.EPs = []compilers.EP{{Name: "NobodysExecutionProvider"}}
	_, err := s.Compiler.Compile(t.Context(), job, nil)
	require.ErrorIs(t, err, compilers.ErrNotFound)
	require.ErrorContains(t, err, "NobodysExecutionProvider")
	require.ErrorContains(t, err, s.EP.Name, "it should name what there is")
}

func (s subject) testCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Compiler.Compile(ctx, s.job(t, tinymodel.Relu()), nil)
	require.ErrorIs(t, err, context.Canceled)
	_, err = s.Compiler.Probe(ctx, s.Runtime)
	require.ErrorIs(t, err, context.Canceled)
}

func (s subject) testDeadline(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	job := s.job(t, compilertest.Dense(1, 1024, 1))
	start := time.Now()
	_, err := s.Compiler.Compile(ctx, job, func(string) { cancel() })
	require.ErrorIs(t, err, context.Canceled)
	require.Less(t, time.Since(start), 5*time.Second)
}

type file struct {
	*os.File
	size int64
}

func (f file) Size() int64 { return f.size }

func read(t *testing.T, path string) *epmodel.Model {
	f, err := os.Open(path)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	info, err := f.Stat()
	require.NoError(t, err)
	model, err := epmodel.Read(t.Context(), filepath.Base(path), file{f, info.Size()})
	require.NoError(t, err)
	return model
}

func sizes(t *testing.T, dir string, names []string) map[string]int64 {
	m := map[string]int64{}
	for _, name := range names {
		info, err := os.Stat(filepath.Join(dir, name))
		require.NoError(t, err)
		m[name] = info.Size()
	}
	return m
}
