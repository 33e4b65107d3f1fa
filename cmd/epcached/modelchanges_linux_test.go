package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// believed is how long a file has to be left alone before the daemon believes its times, and more.
const believed = 2200 * time.Millisecond

// victim is a model's file that changes behind its times.
type victim struct {
	testing.TB            // of the round
	owner      testing.TB // for what lasts over the rounds
	dir, path  string
	file       *os.File // open for writing
	mapped     []byte   // an old shared mapping; nil until asked for
	external   bool     // the file is the model's external data
	change     func(*victim, uint64)
	info       os.FileInfo
}

// contents are of equal length, so that not even the size differs.
func (v *victim) content(number uint64) []byte {
	if v.external {
		return tinymodel.Floats(number, 16*16)
	}
	return compilertest.Dense(number, 16, 1)
}

func (v *victim) write(number uint64) {
	_, err := v.file.WriteAt(v.content(number), 0)
	require.NoError(v, err)
}

func (v *victim) mmap() {
	size := (len(v.content(0)) + os.Getpagesize() - 1) &^ (os.Getpagesize() - 1)
	m, err := unix.Mmap(int(v.file.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(v, err)
	v.mapped = m
	v.owner.Cleanup(func() { require.NoError(v.owner, unix.Munmap(m)) })
}

// store writes through the mapping and nothing else.
func (v *victim) store(number uint64) { copy(v.mapped, v.content(number)) }

// remember and putBack keep the modification time as it was; the change time cannot be had.
func (v *victim) remember() {
	info, err := v.file.Stat()
	require.NoError(v, err)
	v.info = info
}

func (v *victim) putBack() {
	require.NoError(v, os.Chtimes(v.path, v.info.ModTime(), v.info.ModTime()))
}

// waysToChange are those in which content gets into a file. before is done when the file is new;
// change brings new content.
var waysToChange = map[string]struct {
	before func(*victim)
	change func(*victim, uint64)
}{
	"written": {nil, (*victim).write},
	"written, time put back": {nil, func(v *victim, n uint64) {
		v.remember()
		v.write(n)
		v.putBack()
	}},
	"cut off and written again, time put back": {nil, func(v *victim, n uint64) {
		v.remember()
		require.NoError(v, v.file.Truncate(0))
		v.write(n)
		v.putBack()
	}},
	"another file in its place, of the same time": {nil, func(v *victim, n uint64) {
		v.remember()
		require.NoError(v, os.WriteFile(v.path+".new", v.content(n), 0o644))
		require.NoError(v, os.Rename(v.path+".new", v.path))
		v.putBack()
		f, err := os.OpenFile(v.path, os.O_RDWR, 0)
		require.NoError(v, err)
		v.owner.Cleanup(func() { f.Close() })
		v.file = f
	}},
	"store, page clean when hashed": {(*victim).mmap, (*victim).store},
	"store, page read before": {func(v *victim) {
		v.mmap()
		require.NotEmpty(v, string(v.mapped[:100]))
	}, (*victim).store},
	"store, page dirty when hashed": {func(v *victim) {
		v.mmap()
		v.store(0)
	}, (*victim).store},
	"store, synced": {(*victim).mmap, func(v *victim, n uint64) {
		v.store(n)
		require.NoError(v, unix.Msync(v.mapped, unix.MS_SYNC))
	}},
	"store, time put back": {(*victim).mmap, func(v *victim, n uint64) {
		v.remember()
		v.store(n)
		v.putBack()
	}},
	"store into a locked page": {func(v *victim) {
		v.mmap()
		v.store(0)
		if err := unix.Mlock(v.mapped); err != nil {
			v.Logf("LESS IS TESTED: no memory may be locked: %v", err)
		}
	}, (*victim).store},
	"stored by a read into the mapping": {(*victim).mmap, func(v *victim, n uint64) {
		readInto(v, n, 0)
	}},
	"stored by a device": {(*victim).mmap, func(v *victim, n uint64) {
		readInto(v, n, unix.O_DIRECT)
	}},
}

// readInto has the kernel store the content into the mapping: by copying, or by the disk itself.
func readInto(v *victim, number uint64, flags int) {
	from := filepath.Join(v.dir, fmt.Sprint("from", number))
	size := len(v.mapped)
	require.NoError(v,
		os.WriteFile(from, append(v.content(number), make([]byte, size-len(v.content(number)))...),
			0o644))
	f, err := os.OpenFile(from, os.O_RDWR|flags, 0)
	if err != nil {
		v.Skipf("SKIPPED: no direct reading here: %v", err)
	}
	defer f.Close()
	require.NoError(v, f.Sync())
	n, err := f.ReadAt(v.mapped, 0)
	require.NoError(v, err)
	require.Equal(v, size, n)
}

// acquire returns the answer for the model as it lies there, and whether the daemon had to read it.
func (v *victim) acquire(c *unixsock.Client) (answer lease, read bool) {
	v.Helper()
	return v.askFor(c, filepath.Join(v.dir, "model.onnx"), v.path)
}

func (v *victim) askFor(c *unixsock.Client, graph, data string) (answer lease, read bool) {
	v.Helper()
	f, err := os.Open(graph)
	require.NoError(v, err)
	defer f.Close()
	reply, view, err := c.Acquire(limited(v), forModel(graph), []*os.File{f},
		func(int, string) (*os.File, error) { return os.Open(data) },
		func(p *wire.Progress) { read = read || p.Phase == "reading" })
	require.NoError(v, err)
	v.Cleanup(func() { view.Close() })
	answer = lease{reply, view}
	answer.requireRight(v)
	return answer, read
}

// requireTrue requires that the answer is what a copy of the files gets, which the daemon has never
// seen.
func (v *victim) requireTrue(c *unixsock.Client, got lease) {
	v.Helper()
	dir := v.TempDir()
	for _, path := range []string{filepath.Join(v.dir, "model.onnx"), v.path} {
		content, err := os.ReadFile(path)
		require.NoError(v, err)
		require.NoError(v, os.WriteFile(filepath.Join(dir, filepath.Base(path)), content, 0o644))
	}
	want, read := v.askFor(c, filepath.Join(dir, "model.onnx"),
		filepath.Join(dir, filepath.Base(v.path)))
	require.True(v, read)
	require.Equal(v, want.ModelDigest, got.ModelDigest,
		"the answer is for other bytes than the file has")
	require.Equal(v, want.RequestKey, got.RequestKey)
	require.Equal(v, want.names(), got.names())
}

func newVictim(t testing.TB, dir string, external bool) *victim {
	v := &victim{TB: t, owner: t, dir: dir, external: external,
		path: filepath.Join(dir, "model.onnx")}
	if external {
		m := compilertest.DenseModel(1, 16, 1)
		m.Initializers[0].Location = "weights.bin"
		require.NoError(t, os.WriteFile(v.path, m.Encode(), 0o644))
		v.path = filepath.Join(dir, "weights.bin")
	}
	require.NoError(t, os.WriteFile(v.path, v.content(0), 0o644))
	f, err := os.OpenFile(v.path, os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	v.file = f
	return v
}

// TestModelChangedWithUnchangedTimes has each way to change a file meet a daemon that believes to
// know it. Twice, for after the first time the file's times, and the kernel's idea of which pages
// are dirty, are others.
func TestModelChangedWithUnchangedTimes(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	c := d.dial()
	victims := make(map[string]*victim)
	for name, way := range waysToChange {
		for what, external := range map[string]bool{"graph: ": false, "external data: ": true} {
			v := newVictim(t, t.TempDir(), external)
			if way.before != nil {
				way.before(v)
			}
			v.change = way.change
			victims[what+name] = v
		}
	}
	for round := range uint64(2) {
		time.Sleep(believed) // all of them at once
		for name, v := range victims {
			t.Run(fmt.Sprintf("%s, round %d", name, round+1), func(t *testing.T) {
				v.TB = t
				v.requireNoticed(c, 2*round+1)
			})
		}
	}
}

// requireNoticed changes the file twice, once when the daemon believes to know it and once right
// afterwards.
func (v *victim) requireNoticed(c *unixsock.Client, number uint64) {
	v.Helper()
	old, _ := v.acquire(c)
	again, read := v.acquire(c)
	require.Equal(v, old.ModelDigest, again.ModelDigest)
	if believable(v, v.path) {
		require.False(v, read, "the daemon believes to know the file, else this test shows nothing")
	}
	v.change(v, number)
	got, read := v.acquire(c)
	require.True(v, read)
	require.NotEqual(v, old.ModelDigest, got.ModelDigest)
	v.requireTrue(c, got)
	v.change(v, number+1)
	got, _ = v.acquire(c)
	v.requireTrue(c, got)
}

// believable reports whether the file is on a file system with times that count.
func believable(t testing.TB, path string) bool {
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(path, &st))
	switch st.Type {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC:
		return true
	}
	t.Log("LESS IS TESTED: the temporary directory is on a file system whose times are not " +
		"believed")
	return false
}

// In a tmpfs and in a memory file a store through a mapping moves no time at all: they are read
// each time.
func TestChangedInMemory(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	c := d.dial()
	victims := map[string]*victim{"memory file": memoryFile(t)}
	for name, external := range map[string]bool{"graph in a tmpfs": false,
		"external data in a tmpfs": true} {
		dir, err := os.MkdirTemp("/dev/shm", "epcached-test-")
		if err != nil {
			t.Logf("LESS IS TESTED: no /dev/shm: %v", err)
			continue
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		victims[name] = newVictim(t, dir, external)
	}
	for _, v := range victims {
		v.mmap()
		v.store(0)
	}
	time.Sleep(believed)
	for name, v := range victims {
		t.Run(name, func(t *testing.T) {
			v.TB = t
			v.acquire(c)
			for n := range uint64(3) {
				before := stampOf(t, v.path)
				v.store(n + 1)
				require.Equal(t, before, stampOf(t, v.path),
					"no time has moved, else this test shows nothing")
				got, _ := v.acquire(c)
				v.requireTrue(c, got)
			}
		})
	}
}

// memoryFile is a model that has no name anywhere but in this process.
func memoryFile(t *testing.T) *victim {
	fd, err := unix.MemfdCreate("model", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "model")
	t.Cleanup(func() { f.Close() })
	_, err = f.Write(compilertest.Dense(0, 16, 1))
	require.NoError(t, err)
	v := &victim{TB: t, owner: t, dir: t.TempDir(), file: f}
	v.path = filepath.Join(v.dir, "model.onnx")
	require.NoError(t, os.Symlink(fmt.Sprintf("/proc/self/fd/%d", fd), v.path))
	return v
}

func stampOf(t testing.TB, path string) unix.Stat_t {
	var st unix.Stat_t
	require.NoError(t, unix.Stat(path, &st))
	st.Atim = unix.Timespec{}
	return st
}

func digestOf(t testing.TB, path string) string {
	digest, err := fileDigest(path)
	require.NoError(t, err)
	return digest
}

// A file that changes at once after each answer, often within one tick of the file system's clock.
// (Newer kernels have a finer clock for files with times that were read; there this test shows
// less.)
func TestChangedWithinOneTick(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	c := d.dial()
	v := newVictim(t, t.TempDir(), false)
	v.mmap()
	contents := [][]byte{v.content(0), v.content(1)}
	digests := make([]string, 2)
	for i := range contents {
		v.write(uint64(i))
		digests[i] = digestOf(t, v.path)
	}
	for i := range 200 {
		if i%3 == 0 {
			_, err := v.file.WriteAt(contents[i%2], 0)
			require.NoError(t, err)
		} else {
			copy(v.mapped, contents[i%2])
		}
		got, err := tryGet(t, c, v.path, func(a *wire.Acquire) { a.OnMiss = wire.OnMiss_KEY_ONLY })
		require.NoError(t, err)
		require.Equal(t, digests[i%2], got.ModelDigest, "round %d", i)
	}
}
