package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas/crashfs"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/remote"
	"github.com/epcached/epcached/store"
)

// fetchClient calls after when a fetch has ended, with the files that the helper wrote.
type fetchClient struct {
	remotes.Client
	after func(files []*os.File)
}

func (c *fetchClient) Fetch(ctx context.Context, r string, f remote.Fetch) (remote.Progress,
	error) {
	p, err := c.Client.Fetch(ctx, r, f)
	c.after(f.Files)
	return p, err
}

// checkCompiler calls before when a build is about to be loaded.
type checkCompiler struct {
	compilers.Compiler
	before func()
}

func (c *checkCompiler) Check(ctx context.Context, job compilers.CheckJob) (compilers.CheckResult,
	error) {
	c.before()
	return c.Compiler.Check(ctx, job)
}

func inodes(t testing.TB, files []*os.File) (all []uint64) {
	for _, f := range files {
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(int(f.Fd()), &st))
		all = append(all, st.Ino)
	}
	return all
}

// blobInodes returns the inodes of a build's blobs, in the order of its files.
func (b *bench) blobInodes(a *request.Answer) (all []uint64) {
	for _, f := range a.Build.Files {
		var st unix.Stat_t
		d := f.Digest.String()
		require.NoError(b, unix.Stat(filepath.Join(b.state, "objects", d[:2], d), &st))
		all = append(all, st.Ino)
	}
	return all
}

// The files that the helper wrote become blobs: what is fetched is written once.
func TestFetchedFilesAreNotCopied(t *testing.T) { onEachEngine(t, fetchWithoutCopy) }

func fetchWithoutCopy(t *testing.T, store *bucket) {
	_, public, _ := publishedTo(t, store)
	var staged []uint64
	b := machine(t, store, remotes.Remote{Trust: []string{public}}, func(o *Options) {
		o.RemoteClient = &fetchClient{o.RemoteClient, func(files []*os.File) {
			staged = inodes(t, files)
		}}
	})
	a := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, a.Outcome)
	require.NotEmpty(t, staged)
	require.Equal(t, staged, b.blobInodes(a))
}

// A helper that lies about being done writes to no build: it has a descriptor or a mapping left.
// One that takes more of the disk than the files have bytes takes it for the fetch alone.
func TestFetchedFilesThatCouldBeWrittenAreCopied(t *testing.T) {
	for name, lie := range map[string]func(t *testing.T, f *os.File) (write func()){
		"a descriptor": func(t *testing.T, f *os.File) func() {
			fd, err := unix.Dup(int(f.Fd()))
			require.NoError(t, err)
			kept := os.NewFile(uintptr(fd), "kept")
			t.Cleanup(func() { kept.Close() })
			return func() {
				_, err := kept.WriteAt([]byte("lies"), 0)
				require.NoError(t, err)
			}
		},
		"a mapping": func(t *testing.T, f *os.File) func() {
			kept, err := unix.Mmap(int(f.Fd()), 0, 4, unix.PROT_READ|unix.PROT_WRITE,
				unix.MAP_SHARED)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, unix.Munmap(kept)) })
			return func() { copy(kept, "lies") }
		},
		"disk space": func(t *testing.T, f *os.File) func() {
			require.NoError(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, 8<<20))
			return func() {}
		},
	} {
		t.Run(name, func(t *testing.T) {
			store, _, public, _ := published(t)
			var staged []uint64
			var writes []func()
			b := machine(t, store, remotes.Remote{Trust: []string{public}}, func(o *Options) {
				o.RemoteClient = &fetchClient{o.RemoteClient, func(files []*os.File) {
					staged = inodes(t, files)
					for _, f := range files {
						writes = append(writes, lie(t, f))
					}
				}}
			})
			a := b.acquire(b.request(b.model(1)))
			require.Equal(t, request.Hit, a.Outcome)
			right := b.read(a)
			for _, write := range writes {
				write()
			}
			require.NotEmpty(t, writes)
			require.Equal(t, right, b.read(a))
			for i, id := range b.blobInodes(a) {
				require.NotEqual(t, staged[i], id)
			}
			require.Zero(t, b.reserved())
		})
	}
}

// While a fetched build is checked, its space is set aside once, and the free space knows of it.
func TestAFetchSetsItsSpaceAsideOnce(t *testing.T) { onEachEngine(t, setSpaceAside) }

func setSpaceAside(t *testing.T, bucket *bucket) {
	_, public, made := publishedTo(t, bucket)
	var sizes []int64
	for _, f := range made.Build.Files {
		sizes = append(sizes, f.Size)
	}
	disk, _ := store.SpaceOf(sizes...)
	var b *bench
	var seen []store.Reserved
	b = machine(t, bucket, remotes.Remote{Trust: []string{public}}, func(o *Options) {
		o.Compiler = &checkCompiler{o.Compiler, func() {
			seen = append(seen, b.cache.Store.Ledger().Reserved())
		}}
	})
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
	require.NotEmpty(t, seen)
	require.Equal(t, disk, seen[0].Disk)
	require.Equal(t, disk-store.ManifestNeed, seen[0].Written)
	require.Zero(t, b.reserved())
}

// A daemon that is killed between a fetch and the end of its check leaves nothing.
func TestADaemonKilledWhileItChecksAFetchLeavesNothing(t *testing.T) {
	onEachEngine(t, killWhileItChecks)
}

func killWhileItChecks(t *testing.T, bucket *bucket) {
	_, public, _ := publishedTo(t, bucket)
	killed := &bench{TB: t, state: filepath.Join(memoryDir(t), "state")}
	var b *bench
	b = machine(t, bucket, remotes.Remote{Trust: []string{public}}, func(o *Options) {
		o.Compiler = &checkCompiler{o.Compiler, func() {
			if _, err := os.Stat(killed.state); err == nil {
				return
			}
			state, err := crashfs.New(b.state)
			require.NoError(t, err)
			require.NoError(t, os.Mkdir(killed.state, 0o700))
			require.NoError(t, state.Crash(killed.state, crashfs.Nothing, 0))
			require.NoError(t, state.Close())
		}}
	})
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
	left := func() (n int) {
		fetches, err := filepath.Glob(filepath.Join(killed.state, "staging", "*", "*"))
		require.NoError(t, err)
		return len(fetches)
	}
	require.Positive(t, left())

	killed.compiler, killed.runtime = b.compiler, b.runtime
	killed.openSound()
	require.Empty(t, killed.list())
	require.Zero(t, killed.blobs())
	require.Eventually(t, func() bool { return left() == 0 }, soon, time.Millisecond)
	require.Zero(t, killed.reserved())
}
