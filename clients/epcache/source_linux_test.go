package epcache_test

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/clients/epcache"
)

// tree makes files with their names as content, directories (named with a slash), and links.
func tree(t *testing.T, entries map[string]string) string {
	t.Helper()
	top := t.TempDir()
	for name, target := range entries {
		path := filepath.Join(top, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		if target == "" {
			require.NoError(t, os.WriteFile(path, []byte(name), 0o600))
		} else {
			require.NoError(t, os.Symlink(target, path))
		}
	}
	return top
}

// The rows are what ONNX Runtime 1.24 and 1.31 do with these directories.
func TestExternalDataIsBelowTheModelsDirectories(t *testing.T) {
	rows := map[string]struct {
		entries map[string]string
		opens   string // "": refused
	}{
		"link out of the directory": {
			map[string]string{"m/model.onnx": "", "key": "", "m/w.bin": "../key"}, ""},
		"link within the directory": {
			map[string]string{"m/model.onnx": "", "m/s/w": "", "m/w.bin": "s/w"}, "m/s/w"},
		"directory that leads out": {
			map[string]string{"m/model.onnx": "", "keys/w.bin": "", "m/s": "../keys",
				"m/w.bin": "s/w.bin"}, ""},
		"hub": {
			map[string]string{"blobs/1": "", "blobs/2": "", "m/model.onnx": "../blobs/1",
				"m/w.bin": "../blobs/2"}, "blobs/2"},
		"hub, deeper": {
			map[string]string{"blobs/1": "", "blobs/s/2": "", "m/model.onnx": "../blobs/1",
				"m/w.bin": "../blobs/s/2"}, "blobs/s/2"},
		"hub, only the data linked": {
			map[string]string{"m/model.onnx": "", "blobs/2": "", "m/w.bin": "../blobs/2"}, ""},
		"hub, data elsewhere": {
			map[string]string{"blobs/1": "", "keys/2": "", "m/model.onnx": "../blobs/1",
				"m/w.bin": "../keys/2"}, ""},
		"name that begins with the directory's": {
			map[string]string{"m/model.onnx": "", "m2/w": "", "m/w.bin": "../m2/w"}, ""},
		"beside the target": {
			map[string]string{"blobs/1": "", "blobs/w.bin": "", "m/model.onnx": "../blobs/1"},
			"blobs/w.bin"},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			s, err := epcache.OpenSource(filepath.Join(tree(t, row.entries), "m/model.onnx"))
			require.NoError(t, err)
			defer s.Close()
			f, err := s.External("w.bin")
			if row.opens == "" {
				require.ErrorContains(t, err, "escapes model directory")
				return
			}
			require.NoError(t, err)
			defer f.Close()
			content, err := io.ReadAll(f)
			require.NoError(t, err)
			require.Equal(t, row.opens, string(content))
		})
	}
}

func TestExternalDataOfADirectoryThatIsExchanged(t *testing.T) {
	top := tree(t, map[string]string{"m/model.onnx": "", "m/w.bin": "", "keys/w.bin": ""})
	dir := filepath.Join(top, "m")
	s, err := epcache.OpenSource(filepath.Join(dir, "model.onnx"))
	require.NoError(t, err)
	defer s.Close()
	require.NoError(t, os.Rename(dir, filepath.Join(top, "old")))
	require.NoError(t, os.Symlink("keys", dir))
	f, err := s.External("w.bin")
	require.NoError(t, err)
	defer f.Close()
	content, err := io.ReadAll(f)
	require.NoError(t, err)
	require.Equal(t, "m/w.bin", string(content), "the file beside the model that was opened")
}
