package cache

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
)

func devices(types ...string) []compilers.Device {
	var out []compilers.Device
	for _, t := range types {
		out = append(out, compilers.Device{Type: t})
	}
	return out
}

func TestRefusals(t *testing.T) {
	b := newBench(t)
	file := func(content string) *os.File {
		path := filepath.Join(t.TempDir(), "bad.onnx")
		require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
		return b.openFile(path)
	}
	whole := string(compilertest.Dense(1, 8, 1))
	cases := map[string]struct {
		change func(*request.Request)
		class  apierr.Class
		text   string
	}{
		"not ONNX": {
			func(r *request.Request) { r.Graph = file("this is not a model at all") },
			apierr.BadModel, "model.onnx"},
		"empty file": {func(r *request.Request) { r.Graph = file("") }, apierr.BadModel,
			"model.onnx"},
		"truncated": {func(r *request.Request) { r.Graph = file(whole[:len(whole)-20]) },
			apierr.BadModel, "offset"},
		"no EP": {func(r *request.Request) { r.EPs = nil }, apierr.BadRequest,
			"no execution provider"},
		"unknown EP": {
			func(r *request.Request) { r.EPs[0].Name = "WarpDriveExecutionProvider" },
			apierr.Unavailable, "WarpDrive"},
		"EP twice": {func(r *request.Request) { r.EPs = append(r.EPs, r.EPs[0]) },
			apierr.BadRequest, "twice"},
		"no such device": {func(r *request.Request) { r.EPs[0].Devices = devices("NPU") },
			apierr.Unavailable, "NPU"},
		"unknown option": {
			func(r *request.Request) { r.EPs[0].Options = map[string]string{"falt": "slow"} },
			apierr.BadRequest, "falt"},
		"session option": {
			func(
				r *request.Request) {
				r.SessionOptions = map[string]string{"session.no_such": "1"}
			}, apierr.BadRequest, "no_such"},
		"set by epcached": {
			func(
				r *request.Request) {
				r.SessionOptions = map[string]string{"ep.context_file_path": "/x"}
			}, apierr.NotAllowed, "ep.context_file_path"},
		"not a bool": {
			func(
				r *request.Request) {
				r.SessionOptions = map[string]string{"session.disable_quant_qdq": "perhaps"}
			}, apierr.BadRequest, "perhaps"},
		"level": {func(r *request.Request) { r.GraphOptimizationLevel = "99" },
			apierr.BadRequest, "99"},
		"route": {func(r *request.Request) { r.Route = "north" }, apierr.BadRequest,
			"north"},
		"store": {func(r *request.Request) { r.Store = "attic" }, apierr.BadRequest,
			"attic"},
		"dimension": {
			func(r *request.Request) { r.FreeDimensions = map[string]int64{"batch": -1} },
			apierr.BadRequest, "batch"},
		"relative runtime": {func(r *request.Request) { r.Runtime.Directory = "runtime" },
			apierr.BadRequest, "absolute"},
		"missing runtime": {func(r *request.Request) { r.Runtime.Directory = "/nowhere/at/all" },
			apierr.Unavailable, "/nowhere/at/all"},
		"crash":           {fault(standin.Crash), apierr.CompileFailed, "segmentation fault"},
		"refused by EP":   {fault(standin.Refuse), apierr.CompileFailed, "told to refuse"},
		"no node taken":   {fault(standin.NoNodes), apierr.CompileFailed, "took no node"},
		"garbage":         {fault(standin.Garbage), apierr.CompileFailed, "model.onnx"},
		"no output":       {fault(standin.NoOutput), apierr.CompileFailed, "model.onnx"},
		"sidecar missing": {fault(standin.Missing), apierr.CompileFailed, ".bin"},
		"outside":         {fault(standin.Escape), apierr.CompileFailed, ".."},
		"links":           {fault(standin.Links), apierr.CompileFailed, "link.bin"},
		"does not load":   {fault(standin.Mutilate), apierr.CompileFailed, "does not load"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r := b.request(b.model(1))
			c.change(r)
			a, err := b.cache.Acquire(context.Background(), r, nil)
			require.Nil(t, a)
			require.Equal(t, c.class, apierr.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, c.text)
			require.Empty(t, b.list(), "the store is unchanged")
		})
	}
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome,
		"the cache goes on")
}

func fault(f standin.Fault) func(*request.Request) {
	return func(r *request.Request) { r.EPs[0].Options = map[string]string{"fault": string(f)} }
}

func TestRuntimeOfAnotherUserIsNotLoaded(t *testing.T) {
	b := newBench(t)
	other := filepath.Join(t.TempDir(), "own")
	_, err := standin.Library(other, "1.28.0", standin.SDK{Version: "7.0", Hardware: "sim-1"})
	require.NoError(t, err)
	r := b.request(b.model(1))
	r.Peer.UID = 4711
	r.Runtime.Directory = other
	require.Equal(t, apierr.Unavailable, b.refused(r).Class)
	r.Peer.UID = b.cache.uid
	require.Equal(t, "7.0", b.acquire(r).Build.EPs[0].SDKVersion,
		"the daemon's own user may bring libraries")
}

