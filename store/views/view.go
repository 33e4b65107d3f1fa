// Package views makes the directories that applications load builds from, and removes unused ones.
//
// A view's files are links to blobs, or to their unpacked copies, under the build's file names. On
// a file system without links they are copies. Its id is never reused. A client of a view holds a
// lease, a read lock on an open descriptor, which survives the daemon and ends with the last
// holder. A client with only the path has a limited time. A dropped view is removed after its last
// lease, or at a start.
//
// A Store is safe for concurrent use. It makes no decisions about builds: its callers decide what
// to serve, evict and pack, and ask it whether a view is in use. See View first.
package views

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/flock"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/store/packing"
)

// A View is the directory from which applications load a build:
//
//	views/<scope>/<view>/<id>/<files under their exact names>
//
// The scope's directory is 0700 and the daemon's; <view> and <id> are 0755, so that other users can
// only read, and the owner can use rm -rf. Changes by programs of the owner are noticed before the
// next hit. A client gets a descriptor of <view> and loads /proc/self/fd/N/<id>/<graph>: it needs
// no right to any directory above, and cannot walk to a sibling. OpenVINO's EP keeps a context
// binary for each path string, so a path string never has two contents: <id> is random, made with
// the view, and never used again; a repaired build gets a new one.
type View struct {
	scope string // "shared", "uid-1000"
	name  string // <view>
	id    string
	graph string // the graph's name below <id>
	path  string // absolute path of <view>
	inner *os.File
	at    cas.Stamp // of inner, when the view was complete
	files []file

	inLayer bool        // in a layer, so never removed
	dropped atomic.Bool // set before the view may be removed
	// lastGiven is the monotonic time when its path was last served; nil: never.
	lastGiven atomic.Pointer[time.Time]
}

type file struct {
	name   string
	digest cas.Digest
	copied bool      // a copy instead of a link, with its own stamp
	stamp  cas.Stamp // of a copied file

	unpacked bool // a link to the blob's unpacked copy
}

// isIntact compares the stamps of the view's files with those of the verified bytes. It notices
// added files by the time of the directory.
func (vs *Store) isIntact(v *View) bool {
	if v.dropped.Load() {
		return false
	}
	if now, err := cas.StampOf(v.inner); err != nil || now.Mtime != v.at.Mtime {
		return false
	}
	dir := int(v.inner.Fd())
	for i := range v.files {
		f := &v.files[i]
		want, ok := f.stamp, true
		switch {
		case f.copied:
		case f.unpacked:
			want, ok = vs.o.Packing.Copies.Stamp(f.digest)
		default:
			want, ok = vs.o.Blobs.Stamp(f.digest)
		}
		if !ok {
			return false
		}
		if got, err := cas.StampAt(dir, f.name); err != nil || !want.Holds(got) {
			return false
		}
	}
	return true
}

