package cas

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"lukechampine.com/blake3"
)

var ctx = context.Background()

// openStore opens a store that is checked as a whole when the test ends.
func openStore(t *testing.T, o Options) *Store {
	t.Helper()
	s, err := Open(t.TempDir(), o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, s.Walk(ctx, func(d Digest, _, _ int64) error { return s.Check(ctx, d) }))
		foreign, err := s.Foreign(ctx)
		require.NoError(t, err)
		require.Empty(t, foreign)
	})
	return s
}

func mustPut(t *testing.T, s *Store, b []byte) Digest {
	t.Helper()
	d, n, err := s.Put(ctx, bytes.NewReader(b))
	require.NoError(t, err)
	require.Equal(t, int64(len(b)), n)
	require.Equal(t, Digest(blake3.Sum256(b)), d)
	return d
}

func contents(t *testing.T, s *Store, d Digest) []byte {
	t.Helper()
	f, err := s.Open(ctx, d)
	require.NoError(t, err)
	b, err := io.ReadAll(f)
	require.NoError(t, errors.Join(err, f.Close()))
	return b
}

// countingReads counts what is read, to see whether a blob is hashed again.
type countingReads struct {
	OS
	mu    sync.Mutex
	bytes int
}

func (c *countingReads) ReadAt(f *os.File, p []byte, off int64) (int, error) {
	c.mu.Lock()
	c.bytes += len(p)
	c.mu.Unlock()
	return c.OS.ReadAt(f, p, off)
}

func (c *countingReads) reset() (bytes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	bytes, c.bytes = c.bytes, 0
	return bytes
}

func TestPutIsReadBack(t *testing.T) {
	s := openStore(t, Options{})
	for _, n := range []int{0, 1, pieceSize, pieceSize + 1, 5*pieceSize + 77} {
		b := random(n)
		d := mustPut(t, s, b)
		require.True(t, bytes.Equal(b, contents(t, s, d)), "%d bytes", n)
		size, err := s.Size(d)
		require.NoError(t, err)
		require.Equal(t, int64(n), size)
		info, err := os.Stat(s.path(d))
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o444), info.Mode())
	}
}

func TestMissingBlob(t *testing.T) {
	s := openStore(t, Options{})
	var d Digest
	require.False(t, s.Has(d))
	_, err := s.Open(ctx, d)
	require.ErrorIs(t, err, ErrNotFound)
	_, err = s.Size(d)
	require.ErrorIs(t, err, ErrNotFound)
	require.ErrorIs(t, s.Remove(d), ErrNotFound)
	require.ErrorIs(t, s.Check(ctx, d), ErrNotFound)
	require.ErrorIs(t, s.Quarantine(d, "why"), ErrNotFound)
}

func TestPutOfAFailingReaderLeavesNothing(t *testing.T) {
	s := openStore(t, Options{})
	_, _, err := s.Put(ctx, failing{bytes.NewReader(random(3*pieceSize + 1))})
	require.ErrorIs(t, err, syscall.EPROTO)
	names, err := os.ReadDir(s.incoming)
	require.NoError(t, err)
	require.Empty(t, names)
}

// failing cannot be read from its third piece on.
type failing struct{ *bytes.Reader }

func (f failing) ReadAt(p []byte, off int64) (int, error) {
	if off >= 2*pieceSize {
		return 0, syscall.EPROTO
	}
	return f.Reader.ReadAt(p, off)
}

func TestASoundStampSparesHashing(t *testing.T) {
	fs := &countingReads{}
	s := openStore(t, Options{FS: fs})
	d := mustPut(t, s, random(100_000))
	fs.reset()
	require.NoError(t, s.Verify(ctx, d))
	require.Zero(t, fs.reset())

	// A file that was touched is hashed again, once.
	later := time.Now().Add(time.Hour)
	require.NoError(t, os.Chtimes(s.path(d), later, later))
	require.NoError(t, s.Verify(ctx, d))
	require.Equal(t, 100_000, fs.reset())
	require.NoError(t, s.Verify(ctx, d))
	require.Zero(t, fs.reset())
}

