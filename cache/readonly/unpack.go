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

// lease verifies the build's files: those of a view if the store has an intact one, otherwise the
// blobs, whole or packed. In the second case the answer has no view. Only the database knows which
// view belongs to a build, so views are found by the graph's name, which contains the build key. If
// this user may not list the views, none is found.
func (s *Store) lease(ctx context.Context, _ *store.Store, b *index.Build,
	_ func(string)) (*request.Answer, error) {
	a := &request.Answer{Build: b, Graph: b.Graph}
	graph := "/" + filepath.FromSlash(b.Graph)
	literal := strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)
	dir := filepath.Join(s.dir, "views", views.ScopeDir(b.Scope))
	// the pattern is always valid
	found, _ := filepath.Glob(literal.Replace(dir) + "/*/*" + literal.Replace(graph))
	unsound := func([]index.File) error { return cas.ErrNotFound }
	for _, path := range found {
		if lockView(ctx, a, strings.TrimSuffix(path, graph), unsound) == nil {
			return a, nil
		}
	}
	for _, f := range b.Files {
		if err := s.store.Packing().Check(ctx, f.Digest); err != nil {
			return nil, s.cannotServe(b, f, err)
		}
	}
	return a, nil
}

// lockView puts the view with the files in directory into the answer, and takes a lease, so that it
// is not removed. It calls fill with the files that are missing or damaged.
func lockView(ctx context.Context, a *request.Answer, dir string,
	fill func(lacking []index.File) error) error {
	view, err := os.Open(filepath.Dir(dir))
	if err != nil {
		return err
	}
	// fails on a file system without locks, where no daemon removes files either
	_ = flock.Lease(view)
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

// Unpack makes a view for an answer that has none. The view is below dir, a directory outside the
// store that only this user may access. Its path contains the digests of the files, so the files of
// an earlier call are verified and reused. They are not synced, and may be deleted at any time. A
// lease keeps the view from being removed by other calls, which remove views that were not used for
// a month, or to make space. progress, which may be nil, is told bytes; its calls do not overlap.
// The errors NotAllowed and NoSpace concern dir, so the caller may try another directory.
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

// idleUnpacked is how long unused views are kept for a later call.
const idleUnpacked = 30 * 24 * time.Hour

// makePrivateDir makes the directory. It refuses one that other users may write to, because its
// files run as code.
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

// sweepUnpacked removes views without a lease that were not used for the time idle.
func sweepUnpacked(dir string, idle time.Duration) (removed bool) {
	all, _ := os.ReadDir(dir) // unreadable entries are not removed
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

// unpack writes the build's files that the view lacks, each under a temporary name until it is
// verified. Concurrent calls for the same build write equal files.
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
	// best effort: without it, the view is removed early
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

// copyTo writes a file of the build, and renames it to its name when it is verified.
func (s *Store) copyTo(ctx context.Context, b *index.Build, f index.File, path string,
	progress func(done, total int64)) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	to, err := os.CreateTemp(filepath.Dir(path), "new-*")
	if err != nil {
		return err
	}
	if err = s.store.Packing().CopyTo(ctx, f.Digest, to, progress); err != nil {
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
