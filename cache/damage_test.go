package cache

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/epcached/epcached/cache/request"
	"github.com/stretchr/testify/require"
)

func TestDamageIsNeverServed(t *testing.T) {
	damages := map[string]func(t *testing.T, path string){
		"flipped bit": func(t *testing.T, path string) {
			require.NoError(t, os.Chmod(path, 0o644))
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			var one [1]byte
			_, err = f.ReadAt(one[:], 40)
			require.NoError(t, err)
			one[0] ^= 1
			_, err = f.WriteAt(one[:], 40)
			require.NoError(t, err)
		},
		"truncated": func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, 10)) },
		"emptied":   func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, 0)) },
		"deleted":   func(t *testing.T, path string) { require.NoError(t, os.Remove(path)) },
		"replaced": func(t *testing.T, path string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.WriteFile(path, []byte("something else"), 0o444))
		},
	}
	for name, damage := range damages {
		for _, running := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/running=%v", name, running), func(t *testing.T) {
				b := newBench(t)
				first := b.acquire(b.request(b.model(1)))
				files := b.read(first)
				for i := range first.Build.Files {
					if !running {
						b.close()
					}
					d := b.current(first.Build.Files[i].Digest)
					damage(t, d)
					if !running {
						b.open()
					}
					healed := b.acquire(b.request(b.model(1)))
					require.Equal(t, files, b.read(healed), "what is served has the right bytes")
					again := b.acquire(b.request(b.model(1)))
					require.Equal(t, request.Hit, again.Outcome)
					require.Equal(t, files, b.read(again))
				}
			})
		}
	}
}

func TestViewRepairedUnderANewID(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	inner := filepath.Join(first.Path, filepath.Dir(first.Graph))
	require.NoError(t, os.Chmod(inner, 0o755))
	require.NoError(t, os.Remove(filepath.Join(inner, first.Build.Files[1].Name)))
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, again.Outcome,
		"the blob is sound: only the view has to be made anew")
	require.NotEqual(t, first.Graph, again.Graph)
	require.Len(t, b.read(again), 2)
}
