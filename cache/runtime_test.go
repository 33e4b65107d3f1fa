package cache

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// A caller that has loaded a library gets what was made for it, even when another one is at its path by now, and
// nothing that was made by the other.
func TestLibraryThatWasReplacedUnderItsCaller(t *testing.T) {
	b := newBench(t)
	refs := b.libraries(nil)
	loaded := b.openFile(refs[0].Path)
	r := b.request(b.model(1))
	r.Runtime = RuntimeRef{ORTVersion: "1.31.1", ORTLibrary: filepath.Join(b.runtime, "libonnxruntime.so.1.31.1"), EPLibraries: b.libraries(loaded)}
	first := b.acquire(r)
	require.Equal(t, "1.0", first.Build.EPs[0].SDKVersion)

	b.library("2.0")
	again := b.acquire(r)
	require.Equal(t, Hit, again.Outcome)
	require.Equal(t, first.Build.BuildKey, again.Build.BuildKey)
	compiles := b.compiler.Compiles.Load()
	other := b.request(b.model(2))
	other.Runtime = r.Runtime
	e := b.refused(other)
	require.Equal(t, Unavailable, e.Class, "nothing can be compiled with it any more")
	require.Contains(t, e.Text, refs[0].Path)
	require.Contains(t, e.Hint, "restart")
	require.Equal(t, compiles, b.compiler.Compiles.Load())

	r.Runtime.EPLibraries = b.libraries(b.openFile(refs[0].Path))
	require.Equal(t, "2.0", b.acquire(r).Build.EPs[0].SDKVersion)
	require.Equal(t, first.Build.BuildKey, func() index.BuildKey { r.Runtime.EPLibraries = b.libraries(loaded); return b.acquire(r).Build.BuildKey }())
}

// An inode number is used again when its file is gone: another library with the number of an earlier one is not it.
func TestEarlierLibraryIsKnownByItsBytes(t *testing.T) {
	b := newBench(t)
	path := b.libraries(nil)[0].Path
	r := b.request(b.model(1))
	r.Runtime = RuntimeRef{ORTVersion: "1.31.1", ORTLibrary: filepath.Join(b.runtime, "libonnxruntime.so.1.31.1"), EPLibraries: b.libraries(b.openFile(path))}
	b.acquire(r)
	aside := filepath.Join(t.TempDir(), "aside")
	require.NoError(t, os.Rename(path, aside))
	b.library("2.0")
	require.Equal(t, Hit, b.acquire(r).Outcome)
	require.NoError(t, os.WriteFile(aside, []byte("stand-in\n3.0\nsim-1\n"), 0o644)) // the same inode
	require.Equal(t, Unavailable, b.refused(r).Class)
}

// What lies beside an EP library may be what it loads: one that is added makes another library of it, by its folder's
// times alone.
func TestLibraryThatIsAddedBesideAnother(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	first := b.acquire(r)
	beside := filepath.Join(b.runtime, "libbackend.so")
	require.NoError(t, os.WriteFile(beside, []byte("\x7fELF and more"), 0o644))
	second := b.acquire(r)
	require.Equal(t, sourceLibrary, first.Compatibility.Source)
	require.Equal(t, sourceEP, second.Compatibility.Source, "it is another library now, and was asked")

	require.NoError(t, os.WriteFile(filepath.Join(b.runtime, "readme.txt"), []byte("no library"), 0o644))
	require.Equal(t, Hit, b.acquire(r).Outcome)

	require.NoError(t, os.Remove(beside))
	require.Equal(t, sourceLibrary, b.acquire(r).Compatibility.Source)
}
