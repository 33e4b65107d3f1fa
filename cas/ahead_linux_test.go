package cas

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"
)

func TestAdoptHashedAhead(t *testing.T) {
	b := random(3 * pieceSize)
	other := bytes.Clone(b)
	other[pieceSize]++
	for _, c := range []struct {
		name      string
		meanwhile func(t *testing.T, path string)
		want      []byte
		again     bool // it is hashed again
	}{
		{"as it was", func(*testing.T, string) {}, b, false},
		{"written", func(t *testing.T, path string) {
			require.NoError(t, os.Chmod(path, 0o600))
			require.NoError(t, os.WriteFile(path, other, 0o600))
		}, other, true},
		{"another file", func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path+".new", other, 0o600))
			require.NoError(t, os.Rename(path+".new", path))
		}, other, true},
	} {
		for way, ahead := range map[string]func(s *Store, path string) (Hashed, error){
			"hashed": func(s *Store, path string) (Hashed, error) {
				require.NoError(t, os.WriteFile(path, b, 0o600))
				return s.HashAhead(ctx, path)
			},
			"copied": func(s *Store, path string) (Hashed, error) {
				return s.CopyAhead(ctx, bytes.NewReader(b), path, int64(len(b)))
			},
		} {
			t.Run(way+" "+c.name, func(t *testing.T) {
				fs := &countingReads{}
				s := openStore(t, Options{FS: fs})
				path := filepath.Join(s.dir, "staged")
				known, err := ahead(s, path)
				require.NoError(t, err)
				require.NotZero(t, known)
				c.meanwhile(t, path)
				fs.reset()
				d, n, err := s.AdoptHashed(ctx, path, known)
				require.NoError(t, err)
				require.Equal(t, c.again, fs.reset() > 0)
				require.Equal(t, Digest(blake3.Sum256(c.want)), d)
				require.Equal(t, int64(len(c.want)), n)
				require.True(t, bytes.Equal(c.want, contents(t, s, d)))
				require.NoFileExists(t, path)
			})
		}
	}
}

func TestCopyAheadOfLessThanIsStated(t *testing.T) {
	s := openStore(t, Options{})
	b := random(pieceSize + 10)
	_, err := s.CopyAhead(ctx, bytes.NewReader(b), filepath.Join(s.dir, "staged"), int64(len(b))+1)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	_, err = s.CopyAhead(ctx, bytes.NewReader(b), filepath.Join(s.dir, "staged"), int64(len(b)))
	require.ErrorIs(t, err, os.ErrExist)
}
