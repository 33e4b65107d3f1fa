package atrest

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
	"github.com/epcached/epcached/views"
)

// atRest is a store with the blob of one file, and the build that the file is all of.
func atRest(t *testing.T) (*Store, *index.Build, string) {
	dir := t.TempDir()
	words := filepath.Join(t.TempDir(), "words")
	require.NoError(t, os.WriteFile(words, []byte("some bytes"), 0o600))
	d, err := cas.SumFile(context.Background(), words)
	require.NoError(t, err)
	blob := filepath.Join(dir, "objects", d.String()[:2], d.String())
	require.NoError(t, os.MkdirAll(filepath.Dir(blob), 0o700))
	require.NoError(t, os.Rename(words, blob))
	return In(dir), &index.Build{Scope: "shared", Graph: "x_ctx.onnx", Files: []index.File{{Name: "x_ctx.onnx", Digest: d, Size: 10}}}, blob
}

func TestABuildWithoutAViewIsUnpackedElsewhere(t *testing.T) {
	s, b, _ := atRest(t)
	v, err := s.View(context.Background(), b)
	require.NoError(t, err)
	require.Nil(t, v)
	v, err = s.Unpack(context.Background(), b, filepath.Join(t.TempDir(), "unpacked"), nil)
	require.NoError(t, err)
	data, err := os.ReadFile(filepath.Join(v.Path, v.ID, b.Graph))
	require.NoError(t, err)
	require.Equal(t, "some bytes", string(data))
	require.NoError(t, v.Folder.Close())
	require.NoError(t, views.OpenTree(v.Path)) // or who cleans up after the test may not
}

func TestWhatIsLostOrDamagedIsSaid(t *testing.T) {
	s, b, blob := atRest(t)
	require.NoError(t, os.WriteFile(blob, []byte("some other"), 0o600))
	_, err := s.View(context.Background(), b)
	require.True(t, Damaged(err), "%v", err)
	require.NoError(t, os.Remove(blob))
	_, err = s.View(context.Background(), b)
	require.Equal(t, refusal.NotFound, refusal.ClassOf(err))
	require.False(t, Damaged(err))
}
