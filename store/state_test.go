package store

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A full disk leaves files without a byte: programs that make backups would not know the store for
// a cache.
func TestEmptyNotesAreRewritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	require.NoError(t, os.Mkdir(dir, 0o711))
	tag, readme := filepath.Join(dir, "CACHEDIR.TAG"), filepath.Join(dir, "README")
	require.NoError(t, os.WriteFile(tag, nil, 0o644))
	require.NoError(t, os.WriteFile(readme, []byte("mine"), 0o644))
	require.NoError(t, makeLayout(dir))
	text, err := os.ReadFile(tag)
	require.NoError(t, err)
	require.Contains(t, string(text), "Signature: 8a477f597d28d172789f06886806bc55")
	text, err = os.ReadFile(readme)
	require.NoError(t, err)
	require.Equal(t, "mine", string(text))
}
