// Package views makes the folders from which applications load builds, knows who holds them, and takes them away.
//
// A view's files are links to blobs, or to their unpacked forms, under the names that the build has for them; a file system that has no links gets copies. Its id
// is random and never used again. Who is given a view holds a lease on it, which is a shared lock on a descriptor of its folder: it survives the daemon
// and ends with the last holder. Who was only told the path has some time. A view that is taken out of use is given to nobody new, and goes with its
// last holder; what is left of earlier runs is found at the start.
//
// A Store may be used by any number of goroutines. It decides nothing about builds: whether one may be served, evicted or packed is for who asks here
// whether somebody holds it. Start reading at View.
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
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/store/packing"
)

// Store has the views that are in use, and those to be taken away. It may be used by any number of goroutines.
type Store struct {
	o Options

	mu     sync.Mutex
	live   map[index.BuildID]*View // guarded by mu
	made   map[string]bool         // "<scope>/<view>" of every view that this process made; guarded by mu
	doomed map[string]*doomed      // by "<scope>/<view>"; guarded by mu
	making keyed.Slots             // one view is made at a time
	half   *View                   // which is being made: its build may go meanwhile; guarded by mu
}

// Options say where views lie and what they are made of.
type Options struct {
	Dir        string // the folder of the views that are links to whole blobs; the others lie beside the unpacked forms
	PathAccess bool   // shared views may be reached by path by every local user, not only by descriptor
	Blobs      *cas.Store
	Forms      *packing.Store
	Index      *index.Index
	Now        func() time.Time
	Log        *slog.Logger
}

// Open gives the store of views below a folder, which it makes.
func Open(o Options) (*Store, error) {
	vs := &Store{o: o, live: make(map[index.BuildID]*View), made: make(map[string]bool), doomed: make(map[string]*doomed), making: make(keyed.Slots, 1)}
	return vs, vs.scopeDir(o.Dir, "shared")
}

// folder is where views lie that have a file of an unpacked form, or none.
func (vs *Store) folder(unpacked bool) string {
	if folder, apart := vs.o.Forms.Copies.Folder(); unpacked && apart {
		return filepath.Join(folder, "views")
	}
	return vs.o.Dir
}

// Unpacks tells whether some file of the build has to be unpacked for a view.
func (vs *Store) Unpacks(b *index.Build) bool {
	return slices.ContainsFunc(b.Files, func(f index.File) bool {
		return vs.o.Forms.OnlyPacked(f.Digest)
	})
}

// Current gives the build's view that is in use in this run, nil if there is none.
func (vs *Store) Current(id index.BuildID) *View {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	return vs.live[id]
}

// Sound gives the build's view that is in use, with every file checked; nil if there is none.
func (vs *Store) Sound(id index.BuildID) *View {
	if v := vs.Current(id); v != nil && vs.intact(v) {
		return v
	}
	return nil
}

// Of gives the build's view that is in use, or was in an earlier run; nil if there is none.
func (vs *Store) Of(b *index.Build) *View {
	if v := vs.Current(b.ID); v != nil {
		return v
	}
	return vs.earlier(b)
}

// Look gives the build's view as of does. done ends the look at it.
func (vs *Store) Look(id index.BuildID) (v *View, done func()) {
	if v = vs.Current(id); v != nil {
		return v, func() {}
	}
	if _, there := vs.o.Index.Views.Get(id[:]); !there {
		return nil, nil
	}
	b, err := vs.o.Index.Get(id)
	if err != nil {
		return nil, nil
	}
	return vs.LookAt(&b)
}

// LookAt is Look for who has the build. done may be called where there is no view.
func (vs *Store) LookAt(b *index.Build) (v *View, done func()) {
	if v = vs.Current(b.ID); v != nil {
		return v, func() {}
	}
	if v = vs.earlier(b); v == nil {
		return nil, func() {}
	}
	return v, func() { _ = v.inner.Close() } // read-only: nothing can be lost
}

// AnyHeld tells whether somebody holds one of the views that are in use.
func (vs *Store) AnyHeld() bool {
	vs.mu.Lock()
	paths := make([]string, 0, len(vs.live))
	for _, v := range vs.live {
		paths = append(paths, v.path)
	}
	vs.mu.Unlock()
	for _, path := range paths {
		if held, _ := Leased(path); held { // a folder that cannot be opened is held by nobody
			return true
		}
	}
	return false
}

