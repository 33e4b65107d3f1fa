package modelfile

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestModelThatChanges(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tiny.onnx")
	require.NoError(t, os.WriteFile(path, []byte("graph"), 0o600))
	m, err := Open(path)
	require.NoError(t, err)
	defer m.Close()
	data := filepath.Join(filepath.Dir(path), "w.bin")
	require.NoError(t, os.WriteFile(data, []byte("weights"), 0o600))
	f, err := m.External("w.bin")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, m.Unchanged())
	require.NoError(t, os.WriteFile(data, []byte("other"), 0o600))
	require.ErrorContains(t, m.Unchanged(), "w.bin")
}
