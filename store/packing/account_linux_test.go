package packing

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
)

// accountant compares, whenever a blob has got its name or lost it, what is on the disk with what
// is accounted for.
type accountant struct {
	cas.OS
	b     *bench
	mu    sync.Mutex
	times int
}

func (a *accountant) Rename(from, to string) error {
	return a.around(to, func() error { return a.OS.Rename(from, to) })
}

func (a *accountant) Remove(path string) error {
	return a.around(path, func() error { return a.OS.Remove(path) })
}

func (a *accountant) Link(from, to string) error {
	return a.around(to, func() error { return a.OS.Link(from, to) })
}

func (a *accountant) around(path string, do func() error) error {
	if a.b == nil {
		return do() // it is only being filled
	}
	below, _ := filepath.Rel(a.b.Store.dir, path)
	if !strings.HasPrefix(below, "objects/") || strings.Contains(below, "incoming") {
		return do()
	}
	a.look("before " + below)
	err := do()
	a.look("after " + below)
	return err
}

func (a *accountant) look(when string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.times++
	disk, told := a.b.onDisk(), a.b.warnings()
	require.LessOrEqual(a.b, disk, told+a.b.user.reservedBytes(),
		"%s: bytes are on the disk and in no account", when)
	if a.b.user.evicting() == 0 {
		require.LessOrEqual(a.b, told, disk, "%s: bytes are accounted for twice", when)
	}
}

// onDisk is what blobs and unpacked files take that have their names; recipes, which are small, do
// not count.
func (b *bench) onDisk() (sum int64) {
	for _, dir := range []string{"objects", "unpacked/objects"} {
		// what goes meanwhile does not count
		_ = filepath.WalkDir(filepath.Join(b.Store.dir, dir),
			func(path string, e fs.DirEntry, err error) error {
				var st unix.Stat_t
				if err == nil && e.Type().IsRegular() && !strings.Contains(path, "incoming") &&
					unix.Lstat(path, &st) == nil {
					sum += st.Blocks * 512
				}
				return nil
			})
	}
	return sum
}

// warnings is what status reports of them.
func (b *bench) warnings() (sum int64) {
	space, err := b.Space(true)
	require.NoError(b, err)
	ahead, err := b.AccountExcess()
	require.NoError(b, err)
	for _, d := range b.user.all() {
		disk, _, err := b.memory.DiskBytes(d)
		require.NoError(b, err)
		sum += disk
	}
	return sum + space.Bases + space.Copies - ahead
}

// The space of blobs is accounted for once at each moment while their form changes, whichever is
// evicted meanwhile. Bytes being written are reserved, and an eviction counts bytes until it has
// asked for their removal.
func TestAccountIsExactWhileBlobsArePackedAndUnpacked(t *testing.T) {
	ctx := context.Background()
	for _, c := range formChanges(ctx) {
		t.Run(c.name, func(t *testing.T) {
			steps := 0
			for victim := range c.n {
				for step := steps - 1; step >= max(0, steps-4) || steps == 0; step-- {
					a := &accountant{}
					b := newBenchOn(t, inMemory(t), a)
					all := c.blobs(ctx, b)
					a.b = b
					b.remeasured = func(cas.Digest) {
						require.Equal(t, b.onDisk(), b.warnings(), "before a blob is measured")
					}
					taken := 0
					var mu sync.Mutex // several readers are at the gate
					err := c.do(b, all, func(context.Context) error {
						mu.Lock()
						defer mu.Unlock()
						if taken >= step { // else as the last time
							a.look("at the gate")
						}
						if taken == step {
							b.evict(all[victim])
							a.look("evicted")
						}
						taken++
						return nil
					})
					if err != nil {
						require.True(t, IsMissingOrDamaged(err) || errors.Is(err, ErrInUse) ||
							errors.Is(err, errSavesTooLittle), "%v", err)
					}
					a.look("at the end")
					require.Equal(t, b.onDisk(), b.warnings())
					require.Greater(t, a.times, 2)
					if steps == 0 {
						steps, step = taken, taken // none was evicted
						require.Positive(t, steps)
					}
				}
			}
		})
	}
}

// A sum that reads a disk which does not answer blocks no call that needs none.
func TestAccountIsNotLockedWhileTheDiskIsRead(t *testing.T) {
	b := newBench(t)
	defer b.accountByForm(b.put(noise(1, 100)))()
	b.memory.mu.Lock() // as long as the disk does not answer
	begun, read := make(chan bool), make(chan error)
	go func() {
		close(begun)
		_, err := b.Space(true)
		read <- err
	}()
	<-begun
	free := true
	for range 100 {
		if free = free && b.account.mu.TryLock(); free {
			b.account.mu.Unlock()
			time.Sleep(time.Millisecond)
		}
	}
	b.memory.mu.Unlock()
	require.NoError(t, <-read)
	require.True(t, free)
}
