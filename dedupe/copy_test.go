package dedupe

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// severalSteps is a blob of extents of many lengths, whole blocks apart or not, and the folder in which their container stands as a file.
func severalSteps(t *testing.T) (a *Assembled, plain []byte) {
	t.Helper()
	dir := t.TempDir()
	content := randomBytes(7, 5*cas.WriteStep)
	r := &Recipe{Literals: NoLiterals, Containers: []Container{{cas.Digest{1}, int64(len(content))}}}
	for _, e := range []Extent{
		{Length: 300 << 10, From: 8192},                // a whole number of blocks
		{Length: 17, From: 3},                          // shifts all that follows
		{Length: 200<<10 + 1, From: 100<<10 + 17},      // whole blocks apart, which it neither begins nor ends at
		{Length: 70 << 10, From: 5},                    // not whole blocks apart
		{Length: 80 << 10, From: 2066, Period: 24},     // repeats, whole blocks apart
		{Length: 5000, From: 4096},                     // short
		{Length: 400<<10 + 345, From: 700<<10 + 2970},  // as the third
		{Length: 100 << 10, From: 1<<20 + 139<<10 + 5}, // as the fourth
	} {
		e.At = r.Size
		r.Extents = append(r.Extents, e)
		r.Size += e.Length
		for i := range e.Length {
			k := i
			if e.Period > 0 {
				k %= e.Period
			}
			plain = append(plain, content[e.From+k])
		}
	}
	path := filepath.Join(dir, "container")
	require.NoError(t, os.WriteFile(path, content, 0o444))
	a, err := Assemble(r, func(cas.Digest) (Source, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		return NewFile(f)
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	return a, plain
}

func outFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestWhatIsCopiedInStepsIsWholeAndCountedOnce(t *testing.T) {
	a, plain := severalSteps(t)
	f := outFile(t)
	told := int64(0)
	require.NoError(t, a.copyTo(context.Background(), f, ApplyOptions{Progress: func(done, total int64) {
		require.Greater(t, done, told)
		require.Equal(t, int64(len(plain)), total)
		told = done
	}}))
	require.Equal(t, int64(len(plain)), told)
	got, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(plain, got))
}

// What the file system shares is not copied, and all that it does not share is.
func TestWhatIsNotClonedIsCopied(t *testing.T) {
	a, plain := severalSteps(t)
	f := outFile(t)
	cloned, calls := int64(0), 0
	left, err := a.cloneTo(f, func(dst *os.File, to int64, src *os.File, from, n int64) bool {
		require.Zero(t, to%cloneBlock)
		require.Zero(t, from%cloneBlock)
		require.Zero(t, n%cloneBlock)
		b := make([]byte, n)
		_, err := src.ReadAt(b, from)
		require.NoError(t, err)
		_, err = dst.WriteAt(b, to)
		require.NoError(t, err)
		cloned += n
		calls++
		return true
	})
	require.NoError(t, err)
	require.Equal(t, 3, calls, "of the extents that are whole blocks apart")
	rest := &remaining{ranges: left}
	require.Equal(t, int64(len(plain)), cloned+rest.bytes())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			buf := make([]byte, cas.WriteStep)
			for s, ok := rest.next(); ok; s, ok = rest.next() {
				if err := a.copySpan(f, s, buf); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	got, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(plain, got))
}

func TestOneContainerThatCannotBeClonedIsNotTriedAgain(t *testing.T) {
	a, plain := severalSteps(t)
	calls := 0
	left, err := a.cloneTo(outFile(t), func(*os.File, int64, *os.File, int64, int64) bool { calls++; return false })
	require.NoError(t, err)
	require.Equal(t, 1, calls)
	require.Equal(t, []span{{0, int64(len(plain))}}, left)
}