// ScopeFolder is what the folder of a scope is called.
func ScopeFolder(scope string) string { return strings.ReplaceAll(scope, ":", "-") }

// scopeDir makes the folder of a scope. Path access opens the way, not the list: names of views cannot be guessed.
func (vs *Store) scopeDir(views, scope string) error {
	dir := filepath.Join(views, ScopeFolder(scope))
	mode := fs.FileMode(0o700)
	if scope == "shared" && vs.o.PathAccess {
		mode = 0o711
	}
	if err := os.MkdirAll(views, 0o711); err != nil { // somebody may have deleted it
		return err
	}
	if err := os.Mkdir(dir, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.Chmod(dir, mode)
}

// create links the build's files into a new folder. Until the index knows it, a crash leaves a folder that
// nobody refers to, which the next start removes.
func (vs *Store) create(ctx context.Context, b *index.Build) (*View, error) {
	v, err := vs.begin(b.Scope, b.Graph, vs.Unpacks(b))
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
	return v, vs.seal(v)
}

// begin makes the folders of a view, still writable. A view lies on one file system: one with unpacked files where they are.
func (vs *Store) begin(scope, graph string, unpacked bool) (*View, error) {
	folder := vs.folder(unpacked)
	if err := vs.scopeDir(folder, scope); err != nil {
		return nil, err
	}
	v := &View{scope: ScopeFolder(scope), name: NewID(), id: NewID(), graph: graph}
	v.path = filepath.Join(folder, v.scope, v.name)
	vs.mu.Lock()
	vs.made[v.scope+"/"+v.name] = true
	if scope != Unkept {
		vs.half = v
	}
	vs.mu.Unlock()
	if err := os.MkdirAll(filepath.Join(v.path, v.id), 0o700); err != nil {
		return nil, err
	}
	return v, v.open()
}

func (vs *Store) link(ctx context.Context, v *View, f index.File) (file, error) {
	if sub := path.Dir(f.Name); sub != "." {
		if err := os.MkdirAll(filepath.Join(v.path, v.id, sub), 0o700); err != nil {
			return file{}, err
		}
	}
	store, unpacked, err := vs.o.Forms.Serving(f.Digest)
	if err != nil {
		return file{}, err
	}
	stamp, err := store.Link(ctx, f.Digest, v.inner, f.Name)
	if err != nil {
		return file{}, err
	}
	blob, ok := store.Stamp(f.Digest)
	copied := !ok || blob.Ino != stamp.Ino || blob.Dev != stamp.Dev
	return file{name: f.Name, digest: f.Digest, copied: copied, stamp: stamp, unpacked: unpacked}, nil
}

// seal lets all users read the view that is whole.
func (vs *Store) seal(v *View) error {
	err := SealTree(v.path)
	if err == nil {
		v.at, err = cas.StampOf(v.inner)
	}
	if err != nil {
		vs.discard(v)
	}
	return err
}

// SealTree lets all users read the folders, and their owner remove them, from the inside out.
func SealTree(path string) error {
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

// OpenTree gives the owner the right to remove folders, which earlier versions made read-only.
func OpenTree(path string) error {
	return filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = os.Chmod(p, 0o700)
		}
		return err
	})
}

// discard removes a view that was never given out.
func (vs *Store) discard(v *View) {
	if v.inner != nil {
		_ = v.inner.Close() // read-only: nothing can be lost
	}
	if err := vs.remove(v.path, v.files); err != nil {
		vs.o.Log.Warn("view not removed", "path", v.path, "error", err)
	}
}

// Alone makes a view that only those who wait for it now will hold, of what lies in a folder; nothing of it is kept. Files that are blobs already are linked.
func (vs *Store) Alone(b *index.Build, out string) (*View, error) {
	v, err := vs.begin(Unkept, b.Graph, false)
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
	if err := vs.seal(v); err != nil {
		return nil, err
	}
	vs.doomLater(v) // nobody finds it again: it goes with its last holder
	return v, nil
}

// moveFile moves a staged file into the view, or links the blob that it has become already.
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

// NewID gives a name for a view, which was never used before and cannot be guessed.
func NewID() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // it never fails
	return hex.EncodeToString(b[:])
}
