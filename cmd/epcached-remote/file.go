package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"syscall"
	"time"

	"github.com/epcached/epcached/remote"
)

const (
	lockWait = 20 * time.Second
	lockPoll = 10 * time.Millisecond
	// syncEvery bounds how long an upload to a slow disk makes no progress.
	syncEvery = 16 << 20
)

// directory is a remote in a directory: a stick, a share, or the mirror of a bucket.
type directory struct{ dir string }

func (d *directory) can() remote.Can { return all }

func (d *directory) clock() time.Time { return time.Now() }

// open opens the directory. A missing one is unreachable, because it may be on a stick that is not
// plugged in.
func (d *directory) open() (*os.Root, error) {
	root, err := os.OpenRoot(d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fail("unreachable", "%v", err)
	}
	return root, err
}

func (d *directory) get(ctx context.Context, name string, from, length int64) (*object, error) {
	root, err := d.open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe must not block here
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fail("damaged", "%s is not a regular file", name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if length < 0 {
		length = info.Size()
	}
	o := objectOf(info)
	o.from = from
	o.body = &fileBody{ctx, callOf(ctx), io.NewSectionReader(f, from, length), f}
	return o, nil
}

func objectOf(info fs.FileInfo) *object {
	stat, _ := info.Sys().(*syscall.Stat_t)
	return &object{size: info.Size(), modified: info.ModTime(),
		etag: fmt.Sprintf("%x-%x-%x", info.ModTime().UnixNano(), info.Size(), stat.Ino)}
}

// fileBody counts the bytes read like network traffic.
type fileBody struct {
	ctx  context.Context
	call *call
	io.Reader
	io.Closer
}

// Read implements io.Reader.
func (b *fileBody) Read(p []byte) (int, error) {
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := b.Reader.Read(p)
	b.call.in.Add(int64(n))
	return n, err
}

func (d *directory) stat(_ context.Context, name string) (*object, error) {
	root, err := d.open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	info, err := root.Stat(name)
	if err != nil {
		return nil, err
	}
	return objectOf(info), nil
}

// put writes a temporary file, syncs it, and links or renames it, so that the object is complete or
// missing. Conditions on an ETag hold a lock on the directory.
func (d *directory) put(ctx context.Context, name string, body *io.SectionReader, _ string,
	when condition) (err error) {
	root, err := d.open()
	if err != nil {
		return err
	}
	defer root.Close()
	dir := path.Dir(name)
	if err := root.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	temporary := path.Join(dir, ".new-"+rand.Text())
	f, err := root.OpenFile(temporary, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	defer func() {
		if gone := root.Remove(temporary); err == nil && !errors.Is(gone, fs.ErrNotExist) {
			err = gone
		}
	}()
	for err == nil {
		if _, err = io.CopyN(f, body, syncEvery); err == nil {
			err = f.Sync()
		}
	}
	if errors.Is(err, io.EOF) {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close(), ctx.Err()); err != nil {
		return err
	}
	lock, err := locked(ctx, root, dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	info, err := root.Stat(name)
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case err == nil && when.create, when.match != "" &&
		(err != nil || objectOf(info).etag != when.match):
		return errExists
	}
	if err := root.Rename(temporary, name); err != nil {
		return err
	}
	return lock.Sync()
}

// locked opens a directory and locks it against other writers. Any process that can read the
// directory may hold the lock, so the wait for it is bounded.
func locked(ctx context.Context, root *os.Root, dir string) (*os.File, error) {
	f, err := root.Open(dir)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(lockWait); ; {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case !errors.Is(err, syscall.EINTR) && !errors.Is(err, syscall.EWOULDBLOCK):
			err = os.NewSyscallError("flock", err)
		case ctx.Err() != nil:
			err = ctx.Err()
		case time.Now().After(end):
			err = fail("unreachable", "another process has locked %s for %v", dir, lockWait)
		default:
			time.Sleep(lockPoll)
			continue
		}
		return nil, errors.Join(err, f.Close())
	}
}

func (d *directory) touch(_ context.Context, name string, _ int64) error {
	root, err := d.open()
	if err != nil {
		return err
	}
	defer root.Close()
	now := time.Now()
	return root.Chtimes(name, now, now)
}

func (d *directory) list(_ context.Context, prefix string, most int) (names []string, err error) {
	root, err := d.open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.Open(path.Clean(prefix))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err = f.Readdirnames(most)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

func (d *directory) walk(_ context.Context, prefix string,
	fn func(name string, o *object) error) error {
	root, err := d.open()
	if err != nil {
		return err
	}
	defer root.Close()
	return fs.WalkDir(root.FS(), path.Clean(prefix), func(name string, e fs.DirEntry,
		err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return fn(name, objectOf(info))
	})
}

func (d *directory) remove(_ context.Context, name string) error {
	root, err := d.open()
	if err != nil {
		return err
	}
	defer root.Close()
	return root.Remove(name)
}