// external is a model with its weights in a file beside it.
func (b *bench) external(seed uint64, weights []byte) *request.Request {
	dir := b.TempDir()
	m := compilertest.DenseModel(seed, 8, 1)
	require.NotEmpty(b, m.Initializers)
	raw := m.Initializers[0].Raw
	m.Initializers[0].Location, m.Initializers[0].Length = "weights.bin", strconv.Itoa(len(raw))
	if weights == nil {
		weights = raw
	}
	require.NoError(b, os.WriteFile(filepath.Join(dir, "model.onnx"), m.Encode(), 0o644))
	require.NoError(b, os.WriteFile(filepath.Join(dir, "weights.bin"), weights, 0o644))
	r := b.request(b.openFile(filepath.Join(dir, "model.onnx")))
	r.External = map[string]*os.File{"weights.bin": b.openFile(filepath.Join(dir, "weights.bin"))}
	return r
}

func TestExternalData(t *testing.T) {
	b := newBench(t)
	r := b.external(1, nil)
	files := r.External
	r.External = nil
	_, err := b.cache.Acquire(context.Background(), r, nil)
	var need *identity.NeedFilesError
	require.ErrorAs(t, err, &need)
	require.Equal(t, []string{"weights.bin"}, need.Locations)
	r.External = files
	first := b.acquire(r)
	require.Equal(t, request.Compiled, first.Outcome)
	require.Equal(t, request.Hit, b.acquire(b.external(1, nil)).Outcome)

	changed := make([]byte, 8*8*4)
	require.NotEqual(t, first.RequestKey, b.acquire(b.external(1, changed)).RequestKey)

	short := b.refused(b.external(1, []byte("too short")))
	require.Equal(t, apierr.BadModel, short.Class)
	require.Contains(t, short.Text, "weights.bin")
	require.Contains(t, short.Text, "9")
}

func TestFreshFilesAreNotMemoised(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	b.acquire(r)
	read := false
	a, err := b.cache.Acquire(context.Background(), r,
		func(p request.Progress) { read = read || p.Phase == "reading" })
	require.NoError(t, err)
	defer a.View.Close()
	require.True(t, read, "two changes within one tick of the file system's clock look like one")
}

func TestRecordShowsTheDigest(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.OnMiss = request.KeyOnly
	a := b.acquire(r)
	require.Contains(t, a.Record, `"model":"`+a.ModelDigest.String()+`"`)
}

func TestABrokenRuntimeDoesNotHideAnother(t *testing.T) {
	t.Parallel() // it waits
	b := newBench(t)
	other := filepath.Join(t.TempDir(), "own")
	spec, err := standin.Library(other, "1.28.0", standin.SDK{Version: "7.0", Hardware: "sim-1"})
	require.NoError(t, err)
	naming := func(lib string) *request.Request {
		r := b.request(b.model(1))
		r.Runtime = runtimes.Ref{ORTVersion: spec.ORTVersion, ORTLibrary: spec.ORTLibrary,
			EPLibraries: []runtimes.LibraryRef{{EP: standin.EP, Path: lib}}}
		return r
	}
	require.Equal(t, "7.0", b.acquire(naming(spec.EPs[0].Path)).Build.EPs[0].SDKVersion)
	require.NoError(t, os.RemoveAll(other))
	require.Equal(t, apierr.Unavailable, b.refused(naming(spec.EPs[0].Path)).Class)
	require.Equal(t, "1.0", b.acquire(naming(b.libraries(nil)[0].Path)).Build.EPs[0].SDKVersion)
}

func TestOnlyAdministratorsReplaceSharedBuilds(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	r := b.request(b.model(1))
	r.Peer.UID, r.OnMiss = 4711, request.Refresh
	require.Equal(t, apierr.NotAllowed, b.refused(r).Class)
	r.Store = "user"
	require.Equal(t, "uid:4711", b.acquire(r).Build.Scope, "a build of one's own")
	require.Equal(t, first.Graph, b.acquire(b.request(b.model(1))).Graph)
}

func TestDirectoriesThatWereDeletedAreMadeAgain(t *testing.T) {
	b := newBench(t)
	files := b.read(b.acquire(b.request(b.model(1))))
	for _, dir := range []string{"views", "staging"} {
		require.NoError(t,
			filepath.WalkDir(filepath.Join(b.state, dir),
				func(p string, d os.DirEntry, err error) error {
					if err == nil && d.IsDir() {
						err = os.Chmod(p, 0o700)
					}
					return err
				}))
		require.NoError(t, os.RemoveAll(filepath.Join(b.state, dir)))
		require.Equal(t, files, b.read(b.acquire(b.request(b.model(1)))), dir)
		require.Equal(t, request.Compiled, b.acquire(b.request(b.model(uint64(len(dir))))).
			Outcome, dir)
	}
}

func TestAFreeDimensionThatIsNotThereIsSaid(t *testing.T) {
	b := newBench(t)
	path := filepath.Join(t.TempDir(), "free.onnx")
	require.NoError(t, os.WriteFile(path, compilertest.Dense(1, 8, "batch"), 0o644))
	r := b.request(b.openFile(path))
	r.FreeDimensions = map[string]int64{"batch": 1}
	require.Empty(t, b.acquire(r).Warnings)
	r.FreeDimensions = map[string]int64{"bach": 1}
	require.ElementsMatch(t,
		[]string{`no input of the model has a free dimension "bach"; they have "batch"`},
		b.acquire(r).Warnings)
	fixed := b.request(b.model(2))
	fixed.FreeDimensions = map[string]int64{"batch": 1}
	require.ElementsMatch(t,
		[]string{`no input of the model has a free dimension "batch"; none of them is free`},
		b.acquire(fixed).Warnings)
}
