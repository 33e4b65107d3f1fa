package dedupe

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

func TestCopyInStepsIsCompleteAndCountedOnce(t *testing.T) {
	var plain []byte
	content := randomBytes(7, 5*cas.WriteStep)
	r := &Recipe{Literals: NoLiterals,
		Bases: []Base{{cas.Digest{1}, int64(len(content))}}}
	for _, e := range []Extent{
		{Length: 300 << 10, From: 8192}, // a whole number of blocks
		{Length: 17, From: 3},           // shifts all that follows
		// whole blocks apart, which it neither begins nor ends at
		{Length: 200<<10 + 1, From: 100<<10 + 17},
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
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	require.NoError(t, err)
	told := int64(0)
	open := func(cas.Digest) (Source, error) { return source(content), nil }
	require.NoError(t,
		Apply(context.Background(), r, open, f,
			ApplyOptions{Trusted: true, Progress: func(done, total int64) {
				require.Greater(t, done, told)
				require.Equal(t, int64(len(plain)), total)
				told = done
			}}))
	require.NoError(t, f.Close())
	require.Equal(t, int64(len(plain)), told)
	got, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(plain, got))
}
