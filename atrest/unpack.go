package atrest

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/flock"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
	"github.com/epcached/epcached/views"
)

// Unpack makes a view of a build outside the store: its files, copied or unpacked and hashed on their way, in a folder below
// dir, which is made for this user alone. What an earlier call has left there is hashed and taken. Nothing there is synced, and all of it may be deleted
// at any time: the view holds the folder against other calls, which remove what nobody holds when it was not used for a month, or room is needed.
// progress, which may be nil, is told bytes; its calls do not overlap. Of errors NotAllowed and NoSpace are the folder's: another may do.
func (s *Store) Unpack(ctx context.Context, b *index.Build, dir string, progress func(done, total int64)) (*View, error) {
	u := &unpacking{s: s, dir: dir, build: b, name: contentName(b)}
	if err := u.ownFolder(); err != nil {
		return nil, refusal.New(refusal.NotAllowed, err, "no private folder to unpack into at %q", dir)
	}
	if v := u.earlier(ctx); v != nil {
		return v, nil
	}
	unlock, err := u.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if v := u.earlier(ctx); v != nil { // of who had the lock before
		return v, nil
	}
	u.sweep(idleUnpacked)
	inner, err := u.fill(ctx, progress)
	if cas.Full(err) && u.sweep(0) {
		inner, err = u.fill(ctx, progress)
	}
	if cas.Full(err) {
		return nil, refusal.New(refusal.NoSpace, err, "build %.12s cannot be unpacked into %q", b.BuildKey, dir)
	}
	if err != nil {
		return nil, err
	}
	f, err := leaseOf(filepath.Dir(inner))
	if err != nil {
		return nil, refusal.New(refusal.Internal, err, "unpacked build %.12s", b.BuildKey)
	}
	return viewIn(f, inner), nil
}

// idleUnpacked is for how long what was unpacked is kept for the next call.
const idleUnpacked = 30 * 24 * time.Hour

// unpacking is one call of Unpack. In the folder are "lock", "new-*" while one is written, and "<content>-<random>", a view.
type unpacking struct {
	s     *Store
	dir   string
	build *index.Build
	name  string // what is in the build's files
}

// contentName is made of all files' names and digests, so that a path is for one content.
func contentName(b *index.Build) string {
	var all []byte
	for _, f := range b.Files {
		all = protowire.AppendBytes(protowire.AppendTag(all, 1, protowire.BytesType), []byte(f.Name))
		all = protowire.AppendBytes(protowire.AppendTag(all, 2, protowire.BytesType), f.Digest[:])
	}
	d := blake3.Sum256(all)
	return hex.EncodeToString(d[:16])
}

