package packing

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// smallDisk mounts a small file system of that kind; skipped, loudly, where that cannot be done.
func smallDisk(t *testing.T, options ...string) string {
	image, at := filepath.Join(t.TempDir(), "image"), filepath.Join(t.TempDir(), "mounted")
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, 32<<20))
	require.NoError(t, os.Mkdir(at, 0o700))
	for _, command := range [][]string{append(append([]string{"mkfs.ext4", "-q", "-F"}, options...),
		image), {"mount", "-o", "loop", image, at}} {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Skipf("SKIPPED: no small file system: %s: %v: %s", command[0], err, out)
		}
	}
	t.Cleanup(func() {
		out, err := exec.Command("umount", at).CombinedOutput()
		require.NoError(t, err, "%s", out)
	})
	return at
}

// The bytes reported as freed, and as taken, are those of the file system, whatever its blocks are:
// smaller than assumed, or none for small files.
func TestFreedBytesMatchTheFileSystem(t *testing.T) {
	for _, options := range []string{"-b 1024", "-O inline_data -I 256"} {
		t.Run(options, func(t *testing.T) {
			b := newBenchIn(t, smallDisk(t, strings.Fields(options)...))
			ctx := context.Background()
			taken := func() (sum int64) {
				require.NoError(t, filepath.WalkDir(b.Store.dir,
					func(path string, d fs.DirEntry, err error) error {
						if err != nil || d.IsDir() {
							return err
						}
						disk, err := cas.DiskBytes(path)
						sum += disk
						return err
					}))
				return sum
			}
			common := noise(0, mib/2)
			var all []cas.Digest
			for i, own := range []int{40, 100, 3000} {
				all = append(all, b.put(append(noise(uint64(i+1), own), common...)))
				_, err := b.Sharing.Examine(ctx, all[i], nil)
				require.NoError(t, err)
			}
			for _, d := range all[1:] {
				before := taken()
				freed := b.pack(d)
				require.Positive(t, freed)
				require.Equal(t, before-taken(), freed)
			}
			space, err := b.Space(true)
			require.NoError(t, err)
			whole, _, _ := b.Bytes(all[0])
			require.Equal(t, taken(), whole+space.Sum())
		})
	}
}
