package cache

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/epcached/epcached/cache/request"
	"github.com/stretchr/testify/require"
)

// A file in the place of a recipe that is not regular is damage, for a running daemon, a starting
// one, and a reader of the store without a daemon.
func TestNonRegularRecipeIsDamage(t *testing.T) {
	cases := map[string]func(t *testing.T, path, others string){
		"a symbolic link to the same bytes": func(t *testing.T, path, _ string) {
			aside := filepath.Join(t.TempDir(), "aside")
			raw, err := os.ReadFile(path)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(aside, raw, 0o444))
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.Symlink(aside, path))
		},
		"a directory": func(t *testing.T, path, _ string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.Mkdir(path, 0o755))
			require.NoError(t, os.WriteFile(filepath.Join(path, "file"), []byte("x"), 0o644))
		},
		"a pipe": func(t *testing.T, path, _ string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, syscall.Mkfifo(path, 0o644))
		},
		"a socket's place": func(t *testing.T, path, _ string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, syscall.Mknod(path, syscall.S_IFSOCK|0o644, 0))
		},
		"another name of another blob's recipe": func(t *testing.T, path, others string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.Link(others, path))
		},
		"unreadable": func(t *testing.T, path, _ string) {
			if os.Geteuid() == 0 {
				t.Skip("SKIPPED: root reads what nobody may read")
			}
			require.NoError(t, os.Chmod(path, 0))
		},
	}
	origin := newBench(t)
	builds, files := origin.similar(3)
	require.Positive(t, origin.pack(builds[1]))
	require.Positive(t, origin.pack(builds[2]))
	again := origin.copies()
	for name, replace := range cases {
		for when, restart := range map[string]bool{"running": false, "restarted": true,
			"read only": true} {
			t.Run(name+", "+when, func(t *testing.T) {
				b := again(t)
				if !restart {
					b.openSound()
				}
				replace(t, b.recipePath(large(builds[1])), b.recipePath(large(builds[2])))
				if when == "read only" {
					b.requireNotFoundWithout()
					return
				}
				if restart {
					b.openSound()
				}
				b.requireRecompiled(builds[1], files[1])
				for i, variant := range map[int]int{0: 1, 2: 3} {
					other := b.acquire(b.variant(variant))
					require.Equal(t, request.Hit, other.Outcome, "the others are as they were")
					require.Equal(t, files[i], b.read(other))
				}
			})
		}
	}
}
