package views

import (
	"log/slog"
	"path/filepath"
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
	for i := range b.Files {
		if vs.o.Forms.OnlyPacked(b.Files[i].Digest) {
			return true
		}
	}
	return false
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
