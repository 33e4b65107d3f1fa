package store

import (
	"os"
	"path/filepath"
	"strings"
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

func TestStoresAreNotMadeAmongOtherFiles(t *testing.T) {
	for name, c := range map[string]struct {
		files []string // a directory ends in a slash
		other string   // the file that the error names
	}{
		"empty":                {},
		"a mount":              {files: []string{"lost+found/", ".snapshot/x"}},
		"log, socket's locks":  {files: []string{"epcached.log", "epcached.sock.lock", "s.start"}},
		"empty directories":    {files: []string{"copies/", "views/"}},
		"a store not complete": {files: []string{"README", "CACHEDIR.TAG", "staging/x"}},
		"an earlier store":     {files: []string{"index.db", "objects/00/x", "mine.txt"}},
		"manifests only":       {files: []string{"manifests/", "mine.txt"}},
		"a checkout":           {files: []string{".git/HEAD", "README", "a.go"}, other: "a.go"},
		"directories":          {files: []string{"Documents/a.txt"}, other: "Documents"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for _, file := range c.files {
				path := filepath.Join(dir, file)
				require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
				if strings.HasSuffix(file, "/") {
					require.NoError(t, os.MkdirAll(path, 0o755))
				} else {
					require.NoError(t, os.WriteFile(path, nil, 0o644))
				}
			}
			require.NoError(t, os.Chmod(dir, 0o711))
			err := makeLayout(dir)
			if c.other == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err,
				dir+" is not a store, and has other files: \""+c.other+"\"")
			require.NoDirExists(t, filepath.Join(dir, "views"))
		})
	}
}