func damage(t *testing.T, path string, fn func(f *os.File)) {
	t.Helper()
	require.NoError(t, os.Chmod(path, 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	fn(f)
	require.NoError(t, f.Close())
	require.NoError(t, os.Chmod(path, 0o444))
}

func TestDamageIsNotServed(t *testing.T) {
	b := random(5000)
	for _, c := range []struct {
		name string
		do   func(f *os.File)
	}{
		{"one bit", func(f *os.File) { _, _ = f.WriteAt([]byte{b[4000] ^ 1}, 4000) }},
		{"last byte gone", func(f *os.File) { _ = f.Truncate(4999) }},
		{"zeros appended", func(f *os.File) { _ = f.Truncate(9000) }},
		{"empty", func(f *os.File) { _ = f.Truncate(0) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := openStore(t, Options{})
			d := mustPut(t, s, b)
			damage(t, s.path(d), c.do)
			_, err := s.Open(ctx, d)
			var corrupt *CorruptError
			require.ErrorAs(t, err, &corrupt)
			require.Equal(t, d, corrupt.Digest)
			require.NotEqual(t, d, corrupt.Got)
			require.ErrorAs(t, s.Check(ctx, d), &corrupt)
			_, known := s.Stamp(d)
			require.False(t, known)

			// Stored again, it is whole again, and the damaged one is kept aside.
			require.Equal(t, d, mustPut(t, s, b))
			require.True(t, bytes.Equal(b, contents(t, s, d)))
			aside, err := filepath.Glob(filepath.Join(s.dir, "quarantine", "*-"+d.String()))
			require.NoError(t, err)
			require.Len(t, aside, 1)
			note, err := os.ReadFile(aside[0] + ".txt")
			require.NoError(t, err)
			require.Contains(t, string(note), "is damaged")
		})
	}
}

func TestOpenRefusesNonRegularBlobs(t *testing.T) {
	s := openStore(t, Options{})
	b := random(10)
	d := mustPut(t, s, b)
	for name, put := range map[string]func(path string) error{
		"symbolic link": func(path string) error { return os.Symlink("/etc/hostname", path) },
		"FIFO":          func(path string) error { return unix.Mkfifo(path, 0o600) },
		"directory":     func(path string) error { return os.Mkdir(path, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, os.Remove(s.path(d)))
			require.NoError(t, put(s.path(d)))
			_, err := s.Open(ctx, d)
			require.Error(t, err)
			require.Equal(t, d, mustPut(t, s, b)) // takes its place
			require.True(t, bytes.Equal(b, contents(t, s, d)))
		})
	}
}

func TestPutFile(t *testing.T) {
	for _, n := range []int{0, 100, 3*pieceSize + 5} {
		s := openStore(t, Options{})
		path := filepath.Join(t.TempDir(), "model.onnx")
		b := random(n)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		f, err := os.Open(path)
		require.NoError(t, err)
		_, err = f.Seek(7, io.SeekStart)
		require.NoError(t, err)
		d, size, err := s.PutFile(ctx, f)
		require.NoError(t, err)
		require.Equal(t, int64(n), size)
		at, err := f.Seek(0, io.SeekCurrent)
		require.NoError(t, err)
		require.Equal(t, int64(7), at, "the offset is the client's")
		require.NoError(t, f.Close())
		require.NoError(t, os.WriteFile(path, []byte("changed afterwards"), 0o600))
		require.True(t, bytes.Equal(b, contents(t, s, d)))
	}
}

// growing appends to the source while it is read.
type growing struct {
	OS
	path string
	once sync.Once
}

func (g *growing) ReadAt(f *os.File, p []byte, off int64) (int, error) {
	g.once.Do(func() {
		if err := os.WriteFile(g.path, random(2000), 0o600); err != nil {
			panic(err)
		}
	})
	return g.OS.ReadAt(f, p, off)
}

func (g *growing) Clone(dst, src *os.File) error { return errors.ErrUnsupported }

func TestPutFileNoticesAChange(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.onnx")
	require.NoError(t, os.WriteFile(path, random(1000), 0o600))
	s := openStore(t, Options{FS: &growing{path: path}})
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	_, _, err = s.PutFile(ctx, f)
	require.ErrorIs(t, err, ErrChanged)
	require.NoError(t,
		s.Walk(ctx, func(d Digest, _, _ int64) error { return errors.New("stored " + d.String()) }))
}

func TestPutFileRefusesNonRegularFiles(t *testing.T) {
	s := openStore(t, Options{})
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	_, _, err = s.PutFile(ctx, r)
	require.ErrorIs(t, err, errNotRegular)
}

func TestAdopt(t *testing.T) {
	b := random(70_000)
	for _, c := range []struct {
		name   string
		before func(t *testing.T, path string)
		moved  bool // the file itself becomes the blob
	}{
		{"nobody has it", func(*testing.T, string) {}, true},
		{"a writer is left", func(t *testing.T, path string) {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			t.Cleanup(func() { _ = f.Close() })
		}, false},
		{"a writable mapping is left", func(t *testing.T, path string) {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			m,
				err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE,
				unix.MAP_SHARED)
			require.NoError(t, err)
			require.NoError(t, f.Close())
			t.Cleanup(func() { _ = unix.Munmap(m) })
		}, false},
		{"it has another name", func(t *testing.T, path string) {
			require.NoError(t, os.Link(path, path+".other"))
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := openStore(t, Options{})
			path := filepath.Join(s.dir, "staged")
			require.NoError(t, os.WriteFile(path, b, 0o600))
			c.before(t, path)
			staged, err := os.Stat(path)
			require.NoError(t, err)
			d, n, err := s.AdoptHashed(ctx, path, Hashed{})
			require.NoError(t, err)
			require.Equal(t, int64(len(b)), n)
			require.NoFileExists(t, path)
			blob, err := os.Stat(s.path(d))
			require.NoError(t, err)
			require.Equal(t, c.moved, os.SameFile(staged, blob))
			require.Equal(t, os.FileMode(0o444), blob.Mode())
			require.True(t, bytes.Equal(b, contents(t, s, d)))
		})
	}
}