// ownFolder makes the folder. One that others may write is refused: what is in it is loaded as code would be.
func (u *unpacking) ownFolder() error {
	if err := os.MkdirAll(filepath.Dir(u.dir), 0o700); err != nil {
		return err
	}
	if err := os.Mkdir(u.dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(u.dir)
	if err != nil {
		return err
	}
	if !info.IsDir() || !cas.OwnedBy(info, uint32(os.Geteuid())) || info.Mode().Perm()&0o022 != 0 {
		return errors.New("it is not a folder of this user alone")
	}
	return nil
}

// lock waits for who else writes into the folder.
func (u *unpacking) lock(ctx context.Context) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(u.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, refusal.New(refusal.NotAllowed, err, "folder to unpack into")
	}
	for {
		mine, err := flock.TryLock(f)
		if mine || err != nil { // a file system without locks: then two may write the same, each into a folder of its own
			return func() { _ = f.Close() }, nil // nothing was written
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), f.Close())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// earlier takes what was unpacked before, if it is still what it should be; nil: there is nothing.
func (u *unpacking) earlier(ctx context.Context) *View {
	found, err := filepath.Glob(filepath.Join(globLiteral(u.dir), u.name+"-*", "*"))
	if err != nil {
		return nil // a bad pattern, which this is not
	}
	for _, inner := range found {
		f, err := leaseOf(filepath.Dir(inner))
		if err != nil {
			continue
		}
		if soundFiles(ctx, u.build, inner) {
			now := time.Now()
			_ = os.Chtimes(f.Name(), now, now) // else it goes earlier than it has to
			return viewIn(f, inner)
		}
		_ = f.Close() // only looked at
	}
	return nil
}

// sweep removes what nobody holds: what was left half written, what earlier found to be no good, and what was not used for so long.
func (u *unpacking) sweep(idle time.Duration) (removed bool) {
	all, err := os.ReadDir(u.dir)
	if err != nil {
		return false
	}
	for _, e := range all {
		info, err := e.Info()
		if err != nil || !info.IsDir() {
			continue
		}
		if no := strings.HasPrefix(e.Name(), unfinished) || strings.HasPrefix(e.Name(), u.name+"-"); !no && time.Since(info.ModTime()) < idle {
			continue
		}
		path := filepath.Join(u.dir, e.Name())
		if held, err := views.Leased(path); held || err != nil {
			continue
		}
		removed = removeClosed(path) == nil || removed
	}
	return removed
}

// spare is what stays free.
const spare = 16 << 20

// unfinished begins the name of a folder that is being written.
const unfinished = "new-"

func removeClosed(path string) error {
	if err := views.OpenTree(path); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

// fill writes the files into a folder that gets its name when they are whole, and gives the one that has them.
func (u *unpacking) fill(ctx context.Context, progress func(done, total int64)) (inner string, err error) {
	var total int64
	for _, f := range u.build.Files {
		total += f.Size
	}
	if free, err := cas.FreeBytes(u.dir); err == nil && cas.OnDisk(total) > free-spare {
		return "", fmt.Errorf("%w: it takes %d bytes, and %d are free", syscall.ENOSPC, total, free)
	}
	folder, err := os.MkdirTemp(u.dir, unfinished)
	if err != nil {
		return "", err
	}
	id := views.NewID()
	done := &told{fn: progress, total: total}
	for _, f := range u.build.Files {
		if err = u.write(ctx, f, filepath.Join(folder, id, filepath.FromSlash(f.Name)), done); err != nil {
			break
		}
	}
	if err == nil {
		err = views.SealTree(folder)
	}
	final := filepath.Join(u.dir, u.name+"-"+id)
	if err == nil {
		err = os.Rename(folder, final) // visible from here on; a crash before this line leaves what the next sweep removes
	}
	if err != nil {
		return "", errors.Join(err, removeClosed(folder))
	}
	return filepath.Join(final, id), nil
}

func (u *unpacking) write(ctx context.Context, f index.File, path string, done *told) error {
	blob, err := u.s.blob(f)
	if err != nil {
		return u.s.blame(u.build, f, err)
	}
	defer blob.Close() // only read from
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	to, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	cas.Preallocate(to, blob.Size())
	err = sumIs(ctx, &tee{from: blob, to: to, done: done}, blob.Size(), f)
	if err != nil && !cas.Full(err) {
		err = u.s.blame(u.build, f, err)
	}
	return errors.Join(err, to.Chmod(0o444), to.Close())
}

// tee writes what is read of a blob, each byte of which cas.Sum reads once.
type tee struct {
	from io.ReaderAt
	to   *os.File
	done *told
}

// told counts bytes for who waits; fn may be nil, and its calls do not overlap.
type told struct {
	mu          sync.Mutex
	fn          func(done, total int64)
	done, total int64
}

func (t *told) add(n int64) {
	if t.fn == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.done += n
	t.fn(t.done, t.total)
}

func (c *tee) ReadAt(p []byte, off int64) (int, error) {
	n, err := c.from.ReadAt(p, off)
	if _, failed := cas.WriteInSteps(c.to, p[:n], off); failed != nil {
		return 0, failed
	}
	c.done.add(int64(n))
	return n, err
}
