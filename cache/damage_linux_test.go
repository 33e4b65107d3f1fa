package cache

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
)

// A file in the place of a blob that is not regular is damage: it is noted, quarantined, and
// repaired.
func TestNonRegularBlobIsDamage(t *testing.T) {
	cases := map[string]func(t *testing.T, path string){
		"symbolic link to the same bytes": func(t *testing.T, path string) {
			aside := filepath.Join(filepath.Dir(path), "aside")
			require.NoError(t, os.Rename(path, aside))
			t.Cleanup(func() { require.NoError(t, os.Remove(aside)) })
			require.NoError(t, os.Symlink(aside, path))
		},
		"directory": func(t *testing.T, path string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.Mkdir(path, 0o755))
		},
		"pipe": func(t *testing.T, path string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, syscall.Mkfifo(path, 0o644))
		},
		"unreadable": func(t *testing.T, path string) {
			if os.Geteuid() == 0 {
				t.Skip("SKIPPED: root reads what nobody may read")
			}
			require.NoError(t, os.Chmod(path, 0))
		},
	}
	for name, replace := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			first := b.acquire(b.request(b.model(1)))
			files := b.read(first)
			replace(t, b.blob(first))
			b.views()
			again := b.acquire(b.request(b.model(1)))
			require.Equal(t, request.Compiled, again.Outcome, again.Why)
			require.Equal(t, files, b.read(again))
			require.Contains(t, again.Why, "damaged")
			require.Contains(t, kinds(b.events(b.self())), event.Damaged)
			require.Contains(t, kinds(b.events(b.self())), event.Healed)
			require.Equal(t, index.Current, b.list()[0].row.State)
		})
	}
}
