package dedupe_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// On a file system that shares extents, what lies alike within its blocks is cloned when a blob is unpacked; the rest is copied.
func TestUnpackingClonesWhereItCan(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			dir, ctx := loopDevice(t, kind), context.Background()
			store, err := cas.Open(filepath.Join(dir, "state"), cas.Options{})
			require.NoError(t, err)
			unpacked, err := cas.Open(filepath.Join(dir, "unpacked"), cas.Options{Volatile: true})
			require.NoError(t, err)
			container := make([]byte, 8<<20)
			_, _ = rand.NewChaCha8([32]byte{1}).Read(container)
			d, size, err := store.Put(ctx, bytes.NewReader(container))
			require.NoError(t, err)
			for shift, most := range map[int64]int64{0: size / 8, 4: 2 * size} {
				half := size / 2
				plain := append(append([]byte{}, container[half+shift:]...), container[:half+shift]...)
				r := &dedupe.Recipe{Blob: blake3.Sum256(plain), Size: size, Literals: dedupe.NoLiterals, Containers: []dedupe.Container{{Digest: d, Size: size}},
					Extents: []dedupe.Extent{{Length: half - shift, From: half + shift}, {At: half - shift, Length: half + shift}}}
				unix.Sync()
				before := freeBytes(t, dir)
				require.NoError(t, unpacked.Fill(ctx, r.Blob, func(f *os.File) error {
					return dedupe.Apply(ctx, r, func(d cas.Digest) (dedupe.Source, error) {
						f, err := store.Open(ctx, d)
						if err != nil {
							return nil, err
						}
						return dedupe.NewFile(f)
					}, f, dedupe.ApplyOptions{Trusted: true})
				}))
				unix.Sync()
				taken := before - freeBytes(t, dir)
				t.Logf("%d bytes whose distance is %d beside whole blocks took %d", size, shift, taken)
				require.Less(t, taken, most)
				require.NoError(t, unpacked.Check(ctx, r.Blob))
			}
		})
	}
}

func freeBytes(t *testing.T, dir string) int64 {
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &st))
	return int64(st.Bfree) * st.Bsize
}

// loopDevice mounts a new file system of that kind.
func loopDevice(t *testing.T, kind string) string {
	mkfs, err := exec.LookPath("mkfs." + kind)
	if err != nil || os.Geteuid() != 0 {
		t.Skipf("SKIPPED, CLONING IS NOT TESTED ON %s: it takes mkfs.%s and root", strings.ToUpper(kind), kind)
	}
	image, dir := filepath.Join(t.TempDir(), "image"), t.TempDir()
	f, err := os.Create(image)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(512<<20))
	require.NoError(t, f.Close())
	out, err := exec.Command(mkfs, image).CombinedOutput()
	require.NoError(t, err, string(out))
	if out, err := exec.Command("mount", "-o", "loop", image, dir).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED, CLONING IS NOT TESTED ON %s: %s", strings.ToUpper(kind), out)
	}
	t.Cleanup(func() { require.NoError(t, exec.Command("umount", dir).Run()) })
	return dir
}
