package workspace

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/internal/slowfile"
	"github.com/epcached/epcached/store"
)

// CopySlowFiles returns the files, with copies in place of those that will be read and are on file
// systems that may never answer. Processes of their own make the copies; their number is bounded
// for each user and in all. The caller calls remove, also after an error, when it no longer needs
// the files.
func (in *Maker) CopySlowFiles(ctx context.Context, uid uint32, files []*os.File,
	read func(int) bool) (
	local []*os.File, remove func(), err error) {
	dir, removeDir, err := in.Store.Stage("slow-")
	var copies []*os.File
	var taken int64
	owner := in.Owner(uid)
	remove = func() {
		for _, f := range copies {
			_ = f.Close() // opened for reading, so no data can be lost
		}
		removeDir()
		in.slow.add(owner, -taken)
	}
	if err != nil {
		return nil, remove, err
	}
	local = slices.Clone(files)
	for i, f := range files {
		st, slow, err := slowfile.Stat(int(f.Fd()))
		if !slow || !read(i) {
			continue
		}
		if err != nil {
			return nil, remove, notCopiedError(ctx, err, f)
		}
		if err = in.reserveSlow(owner, st.Size); err != nil {
			return nil, remove, request.StoreError(err, f.Name())
		}
		taken += int64(st.Size)
		path := filepath.Join(dir, strconv.Itoa(i))
		if local[i], err = in.fetch(ctx, uid, f, path, &st); err != nil {
			return nil, remove, err
		}
		copies = append(copies, local[i])
	}
	return local, remove, nil
}

// slowBytes counts the bytes of the copies of CopySlowFiles, with those being made.
type slowBytes struct {
	mu    sync.Mutex
	all   int64
	users map[uint32]int64 // by owner
}

// add adds bytes, which may be negative, to those of an owner, and returns the sums.
func (s *slowBytes) add(owner uint32, bytes int64) (own, all int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users == nil {
		s.users = make(map[uint32]int64)
	}
	s.all += bytes
	if s.users[owner] += bytes; s.users[owner] == 0 {
		delete(s.users, owner)
		return 0, s.all
	}
	return s.users[owner], s.all
}

// reserveSlow sets space aside for a copy of the size that the file system states. All copies may
// take half of the free space above the store's floor, because otherwise the collector would evict
// builds for them, and those of one user the part of it that user_share sets.
func (in *Maker) reserveSlow(owner uint32, stated uint64) error {
	b, err := in.Store.Bounds()
	if err != nil {
		return err
	}
	most, size := (b.Free-b.Floor)/2, int64(min(stated, math.MaxInt64))
	if err := store.Fits("a copy of the model", size, most); err != nil {
		return err // checked alone first, so that the sum cannot overflow
	}
	own, all := in.slow.add(owner, size)
	err = store.Fits("the copies of models on slow file systems", all, most)
	if share := b.ShareOf(owner, most); err == nil && own > share {
		err = fmt.Errorf(
			"%w: copies of one user's models on slow file systems take %s of at most %s "+
				"(user_share in [space])", unix.ENOSPC, bytesize.Text(own), bytesize.Text(share))
	}
	if err != nil {
		in.slow.add(owner, -size)
	}
	return err
}

// fetch copies one file with its mode, and returns the copy open for reading, under the name of f,
// because its own path is removed before messages name it.
func (in *Maker) fetch(ctx context.Context, uid uint32, f *os.File, path string, st *unix.Statx_t) (
	*os.File, error) {
	leave, err := in.SlowCopies.Take(ctx, in.Owner(uid))
	if err != nil {
		return nil, notCopiedError(ctx,
			fmt.Errorf("reading another file of this user already blocks: %w", err), f)
	}
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		leave()
		return nil, request.StoreError(err, f.Name())
	}
	// the copy is temporary and verified when it is read, so an error of Close does not matter
	done := func() { leave(); _ = to.Close() }
	if err := slowfile.Copy(ctx, f, to, int64(st.Size), done); err != nil {
		if ctx.Err() == nil && cas.IsDiskFull(err) {
			return nil, request.StoreError(err, f.Name())
		}
		return nil, notCopiedError(ctx, err, f)
	}
	own, err := os.Open(path)
	if err == nil {
		err = errors.Join(own.Chmod(os.FileMode(st.Mode&0o777)|0o400),
			os.Link(path, path+".copy"), os.Remove(path))
	}
	if err != nil {
		return nil, request.StoreError(errors.Join(err, own.Close()), f.Name())
	}
	return own, nil
}

// notCopiedError is the error for a file that was not copied.
func notCopiedError(ctx context.Context, err error, f *os.File) error {
	switch ended := ctx.Err(); {
	case ended == nil:
		return apierr.New(apierr.BadModel, err, "%s cannot be read", f.Name())
	case errors.Is(ended, context.Canceled):
		return apierr.FromContext(ctx, "%s", f.Name())
	}
	return apierr.New(apierr.Deadline, err,
		"a file of the request is on a file system that does not respond (%s)", f.Name()).
		WithHint("copy the models from FUSE or a network file system to a local one")
}
