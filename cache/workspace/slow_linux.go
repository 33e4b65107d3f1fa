package workspace

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

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
	remove = func() {
		for _, f := range copies {
			_ = f.Close() // opened for reading only: nothing can be lost
		}
		removeFolder()
	}
	if err != nil {
		return nil, remove, err
	}
	local = slices.Clone(files)
	for i, f := range files {
		if _, slow, _ := slowfile.Stat(int(f.Fd())); !slow || !read(i) {
			continue
		}
		if local[i], err = in.fetch(ctx, uid, f, filepath.Join(folder, strconv.Itoa(i))); err != nil {
			return nil, remove, err
		}
		copies = append(copies, local[i])
	}
	return local, remove, nil
}

// fetch copies one file, with its mode. The copy has a name, as the file does, and not the one that
// it is opened by: nobody finds it by that later.
func (in *Maker) fetch(ctx context.Context, uid uint32, f *os.File, path string) (*os.File, error) {
	fail := func(err error) (*os.File, error) {
		if ctx.Err() != nil {
			return nil, apierr.New(apierr.Deadline, err, "a file of the request is on a file system that does not answer (%s)", f.Name()).
				WithHint("copy the models from FUSE or a network file system to a local one")
		}
		return nil, apierr.New(apierr.BadModel, err, "%s cannot be read", f.Name())
	}
	st, _, err := slowfile.Stat(int(f.Fd()))
	if err != nil {
		return fail(err)
	}
	free, err := cas.FreeBytes(filepath.Dir(path))
	if err == nil {
		err = store.Fits("a copy of the model", int64(st.Size), free/4)
	}
	if err != nil {
		return nil, err
	}
	leave, err := in.Slow.Take(ctx, in.Owner(uid))
	if err != nil {
		return fail(fmt.Errorf("other files of the same user do not answer: %w", err))
	}
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		leave()
		return nil, err
	}
	done := sync.OnceFunc(func() { leave(); _ = to.Close() }) // nothing of it counts but what is read
	if err := slowfile.Copy(ctx, f, to, free/4-store.Spare, done); err != nil {
		return fail(err)
	}
	if err := os.Chmod(path, os.FileMode(st.Mode&0o777)|0o400); err != nil {
		return nil, err
	}
	own, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err = os.Link(path, path+".copy"); err == nil {
		err = os.Remove(path)
	}
	if err != nil {
		_ = own.Close() // likewise
		return nil, err
	}
	return own, nil
}
