package cache

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
)

// A caller that has loaded a library gets no build when another library is at its path by now:
// neither one of that library nor one of its own, because it would load the rest of the SDK from
// the new library's directory.
func TestLibraryThatWasReplacedUnderItsCaller(t *testing.T) {
	b := newBench(t)
	refs := b.libraries(nil)
	loaded := b.openFile(refs[0].Path)
	r := b.request(b.model(1))
	r.Runtime = runtimes.Ref{ORTVersion: "1.31.1",
		ORTLibrary:  filepath.Join(b.runtime, "libonnxruntime.so.1.31.1"),
		EPLibraries: b.libraries(loaded)}
	require.Equal(t, "1.0", b.acquire(r).Build.EPs[0].SDKVersion)

	b.library("2.0")
	for _, uid := range []uint32{b.cache.uid, 4711} {
		r.Peer.UID = uid
		e := b.refused(r)
		require.Equal(t, apierr.Unavailable, e.Class)
		require.Contains(t, e.Text, refs[0].Path)
		require.Contains(t, e.Hint, "restart")
	}
	r.Runtime.EPLibraries = b.libraries(b.openFile(refs[0].Path))
	require.Equal(t, "2.0", b.acquire(r).Build.EPs[0].SDKVersion)
}

// The earlier SDK is in an application's own directory, so builds made with it are right for that
// application. An application that was packaged without libonnxruntime, as packagers do that follow
// linked libraries, runs, because the Python module contains it as well. The error must not say
// that its user lacks a right.
func TestApplicationWithoutItsONNXRuntime(t *testing.T) {
	b := newBench(t)
	dir := t.TempDir()
	spec, err := standin.Library(dir, "1.31.1", standin.SDK{Version: "9.9", Hardware: "sim-1"})
	require.NoError(t, err)
	r := b.request(b.model(1))
	r.Runtime = runtimes.Ref{ORTVersion: "1.31.1",
		EPLibraries: []runtimes.LibraryRef{{EP: standin.EP, Path: spec.EPs[0].Path}}}
	own := b.refused(r)
	require.Equal(t, apierr.Unavailable, own.Class)
	require.Contains(t, own.Text, "names no libonnxruntime")
	require.Contains(t, own.Hint, "put libonnxruntime.so.VERSION beside")
	r.Peer = request.Peer{UID: b.cache.uid + 1}
	require.Contains(t, b.refused(r).Text, "is not registered with this daemon",
		"which it would not load if it were whole")
}

func TestTheEarlierSDKInAnotherPlace(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	b.library("2.0")
	own := filepath.Join(t.TempDir(), "venv")
	_, err := standin.Library(own, "1.31.1", standin.SDK{Version: "1.0", Hardware: "sim-1"})
	require.NoError(t, err)
	r := b.request(b.model(1))
	r.Runtime.Directory = own
	a := b.acquire(r)
	require.Equal(t, request.Hit, a.Outcome)
	require.Equal(t, first.Build.ID, a.Build.ID)
	require.Equal(t, judge.SourceLibrary, a.Compatibility.Source)
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
}

// An EP library may load the files beside it: one that is added makes it another library, which the
// times of its directory alone reveal.
func TestLibraryThatIsAddedBesideAnother(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	first := b.acquire(r)
	beside := filepath.Join(b.runtime, "libbackend.so")
	require.NoError(t, os.WriteFile(beside, []byte("\x7fELF and more"), 0o644))
	second := b.acquire(r)
	require.Equal(t, judge.SourceLibrary, first.Compatibility.Source)
	require.Equal(t, judge.SourceEP, second.Compatibility.Source,
		"it is another library now, and was asked")

	require.NoError(t,
		os.WriteFile(filepath.Join(b.runtime, "readme.txt"), []byte("no library"), 0o644))
	require.Equal(t, request.Hit, b.acquire(r).Outcome)

	require.NoError(t, os.Remove(beside))
	require.Equal(t, judge.SourceLibrary, b.acquire(r).Compatibility.Source)
	closed := func() bool { return descriptorsOf(t, b.runtime) == 1 }
	require.Eventually(t, closed, soon, time.Millisecond, "those of what was found before")
}

// Python writes beside the libraries when it first imports their package: that discards no compile.
func TestFilesBesideTheLibrariesDuringACompile(t *testing.T) {
	b := newBench(t)
	b.close()
	b.wrap = &interrupted{Compiler: b.compiler,
		during: func() {
			require.NoError(t,
				os.Mkdir(filepath.Join(b.runtime, "__pycache__"), 0o755))
		}}
	b.open()
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

// Applications of one ONNX Runtime bring different execution providers: what was found out about
// one runtime is not held against the other.
func TestRuntimesOfOneONNXRuntime(t *testing.T) {
	b := newBench(t)
	b.close()
	other := filepath.Join(t.TempDir(), "venv")
	later, err := standin.Library(other, "1.31.1", standin.SDK{Version: "2.0", Hardware: "sim-1"})
	require.NoError(t, err)
	ort := filepath.Join(b.runtime, "libonnxruntime.so.1.31.1")
	b.change = func(o *Options) {
		o.Runtimes = []compilers.Runtime{
			{ORTLibrary: ort,
				EPs: []compilers.EPLibrary{{EP: standin.EP, Path: b.libraries(nil)[0].Path}}},
			{ORTLibrary: ort,
				EPs: []compilers.EPLibrary{{EP: standin.EP, Path: later.EPs[0].Path}}},
		}
	}
	b.open()
	all := b.cache.runtimes.All()
	require.Eventually(t, func() bool {
		first, second := b.cache.runtimes.Probe(t.Context(), all[0]),
			b.cache.runtimes.Probe(t.Context(), all[1])
		return !first.Assessed.IsZero() && !second.Assessed.IsZero() &&
			first.Marks[standin.EP].SDKVersion == "1.0" &&
			second.Marks[standin.EP].SDKVersion == "2.0"
	}, soon, time.Millisecond)
	require.NotContains(t, kinds(b.events(b.self())), event.Changed)
	require.NotEmpty(t, b.cache.runtimes.Watched(all[0]))
	require.NotEmpty(t, b.cache.runtimes.Watched(all[1]))
}

func TestRecentClientRuntimesStay(t *testing.T) {
	b := newBench(t)
	named := make([]*runtimes.Runtime, runtimes.MaxNamed+1)
	for i := range named {
		dir := filepath.Join(t.TempDir(), "venv")
		_, err := standin.Library(dir, "1.31.1", standin.SDK{Version: "1.0", Hardware: "sim-1"})
		require.NoError(t, err)
		r := b.request(b.model(1))
		r.Runtime.Directory, r.OnMiss = dir, request.KeyOnly
		b.acquire(r)
		named[i] = b.cache.runtimes.All()[min(i+1, runtimes.MaxNamed)]
		require.Equal(t, dir, named[i].Name)
	}
	require.Empty(t, b.cache.runtimes.Watched(named[0]), "nobody asks for it any more")
	require.NotEmpty(t, b.cache.runtimes.Watched(named[1]))
	require.Zero(t, descriptorsOf(t, named[0].Name))
	require.NotZero(t, descriptorsOf(t, named[1].Name))
	b.close()
	require.Zero(t, descriptorsOf(t, named[1].Name))
}

// descriptorsOf counts the descriptors of this process that lead to a directory.
func descriptorsOf(t *testing.T, dir string) (n int) {
	all, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, fd := range all {
		target, err := os.Readlink(filepath.Join("/proc/self/fd", fd.Name()))
		if err == nil && target == dir {
			n++
		}
	}
	return n
}
