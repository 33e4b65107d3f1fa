package logs

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLogIsBounded(t *testing.T) {
	dir := t.TempDir()
	out, err := Open(dir)
	require.NoError(t, err)
	require.NoError(t, out.Truncate(maxLog))
	require.NoError(t, out.Close())
	out, err = Open(dir)
	require.NoError(t, err)
	require.NoError(t, out.Close())
	require.NoFileExists(t, Path(dir)+".1", "it is full, and not over")
	require.NoError(t, os.Truncate(Path(dir), maxLog+1))
	out, err = Open(dir)
	require.NoError(t, err)
	defer out.Close()
	info, err := out.Stat()
	require.NoError(t, err)
	require.Zero(t, info.Size())
	require.FileExists(t, Path(dir)+".1")
}