// Get returns a view of the build. Packed files of the build must have unpacked copies. It verifies
// the blobs, and makes a new view unless the existing one is intact. It calls verifying before it
// hashes.
func (vs *Store) Get(ctx context.Context, b *index.Build, verifying func()) (*View, error) {
	leave, err := vs.making.Take(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	for i := range b.Files {
		if vs.o.Packing.OnlyPacked(b.Files[i].Digest) {
			continue
		}
		if _, ok := vs.o.Blobs.Stamp(b.Files[i].Digest); !ok {
			verifying()
		}
		if err := vs.o.Blobs.Verify(ctx, b.Files[i].Digest); err != nil {
			return nil, fmt.Errorf("%s: %w", b.Files[i].Name, err)
		}
	}
	v := vs.ForBuild(b)
	if v != nil {
		// no file was added while no daemon ran
		if vs.isIntact(v) && len(filesBelow(v.path)) == len(v.files) {
			vs.setCurrent(b.ID, v)
			return v, nil
		}
		vs.Drop(b.ID, v, PathGrace)
	}
	defer func() {
		vs.mu.Lock()
		vs.unfinished = nil // no view is being made any more
		vs.mu.Unlock()
	}()
	err = vs.o.Index.Reserve.UseSome(func() (err error) {
		v, err = vs.create(ctx, b)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := vs.o.Index.Views.Save(b.ID[:], []byte(path.Join(v.scope, v.name, v.id))); err != nil {
		// best effort: it is made again after a restart
		vs.o.Log.Warn("cannot record a view", "error", err)
	}
	vs.setCurrent(b.ID, v)
	// If the build was removed in the meantime, that removal did not see this view.
	if _, err := vs.o.Index.Get(b.ID); errors.Is(err, index.ErrNotFound) {
		vs.mu.Lock()
		delete(vs.live, b.ID)
		vs.mu.Unlock()
		vs.dropAfterHandOver(v)
	}
	return v, nil
}

func (vs *Store) setCurrent(id index.BuildID, v *View) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.live[id] = v
}

// openEarlier opens the build's view from an earlier run, nil if there is none.
func (vs *Store) openEarlier(b *index.Build) *View {
	saved, ok := vs.o.Index.Views.Get(b.ID[:])
	if !ok {
		return nil
	}
	parts := strings.Split(string(saved), "/")
	if len(parts) != 3 || parts[0] != ScopeDir(b.Scope) {
		return nil
	}
	v := &View{scope: parts[0], name: parts[1], id: parts[2], graph: b.Graph,
		path: filepath.Join(vs.o.Dir, parts[0], parts[1])}
	if err := v.open(); err != nil {
		return nil
	}
	for _, f := range b.Files {
		v.files = append(v.files,
			file{name: f.Name, digest: f.Digest, unpacked: vs.o.Packing.OnlyPacked(f.Digest)})
	}
	return v
}

// Lease opens the view's directory and takes a lease on that open directory: The lease lasts until
// the last descriptor is closed, and survives the daemon.
func (v *View) Lease() (*os.File, error) {
	f, err := openDir(v.path)
	if err != nil {
		return nil, err
	}
	if err := flock.Lease(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if v.dropped.Load() || !v.contains(f) {
		return nil, errors.Join(fs.ErrNotExist, f.Close())
	}
	return f, nil
}

// NotePathGiven records that a client got a view's path without keeping the descriptor, so that the
// view is kept for PathGrace.
func (vs *Store) NotePathGiven(v *View) {
	now := vs.o.Now()
	v.lastGiven.Store(&now)
	vs.mu.Lock()
	defer vs.mu.Unlock()
	if d := vs.dropped[v.scope+"/"+v.name]; d != nil && v.scope == Unkept {
		// a short time, because no account has its bytes
		d.removableAt = now.Add(HandOver)
	} else if d != nil {
		d.removableAt = now.Add(PathGrace)
	}
}

// open opens the directory of the files, through which their stamps are read from then on.
func (v *View) open() (err error) {
	if v.inner, err = openDir(filepath.Join(v.path, v.id)); err != nil {
		return err
	}
	if v.at, err = cas.StampOf(v.inner); err != nil {
		return errors.Join(err, v.inner.Close())
	}
	return nil
}

// contains reports whether f is still the view's directory of files by its name.
func (v *View) contains(f *os.File) bool {
	there, err := cas.StampAt(int(f.Fd()), v.id)
	if err != nil {
		return false
	}
	return there.Dev == v.at.Dev && there.Ino == v.at.Ino
}

// Path returns the absolute path of the view. The files are in the directory ID below it.
func (v *View) Path() string { return v.path }

// ID returns the name of the directory with the files, which is never reused.
func (v *View) ID() string { return v.id }

// GraphPath returns the graph's path relative to the view.
func (v *View) GraphPath() string { return v.id + "/" + v.graph }

// Leased reports whether a process holds a lease on the view.
func (v *View) Leased() (bool, error) { return Leased(v.path) }

// PathGraceEnd returns until when clients with only the path may use it, zero if there are none.
func (v *View) PathGraceEnd() time.Time {
	given := v.lastGiven.Load()
	if given == nil {
		return time.Time{}
	}
	return given.Add(PathGrace)
}

// OpenedBy reports which processes have a file open or mapped. own are the daemon's open files.
func (v *View) OpenedBy(own *OwnFiles) Opener {
	by := ByNobody
	for i := range v.files {
		by = max(by, openedBy(filepath.Join(v.path, v.id, filepath.FromSlash(v.files[i].name)),
			own))
	}
	return by
}

// Store has the current views, and the dropped ones that are not removed yet. It is safe for
// concurrent use.
type Store struct {
	o Options

	mu   sync.Mutex
	live map[index.BuildID]*View // guarded by mu
	// "<scope>/<view>" of every view that this process made; guarded by mu
	createdNames map[string]bool
	dropped      map[string]*dropped // by "<scope>/<view>"; guarded by mu
	making       keyed.Slots         // one view is made at a time
	// unfinished is the view being made; its build may be removed in the meantime. Guarded by mu.
	unfinished *View
}

// Options are the directory and the dependencies of a Store.
type Options struct {
	Dir string // of all views
	// PathAccess lets every local user open shared views by path, not only by descriptor.
	PathAccess bool
	Blobs      *cas.Store
	Packing    *packing.Store
	Index      *index.Index
	Now        func() time.Time
	Log        *slog.Logger
}

// Open returns the store of views below a directory, which it makes.
func Open(o Options) (*Store, error) {
	vs := &Store{o: o, live: make(map[index.BuildID]*View), createdNames: make(map[string]bool),
		dropped: make(map[string]*dropped), making: make(keyed.Slots, 1)}
	return vs, vs.scopeDir("shared")
}

// NeedsUnpacking reports whether a file of the build has to be unpacked for a view.
func (vs *Store) NeedsUnpacking(b *index.Build) bool {
	return slices.ContainsFunc(b.Files, func(f index.File) bool {
		return vs.o.Packing.OnlyPacked(f.Digest)
	})
}

// CurrentView returns the build's view of this run, nil if there is none.
func (vs *Store) CurrentView(id index.BuildID) *View {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	return vs.live[id]
}

// CurrentIntact returns the build's current view after checking every file, nil if there is none.
func (vs *Store) CurrentIntact(id index.BuildID) *View {
	if v := vs.CurrentView(id); v != nil && vs.isIntact(v) {
		return v
	}
	return nil
}

// ForBuild returns the build's current view, or that of an earlier run, nil if there is none.
func (vs *Store) ForBuild(b *index.Build) *View {
	if v := vs.CurrentView(b.ID); v != nil {
		return v
	}
	return vs.openEarlier(b)
}

// Borrow returns the build's current view, nil if there is none. done returns it.
func (vs *Store) Borrow(id index.BuildID) (v *View, done func()) {
	if v = vs.CurrentView(id); v != nil {
		return v, func() {}
	}
	if _, there := vs.o.Index.Views.Get(id[:]); !there {
		return nil, nil
	}
	b, err := vs.o.Index.Get(id)
	if err != nil {
		return nil, nil
	}
	return vs.BorrowFor(&b)
}

// BorrowFor is Borrow for a caller that has the build. done may be called without a view.
func (vs *Store) BorrowFor(b *index.Build) (v *View, done func()) {
	if v = vs.CurrentView(b.ID); v != nil {
		return v, func() {}
	}
	if v = vs.openEarlier(b); v == nil {
		return nil, func() {}
	}
	return v, func() { _ = v.inner.Close() } // opened for reading, so no data can be lost
}

// AnyLeased reports whether any view is leased.
func (vs *Store) AnyLeased() bool {
	vs.mu.Lock()
	paths := make([]string, 0, len(vs.live))
	for _, v := range vs.live {
		paths = append(paths, v.path)
	}
	vs.mu.Unlock()
	for _, path := range paths {
		if held, _ := Leased(path); held { // a directory that cannot be opened is not leased
			return true
		}
	}
	return false
}

// ScopeDir returns the name of a scope's directory.
func ScopeDir(scope string) string { return strings.ReplaceAll(scope, ":", "-") }

// scopeDir makes the directory of a scope. With path access other users may enter but not list it,
// so that they can open a view only if they know its name.
func (vs *Store) scopeDir(scope string) error {
	dir := filepath.Join(vs.o.Dir, ScopeDir(scope))
	mode := fs.FileMode(0o700)
	if scope == "shared" && vs.o.PathAccess {
		mode = 0o711
	}
	if err := os.MkdirAll(vs.o.Dir, 0o711); err != nil { // a user may have deleted it
		return err
	}
	if err := os.Mkdir(dir, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.Chmod(dir, mode)
}

// create links the build's files into a new directory. After a crash before it is recorded in the
// index, the next start removes it.
func (vs *Store) create(ctx context.Context, b *index.Build) (*View, error) {
	v, err := vs.createView(b.Scope, b.Graph)
	if err != nil {
		return nil, err
	}
	for _, f := range b.Files {
		vf, err := vs.link(ctx, v, f)
		if err != nil {
			vs.discard(v)
			return nil, fmt.Errorf("%s: %w", f.Name, err)
		}
		v.files = append(v.files, vf)
	}
	return v, vs.makeReadable(v)
}

// createView makes the directories of a view, still writable.
func (vs *Store) createView(scope, graph string) (*View, error) {
	if err := vs.scopeDir(scope); err != nil {
		return nil, err
	}
	v := &View{scope: ScopeDir(scope), name: NewID(), id: NewID(), graph: graph}
	v.path = filepath.Join(vs.o.Dir, v.scope, v.name)
	vs.mu.Lock()
	vs.createdNames[v.scope+"/"+v.name] = true
	if scope != Unkept {
		vs.unfinished = v
	}
	vs.mu.Unlock()
	if err := os.MkdirAll(filepath.Join(v.path, v.id), 0o700); err != nil {
		return nil, errors.Join(err, os.RemoveAll(v.path))
	}
	return v, v.open()
}

func (vs *Store) link(ctx context.Context, v *View, f index.File) (file, error) {
	if sub := path.Dir(f.Name); sub != "." {
		if err := os.MkdirAll(filepath.Join(v.path, v.id, sub), 0o700); err != nil {
			return file{}, err
		}
	}
	store, unpacked, err := vs.o.Packing.ServingStore(f.Digest)
	if err != nil {
		return file{}, err
	}
	stamp, err := store.Link(ctx, f.Digest, v.inner, f.Name)
	if err != nil {
		return file{}, err
	}
	blob, ok := store.Stamp(f.Digest)
	copied := !ok || blob.Ino != stamp.Ino || blob.Dev != stamp.Dev
	return file{name: f.Name, digest: f.Digest, copied: copied, stamp: stamp, unpacked: unpacked},
		nil
}

// makeReadable lets all users read a complete view.
func (vs *Store) makeReadable(v *View) error {
	err := MakeTreeReadable(v.path)
	if err == nil {
		v.at, err = cas.StampOf(v.inner)
	}
	if err != nil {
		vs.discard(v)
	}
	return err
}

// MakeTreeReadable lets all users read the directories, and their owner remove them, inside first.
func MakeTreeReadable(path string) error {
	var dirs []string
	err := filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, p)
		}
		return err
	})
	for i := len(dirs) - 1; i >= 0 && err == nil; i-- {
		err = os.Chmod(dirs[i], 0o755)
	}
	return err
}

