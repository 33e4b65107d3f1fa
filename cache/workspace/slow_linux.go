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

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/slowfile"
	"github.com/epcached/epcached/store"
)

// Fetch returns a user's files with copies in place of those on file systems that may never answer,
// if they are read. They are copied in processes of their own: few at a time for each
// user and in all. The caller calls remove, in any case, when it no longer needs the files.
func (in *Maker) Fetch(ctx context.Context, uid uint32, files []*os.File, read func(int) bool) (
	local []*os.File, remove func(), err error) {
	folder, removeFolder, err := in.Store.Stage("slow-")
	var copies []*os.File
	var taken int64
	remove = func() {
		for _, f := range copies {
			_ = f.Close() // opened for reading only: nothing can be lost
		}
		removeFolder()
		in.slow.Add(-taken)
	}
	if err != nil {
		return nil, remove, err
	}
	local = slices.Clone(files)
	for i, f := range files {
		if _, slow, _ := slowfile.Stat(int(f.Fd())); !slow || !read(i) {
			continue
		}
		size, err := in.reserveSlow(f)
		if err != nil {
			return nil, remove, err
		}
		taken += size
		path := filepath.Join(folder, strconv.Itoa(i))
		if local[i], err = in.fetch(ctx, uid, f, path, size); err != nil {
			return nil, remove, err
		}
		copies = append(copies, local[i])
	}
	return local, remove, nil
}

// reserveSlow sets space aside for a copy of the size that the file system states, and returns that
// size. All copies take at most half of what is free above the store's floor, because the collector
// would otherwise evict builds for them.
func (in *Maker) reserveSlow(f *os.File) (int64, error) {
	st, _, err := slowfile.Stat(int(f.Fd()))
	if err != nil {
		return 0, apierr.New(apierr.BadModel, err, "%s cannot be read", f.Name())
	}
	size := int64(min(st.Size, math.MaxInt64>>1))
	b, err := in.Store.Bounds()
	if err == nil {
		all := in.slow.Add(size)
		if err = store.Fits("a copy of the model", all, (b.Free-b.Floor)/2); err != nil {
			in.slow.Add(-size)
		}
	}
	if err != nil {
		return 0, request.StoreError(err, f.Name())
	}
	return size, nil
}

// fetch copies one file, with its mode. The copy has a name, as the file does, and not the one that
// it is opened by, because that no longer leads to it later.
func (in *Maker) fetch(ctx context.Context, uid uint32, f *os.File, path string, size int64) (
	*os.File, error) {
	st, _, err := slowfile.Stat(int(f.Fd()))
	if err != nil {
		return nil, unread(ctx, err, f)
	}
	leave, err := in.Slow.Take(ctx, in.Owner(uid))
	if err != nil {
		return nil, unread(ctx, fmt.Errorf("other files of the same user do not answer: %w", err), f)
	}
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		leave()
		return nil, request.StoreError(err, f.Name())
	}
	done := func() { leave(); _ = to.Close() } // nothing of it counts but what is read
	if err := slowfile.Copy(ctx, f, to, size, done); err != nil {
		if ctx.Err() == nil && cas.Full(err) {
			return nil, request.StoreError(err, f.Name())
		}
		return nil, unread(ctx, err, f)
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

// unread is the error for a file that was not copied.
func unread(ctx context.Context, err error, f *os.File) error {
	if ctx.Err() == nil {
		return apierr.New(apierr.BadModel, err, "%s cannot be read", f.Name())
	}
	return apierr.New(apierr.Deadline, err,
		"a file of the request is on a file system that does not answer (%s)", f.Name()).
		WithHint("copy the models from FUSE or a network file system to a local one")
}
