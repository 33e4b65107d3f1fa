package views

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/flock"
)

// dropped is a view that Sweep removes as soon as it is not in use.
type dropped struct {
	path string
	// inner is nil for a view of an earlier run. It is open as long as a hit may be using it.
	inner       *os.File
	duplicates  []*os.File // further descriptors of the directory, from concurrent drops
	files       []file
	removableAt time.Time // clients that got only the path may use it until then
}

// PathGrace is how long a dropped view is kept after it was last served, for clients that load by
// path.
const PathGrace = 10 * time.Minute

// Drop takes a view out of use. Sweep removes it when it is not in use and the grace is over.
func (vs *Store) Drop(id index.BuildID, v *View, grace time.Duration) {
	if v.inLayer {
		return
	}
	v.dropped.Store(true)
	vs.o.Index.Views.Drop(id[:])
	vs.mu.Lock()
	defer vs.mu.Unlock()
	if vs.live[id] == v {
		delete(vs.live, id)
	}
	after := vs.o.Now()
	if given := v.lastGiven.Load(); given != nil && grace > 0 {
		after = given.Add(grace)
	}
	vs.dropLocked(v, after)
}

// dropLocked has Sweep remove the view. The caller holds mu.
func (vs *Store) dropLocked(v *View, after time.Time) {
	d := &dropped{path: v.path, inner: v.inner, files: v.files, removableAt: after}
	if old := vs.dropped[v.scope+"/"+v.name]; old != nil && old.inner == v.inner {
		d.duplicates = old.duplicates
	} else if old != nil {
		d.duplicates = append(old.duplicates, old.inner)
	}
	vs.dropped[v.scope+"/"+v.name] = d
}

func (d *dropped) close() {
	for _, f := range append(d.duplicates, d.inner) {
		if f != nil {
			_ = f.Close() // opened for reading, so no data can be lost
		}
	}
}

// DropCurrent drops the build's current view, if there is one.
func (vs *Store) DropCurrent(id index.BuildID, grace time.Duration) {
	if v := vs.CurrentView(id); v != nil {
		vs.Drop(id, v, grace)
	}
}

// dropAfterHandOver drops a view of which only waiting requests take leases.
func (vs *Store) dropAfterHandOver(v *View) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.dropLocked(v, vs.o.Now().Add(HandOver))
}

// HandOver is how long requests that waited for a compile have to take a lease on its result.
const HandOver = time.Minute

// droppedViews returns the remaining views of removed builds, and the one being made, because its
// build may have been removed.
func (vs *Store) droppedViews() []*dropped {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	var out []*dropped
	if v := vs.unfinished; v != nil && vs.dropped[v.scope+"/"+v.name] == nil {
		out = append(out, &dropped{path: v.path})
	}
	for name, d := range vs.dropped {
		if !strings.HasPrefix(name, Unkept+"/") {
			out = append(out, d)
		}
	}
	return out
}

// Unkept is the scope of views of builds that are not stored.
const Unkept = "unkept"

// paths returns the paths of a dropped view's files.
func (d *dropped) paths() (paths []string) {
	if d.inner != nil && len(d.files) > 0 {
		for _, f := range d.files {
			paths = append(paths, filepath.Join(d.inner.Name(), filepath.FromSlash(f.name)))
		}
		return paths
	}
	return filesBelow(d.path)
}

func filesBelow(dir string) (paths []string) {
	// errors are ignored, because unreadable entries were just removed
	_ = filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			paths = append(paths, p)
		}
		return nil
	})
	return paths
}

// isOpen reports whether a process has one of the files open or mapped, without a lease.
func (d *dropped) isOpen() bool {
	return slices.ContainsFunc(d.paths(), func(path string) bool {
		return openedBy(path, nil) != ByNobody
	})
}

// Sweep removes the dropped views that are not in use.
func (vs *Store) Sweep() {
	vs.mu.Lock()
	todo := make(map[string]*dropped, len(vs.dropped))
	now := vs.o.Now()
	for name, d := range vs.dropped {
		if !now.Before(d.removableAt) {
			todo[name] = d
		}
	}
	vs.mu.Unlock()
	for name, d := range todo {
		held, err := Leased(d.path)
		if held || d.isOpen() {
			continue // removing it would free no bytes, and no account would have them
		}
		if err == nil {
			err = vs.remove(d.path, d.files)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			vs.o.Log.Warn("cannot remove a view", "path", d.path, "error", err)
			if !errors.Is(err, unix.ENOTDIR) {
				continue // the next sweep retries
			}
		}
		vs.mu.Lock()
		if vs.dropped[name] == d { // otherwise it was dropped again
			d.close()
			delete(vs.dropped, name)
			delete(vs.createdNames, name)
		}
		vs.mu.Unlock()
	}
}

// Leased reports whether a process holds a lease on the view. A view without its directory has no
// files to protect: unpacked copies may vanish at any time.
func Leased(path string) (bool, error) {
	f, err := openDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	held, err := flock.Leased(f)
	return held, errors.Join(err, f.Close())
}

// remove unlinks the files through the store, which renews the blobs' stamps, and then the
// directories.
func (vs *Store) remove(dir string, files []file) error {
	if err := MakeTreeRemovable(dir); err != nil {
		return err
	}
	inner, err := os.ReadDir(dir)
	if err == nil && len(inner) == 1 && len(files) > 0 {
		if f, err := openDir(filepath.Join(dir, inner[0].Name())); err == nil {
			for _, file := range files {
				vs.unlink(f, file)
			}
			_ = f.Close() // opened for reading, so no data can be lost
		}
	}
	return os.RemoveAll(dir)
}

func (vs *Store) unlink(dir *os.File, file file) {
	store := vs.o.Blobs
	if file.unpacked {
		store = vs.o.Packing.Copies.Store()
	}
	if store != nil && !file.copied {
		// best effort: otherwise the blob is hashed or unpacked again
		_ = store.Unlink(file.digest, dir, file.name)
	}
}

// DropUnknown drops every view on disk that no build refers to and this process did not make.
func (vs *Store) DropUnknown(ctx context.Context) error {
	known := make(map[string]bool)
	err := vs.o.Index.Views.Each(ctx, func(_, where []byte) error {
		known[path.Dir(string(where))] = true
		return nil
	})
	if err != nil {
		return err
	}
	found, err := filepath.Glob(filepath.Join(vs.o.Dir, "*", "*"))
	if err != nil {
		return err
	}
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for _, p := range found {
		name := path.Join(filepath.Base(filepath.Dir(p)), filepath.Base(p))
		if !isView(p, name) {
			vs.o.Log.Warn("a file among the views is not the store's, and stays", "path", p)
		} else if !known[name] && !vs.createdNames[name] && vs.dropped[name] == nil {
			vs.dropped[name] = &dropped{path: p}
		}
	}
	return nil
}

// viewName matches "<scope>/<view>".
var viewName = regexp.MustCompile(`^(shared|` + Unkept + `|uid-[0-9]+)/[0-9a-f]{16,64}$`)

// isView reports whether a path is that of a view, with no link on its last two steps.
func isView(path, name string) bool {
	scope, err := os.Lstat(filepath.Dir(path))
	info, err2 := os.Lstat(path)
	return err == nil && err2 == nil && scope.IsDir() && info.IsDir() && viewName.MatchString(name)
}

// Close closes the daemon's descriptors of views. The files stay, and so do leases on them.
func (vs *Store) Close() {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for _, v := range vs.live {
		_ = v.inner.Close() // opened for reading, so no data can be lost
	}
	for _, d := range vs.dropped {
		d.close()
	}
}