// A file that a process could still write is copied when it is adopted.
func TestHashingAheadStopsUnderAWriter(t *testing.T) {
	s := openStore(t, Options{})
	b := random(5000)
	path := filepath.Join(s.dir, "staged")
	require.NoError(t, os.WriteFile(path, b, 0o600))
	w, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	known, err := s.HashAhead(ctx, path)
	require.NoError(t, err)
	require.Zero(t, known)
	b[0]++
	_, err = w.WriteAt(b[:1], 0)
	require.NoError(t, errors.Join(err, w.Close()))
	d, _, err := s.AdoptHashed(ctx, path, known)
	require.NoError(t, err)
	require.Equal(t, Digest(blake3.Sum256(b)), d)
}

func TestLinksKeepTheStampGood(t *testing.T) {
	fs := &countingReads{}
	s := openStore(t, Options{FS: fs})
	d := mustPut(t, s, random(9000))
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	fs.reset()
	for _, name := range []string{"a_ctx.onnx", "b_ctx.onnx"} {
		stamp, err := s.Link(ctx, d, dir, name)
		require.NoError(t, err)
		seen, err := StampAt(int(dir.Fd()), name)
		require.NoError(t, err)
		require.Equal(t, stamp, seen)
		known, ok := s.Stamp(d)
		require.True(t, ok)
		require.Equal(t, stamp, known)
	}
	require.NoError(t, s.Unlink(d, dir, "a_ctx.onnx"))
	require.NoError(t, s.Unlink(d, dir, "a_ctx.onnx"), "gone already")
	known, _ := s.Stamp(d)
	seen, err := StampAt(int(dir.Fd()), "b_ctx.onnx")
	require.NoError(t, err)
	require.Equal(t, known, seen)
	require.NoError(t, s.Verify(ctx, d))
	require.Zero(t, fs.reset(), "hashed again after the store's own links")
}