// MakeTreeRemovable lets the owner remove directories, which earlier versions made read-only.
func MakeTreeRemovable(path string) error {
	return filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = os.Chmod(p, 0o700)
		}
		return err
	})
}

// discard removes a view that was never served.
func (vs *Store) discard(v *View) {
	if v.inner != nil {
		_ = v.inner.Close() // opened for reading, so no data can be lost
	}
	if err := vs.remove(v.path, v.files); err != nil {
		vs.o.Log.Warn("cannot remove a view", "path", v.path, "error", err)
	}
}

// CreateUnkept makes a view of a directory that is not stored, for the waiting requests.
func (vs *Store) CreateUnkept(b *index.Build, out string) (*View, error) {
	v, err := vs.createView(Unkept, b.Graph)
	if err != nil {
		return nil, err
	}
	for i := range b.Files {
		if err := vs.moveFile(v, &b.Files[i], out); err != nil {
			vs.discard(v)
			return nil, err
		}
		stamp, err := cas.StampAt(int(v.inner.Fd()), b.Files[i].Name)
		if err != nil {
			vs.discard(v)
			return nil, err
		}
		v.files = append(v.files, file{name: b.Files[i].Name, copied: true, stamp: stamp})
	}
	if err := vs.makeReadable(v); err != nil {
		return nil, err
	}
	vs.dropAfterHandOver(v) // no other request finds it, so it ends with its last lease
	return v, nil
}

// moveFile moves a staged file into the view, or links its blob if it has one.
func (vs *Store) moveFile(v *View, f *index.File, out string) error {
	if !f.Digest.IsZero() {
		_, err := vs.link(context.Background(), v, *f)
		return err
	}
	to := filepath.Join(v.path, v.id, filepath.FromSlash(f.Name))
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return err
	}
	from := filepath.Join(out, filepath.FromSlash(f.Name))
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	f.Size = info.Size()
	return errors.Join(os.Chmod(from, 0o444), os.Rename(from, to))
}

// NewID returns a name for a view, which is unique and cannot be guessed.
func NewID() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
