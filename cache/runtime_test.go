package cache

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A caller that has loaded a library gets nothing that was made by the one that is at its path by now.
func TestLibraryThatWasReplacedUnderItsCaller(t *testing.T) {
	b := newBench(t)
	refs := b.libraries(nil)
	loaded := b.openFile(refs[0].Path)
	r := b.request(b.model(1))
	r.Runtime = RuntimeRef{ORTVersion: "1.31.1", ORTLibrary: filepath.Join(b.runtime, "libonnxruntime.so.1.31.1"), EPLibraries: b.libraries(loaded)}
	require.Equal(t, "1.0", b.acquire(r).Build.EPs[0].SDKVersion)

	b.library("2.0")
	e := b.refused(r)
	require.Equal(t, Unavailable, e.Class)
	require.Contains(t, e.Text, refs[0].Path)
	require.Contains(t, e.Hint, "restart")

	r.Runtime.EPLibraries = b.libraries(b.openFile(refs[0].Path))
	require.Equal(t, "2.0", b.acquire(r).Build.EPs[0].SDKVersion)
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
	require.Equal(t, Compiled, second.Outcome)
	require.NotEqual(t, first.Build.BuildKey, second.Build.BuildKey)

	require.NoError(t, os.WriteFile(filepath.Join(b.runtime, "readme.txt"), []byte("no library"), 0o644))
	require.Equal(t, Hit, b.acquire(r).Outcome)

	require.NoError(t, os.Remove(beside))
	back := b.acquire(r)
	require.Equal(t, Hit, back.Outcome)
	require.Equal(t, first.Build.BuildKey, back.Build.BuildKey)
}