func TestADamagedBlobIsNotLinked(t *testing.T) {
	s := openStore(t, Options{})
	b := random(900)
	d := mustPut(t, s, b)
	damage(t, s.path(d), func(f *os.File) { _, _ = f.WriteAt([]byte{b[0] ^ 4}, 0) })
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	_, err = s.Link(ctx, d, dir, "x")
	var corrupt *CorruptError
	require.ErrorAs(t, err, &corrupt)
	require.NoFileExists(t, filepath.Join(dir.Name(), "x"))
	require.NoError(t, s.Quarantine(d, "a test"))
	require.False(t, s.Has(d))
}

// fullLinks is a file system with files that have as many names as they can.
type fullLinks struct{ OS }

func (fullLinks) LinkAt(string, *os.File, string) error { return unix.EMLINK }

func TestTooManyLinksMakeACopy(t *testing.T) {
	s := openStore(t, Options{FS: fullLinks{}})
	b := random(5000)
	d := mustPut(t, s, b)
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	stamp, err := s.Link(ctx, d, dir, "x.bin")
	require.NoError(t, err)
	seen, err := StampAt(int(dir.Fd()), "x.bin")
	require.NoError(t, err)
	require.True(t, stamp.Holds(seen))
	require.Equal(t, Boot(), stamp.Boot, "the copy is not synced")
	known, _ := s.Stamp(d)
	require.False(t, known.Holds(seen), "it is another file")
	got, err := os.ReadFile(filepath.Join(dir.Name(), "x.bin"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(b, got))
}

func TestAStampDiesWithItsBoot(t *testing.T) {
	seen := Stamp{Dev: 1, Ino: 2, Size: 3, Mtime: 4, Ctime: 5}
	kept := seen
	require.True(t, kept.Holds(seen))
	kept.Boot = Boot()
	require.True(t, kept.Holds(seen))
	kept.Boot = "another boot"
	require.False(t, kept.Holds(seen))
	kept = seen
	kept.Ctime++
	require.False(t, kept.Holds(seen))
}

func TestTheQuarantineIsBounded(t *testing.T) {
	s := openStore(t, Options{})
	for i := range maxQuarantined + 5 {
		d := mustPut(t, s, random(10+i))
		require.NoError(t, s.Quarantine(d, "a test"))
	}
	names, err := os.ReadDir(filepath.Join(s.dir, "quarantine"))
	require.NoError(t, err)
	require.Len(t, names, 2*maxQuarantined)
}

func TestManyAtOnce(t *testing.T) {
	s := openStore(t, Options{})
	blobs := [][]byte{random(100), random(pieceSize + 1), random(3000)}
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := range 12 {
				b := blobs[(worker+i)%len(blobs)]
				d, _, err := s.Put(ctx, bytes.NewReader(b))
				if err != nil {
					t.Error(err)
					return
				}
				name := string(rune('a'+worker)) + string(rune('a'+i))
				if _, err := s.Link(ctx, d, dir, name); err != nil {
					t.Error(err)
				}
				if err := s.Verify(ctx, d); err != nil {
					t.Error(err)
				}
				if err := s.Unlink(d, dir, name); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestParseDigest(t *testing.T) {
	d := Digest(blake3.Sum256([]byte("x")))
	got, err := ParseDigest(d.String())
	require.NoError(t, err)
	require.Equal(t, d, got)
	for name, s := range map[string]string{
		"empty": "", "short": d.String()[1:], "long": d.String() + "0",
		"not hexadecimal": "g" + d.String()[1:], "upper case": "A" + d.String()[1:],
	} {
		_, err := ParseDigest(s)
		require.Error(t, err, name)
	}
}
