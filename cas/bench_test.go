package cas

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// noSync leaves the disk out of what is measured.
type noSync struct{ FS }

func (noSync) Sync(*os.File) error { return nil }

func BenchmarkPut(b *testing.B) {
	const size = 256 << 20
	data := random(size)
	source := filepath.Join(b.TempDir(), "source")
	require.NoError(b, os.WriteFile(source, data, 0o600))
	f, err := os.Open(source)
	require.NoError(b, err)
	defer f.Close()
	put := func(fs FS, put func(*Store) (Digest, int64, error)) func(*testing.B) {
		return func(b *testing.B) {
			s, err := Open(b.TempDir(), Options{FS: fs})
			require.NoError(b, err)
			b.SetBytes(size)
			for b.Loop() {
				d, _, err := put(s)
				require.NoError(b, err)
				b.StopTimer()
				require.NoError(b, s.Remove(d))
				b.StartTimer()
			}
		}
	}
	file := func(s *Store) (Digest, int64, error) { return s.PutFile(context.Background(), f) }
	reader := func(s *Store) (Digest, int64,
		error) {
		return s.Put(context.Background(), bytes.NewReader(data))
	}
	b.Run("file not synced", put(noSync{OS{}}, file))
	b.Run("reader not synced", put(noSync{OS{}}, reader))
	b.Run("file", put(OS{}, file))
	b.Run("reader", put(OS{}, reader))
	b.Run("copy with one sync", func(b *testing.B) {
		b.SetBytes(size)
		to := filepath.Join(b.TempDir(), "to")
		for b.Loop() {
			out, err := os.Create(to)
			require.NoError(b, err)
			_, err = f.Seek(0, 0)
			require.NoError(b, err)
			_, err = out.ReadFrom(f)
			require.NoError(b, err)
			require.NoError(b, out.Sync())
			require.NoError(b, out.Close())
			b.StopTimer()
			require.NoError(b, os.Remove(to))
			b.StartTimer()
		}
	})
}
