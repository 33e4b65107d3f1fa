package readonly

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/flock"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/views"
)

// lease hashes the build's files: those of a view of the store, or where that has no sound one the
// blobs, whole or packed, and then the answer has no view. Which view is a build's only the
// database knows, so views are found by the graph's name, which is made of the build key. Where
// this user may not list the views there are none.
func (s *Store) lease(ctx context.Context, _ *store.Store, b *index.Build,
	_ func(string)) (*request.Answer, error) {
	a := &request.Answer{Build: b, Graph: b.Graph}
	graph := "/" + filepath.FromSlash(b.Graph)
	literal := strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)
	dir := filepath.Join(s.dir, "views", views.ScopeDir(b.Scope))
	// the pattern is sound
	found, _ := filepath.Glob(literal.Replace(dir) + "/*/*" + literal.Replace(graph))
	unsound := func([]index.File) error { return cas.ErrNotFound }
	for _, path := range found {
		if lockView(ctx, a, strings.TrimSuffix(path, graph), unsound) == nil {
			return a, nil
		}
	}
	for _, f := range b.Files {
		if err := s.store.Forms().Check(ctx, f.Digest); err != nil {
			return nil, s.cannotServe(b, f, err)
		}
	}
	return a, nil
}

// lockView puts the view with the files in directory into the answer, and holds it against its
// removal. fill is called with the files that are missing or damaged.
func lockView(ctx context.Context, a *request.Answer, dir string,
	fill func(lacking []index.File) error) error {
	view, err := os.Open(filepath.Dir(dir))
	if err != nil {
		return err
	}
	_ = flock.Lease(view) // a file system without locks: nothing would be removed there
	lacking := slices.DeleteFunc(slices.Clone(a.Build.Files), func(f index.File) bool {
		path := filepath.Join(dir, filepath.FromSlash(f.Name))
		if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() ||
			info.Size() != f.Size {
			return false
		}
		got, err := cas.SumFile(ctx, path)
		return err == nil && got == f.Digest
	})
	if len(lacking) > 0 {
		err = fill(lacking)
	}
	if err != nil {
		return errors.Join(err, view.Close())
	}
	id := filepath.Base(dir) + "/"
	a.View, a.Path, a.Graph = view, view.Name(), id+a.Graph
	for i := range a.Members {
		a.Members[i].Graph = id + a.Members[i].Graph
	}
	return nil
}

// Unpack gives an answer that has no view one below the directory dir, outside the store, which is
// made for this user alone. A view's path is made of its files' digests, so what an earlier call
// has left there is hashed and taken. Nothing there is synced, and all of it may be deleted at any
// time: the view holds its directory against other calls, which remove what is not held when it was
// not used for a month, or when space is needed. progress, which may be nil, receives bytes; its
// calls do not overlap. Of errors NotAllowed and NoSpace are the directory's: another may do.
func (s *Store) Unpack(ctx context.Context, a *request.Answer, dir string,
	progress func(done, total int64)) error {
	if a.View != nil || a.Build == nil {
		return nil
	}
	const hint = "it must be unpacked to be loaded: name a directory of your own with " +
		"--unpack-to DIR"
	dir, err := filepath.Abs(dir)
	if err == nil {
		err = makePrivateDir(dir)
	}
	if err != nil {
		return apierr.New(apierr.NotAllowed, err, "no private directory to unpack into at "+
			"%q", dir).WithHint(hint)
	}
	err = s.unpack(ctx, a, dir, progress)
	if cas.IsDiskFull(err) && sweepUnpacked(dir, 0) {
		err = s.unpack(ctx, a, dir, progress)
	}
	if cas.IsDiskFull(err) {
		return apierr.New(apierr.NoSpace, err,
			"build %.12s cannot be unpacked into %q", a.Build.BuildKey, dir).WithHint(hint)
	}
	sweepUnpacked(dir, idleUnpacked)
	return err
}

// idleUnpacked is how long what was unpacked is kept for the next call.
const idleUnpacked = 30 * 24 * time.Hour

// makePrivateDir makes the directory. One that others may write is refused: its files run as code.
func makePrivateDir(dir string) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if err == nil && (!info.IsDir() || info.Mode().Perm()&0o022 != 0 ||
		cas.Owner(info) != uint32(os.Geteuid())) {
		err = errors.New("it is not a directory of this user alone")
	}
	return err
}

// sweepUnpacked removes what no process holds and was not used for so long.
func sweepUnpacked(dir string, idle time.Duration) (removed bool) {
	all, _ := os.ReadDir(dir) // of what cannot be read nothing is removed
	for _, e := range all {
		path := filepath.Join(dir, e.Name())
		if info, err := e.Info(); err != nil || time.Since(info.ModTime()) < idle {
			continue
		}
		if held, err := views.Leased(path); !held && err == nil &&
			views.MakeTreeRemovable(path) == nil {
			removed = os.RemoveAll(path) == nil || removed
		}
	}
	return removed
}

// unpack writes those of the build's files that the view lacks, each under another name until it is
// verified. Calls for the same build at the same time write the same.
func (s *Store) unpack(ctx context.Context, a *request.Answer, dir string,
	progress func(done, total int64)) error {
	var content []byte
	for _, f := range a.Build.Files {
		content = append(fmt.Appendf(content, "%q", f.Name), f.Digest[:]...)
	}
	name := request.DigestOf(content)
	directory := filepath.Join(dir, hex.EncodeToString(name[:16]), "files")
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return err
	}
	now := time.Now()
	// otherwise it is removed earlier than it has to be
	_ = os.Chtimes(filepath.Dir(directory), now, now)
	return lockView(ctx, a, directory, func(lacking []index.File) error {
		var done, total int64
		for _, f := range lacking {
			total += f.Size
		}
		if free, unknown := cas.FreeBytes(dir); unknown == nil {
			if err := store.Fits("the build", cas.RoundUpToBlock(total), free); err != nil {
				return err
			}
		}
		for _, f := range lacking {
			add := func(n, _ int64) {
				if progress != nil {
					progress(done+n, total)
				}
			}
			if err := s.copyTo(ctx, a.Build, f,
				filepath.Join(directory, filepath.FromSlash(f.Name)), add); err != nil {
				return err
			}
			done += f.Size
		}
		return nil
	})
}

// copyTo writes a file of the build under its name, when it is verified.
func (s *Store) copyTo(ctx context.Context, b *index.Build, f index.File, path string,
	progress func(done, total int64)) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	to, err := os.CreateTemp(filepath.Dir(path), "new-*")
	if err != nil {
		return err
	}
	if err = s.store.Forms().CopyTo(ctx, f.Digest, to, progress); err != nil {
		err = s.cannotServe(b, f, err)
	}
	err = errors.Join(err, to.Chmod(0o444), to.Close())
	if err == nil {
		err = os.Rename(to.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(to.Name()))
	}
	return nil
}
