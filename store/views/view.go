package views

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/flock"
)

// A View is the folder from which applications load a build:
//
//	views/<scope>/<view>/<id>/<files under their exact names>
//
// The scope's folder is 0700 and the daemon's; <view> and <id> are 0755, so that other users read only, and the owner can remove the store with
// rm -rf. Programs of the owner could write in either case; what they add, replace or remove here is noticed before the next hit. A client gets a descriptor of <view> and
// loads /proc/self/fd/N/<id>/<graph>: it needs no right to any folder above, and has none to walk to a sibling.
// OpenVINO's EP keeps a context binary for each path string, so a path string is never used for two contents:
// <id> is random, made with the view, and never used again; whatever is repaired gets a new one. The files are
// hard links to the store's blobs.
type View struct {
	scope string // "shared", "uid-1000"
	name  string // <view>
	id    string
	graph string // the graph's name below <id>
	path  string // absolute, of <view>
	inner *os.File
	at    cas.Stamp // of inner, when the view was whole
	files []file

	gone   atomic.Bool  // set before the view may be taken away
	served atomic.Int64 // when it was last given out, Unix nanoseconds
}

type file struct {
	name   string
	digest cas.Digest
	copied bool      // not a link to the blob: it has its own stamp
	stamp  cas.Stamp // of a copied file

	unpacked bool // of the blob's unpacked form
}

// intact compares every file of the view with what it was when its bytes were last checked. It notices further files by the time of the folder.
func (vs *Store) intact(v *View) bool {
	if v.gone.Load() {
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
			want, ok = vs.o.Forms.Copies.Stamp(f.digest)
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

// Get gives a view of the build, whose packed files have their unpacked form: it verifies the blobs, and makes a view with a new id unless the
// existing one turns out to be sound. verifying is called before a blob is hashed.
func (vs *Store) Get(ctx context.Context, b *index.Build, verifying func()) (*View, error) {
	leave, err := vs.making.Take(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	for i := range b.Files {
		if vs.o.Forms.OnlyPacked(b.Files[i].Digest) {
			continue
		}
		if _, ok := vs.o.Blobs.Stamp(b.Files[i].Digest); !ok {
			verifying()
		}
		if err := vs.o.Blobs.Verify(ctx, b.Files[i].Digest); err != nil {
			return nil, fmt.Errorf("%s: %w", b.Files[i].Name, err)
		}
	}
	v := vs.Of(b)
	if v != nil {
		if vs.intact(v) && len(filesBelow(v.path)) == len(v.files) { // none was added while no daemon ran
			vs.keep(b.ID, v)
			return v, nil
		}
		vs.Drop(b.ID, v, PathGrace)
	}
	defer func() {
		vs.mu.Lock()
		vs.half = nil // no view is being made any more
		vs.mu.Unlock()
	}()
	v, err = vs.create(ctx, b)
	if err != nil {
		return nil, err
	}
	if err := vs.o.Index.Views.Save(b.ID[:], []byte(vs.savedPath(v))); err != nil {
		vs.o.Log.Warn("view not remembered", "error", err) // it is made anew after a restart
	}
	vs.keep(b.ID, v)
	if _, err := vs.o.Index.Get(b.ID); errors.Is(err, index.ErrNotFound) { // it went meanwhile, and who removed it may not have found this view
		vs.mu.Lock()
		delete(vs.live, b.ID)
		vs.mu.Unlock()
		vs.doomLater(v)
	}
	return v, nil
}

func (vs *Store) keep(id index.BuildID, v *View) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.live[id] = v
}

// earlier opens the view that an earlier run made for the build, nil if there is none.
func (vs *Store) earlier(b *index.Build) *View {
	saved, ok := vs.o.Index.Views.Get(b.ID[:])
	if !ok {
		return nil
	}
	where, apart := strings.CutPrefix(string(saved), viewsApart)
	parts := strings.Split(where, "/")
	if _, elsewhere := vs.o.Forms.Copies.Folder(); len(parts) != 3 || parts[0] != ScopeFolder(b.Scope) || apart != (elsewhere && vs.Unpacks(b)) {
		return nil
	}
	v := &View{scope: parts[0], name: parts[1], id: parts[2], graph: b.Graph, path: filepath.Join(vs.folder(apart), parts[0], parts[1])}
	if err := v.open(); err != nil {
		return nil
	}
	for _, f := range b.Files {
		v.files = append(v.files, file{name: f.Name, digest: f.Digest, unpacked: vs.o.Forms.OnlyPacked(f.Digest)})
	}
	return v
}

// viewsApart marks, in what the index keeps, a view that lies beside the unpacked forms.
const viewsApart = "unpacked:"

func (vs *Store) savedPath(v *View) string {
	where := path.Join(v.scope, v.name, v.id)
	if !vs.here(v.path) {
		return viewsApart + where
	}
	return where
}

// Lease opens the view's folder and takes a shared lock on that open folder: it lasts as long as somebody holds
// the descriptor, in whatever process, and survives the daemon.
func (v *View) Lease() (*os.File, error) {
	f, err := openFolder(v.path)
	if err != nil {
		return nil, err
	}
	if err := flock.Share(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if v.gone.Load() || !v.leadsTo(f) {
		return nil, errors.Join(fs.ErrNotExist, f.Close())
	}
	return f, nil
}

// Told notes that a client was told a view's path, which does not hold on to the descriptor: the view stays for a while.
func (vs *Store) Told(v *View) {
	now := vs.o.Now()
	v.served.Store(now.UnixNano())
	vs.mu.Lock()
	defer vs.mu.Unlock()
	d := vs.doomed[v.scope+"/"+v.name]
	if d != nil && v.scope == Unkept {
		d.after = now.Add(HandOver) // there was no room for it: it may be there for who loads it now, and in no count for longer
	} else if d != nil {
		d.after = now.Add(PathGrace)
	}
}

// open opens the folder of the files, which is looked through from then on.
func (v *View) open() (err error) {
	if v.inner, err = os.Open(filepath.Join(v.path, v.id)); err != nil {
		return err
	}
	if v.at, err = cas.StampOf(v.inner); err != nil {
		return errors.Join(err, v.inner.Close())
	}
	return nil
}

// leadsTo tells whether the folder of the files is still in the view, under its name: it was looked through its own
// descriptor so far.
func (v *View) leadsTo(f *os.File) bool {
	there, err := cas.StampAt(int(f.Fd()), v.id)
	if err != nil {
		return false
	}
	return there.Dev == v.at.Dev && there.Ino == v.at.Ino
}

// Path is that of the view, absolute. The files are in the folder ID below it.
func (v *View) Path() string { return v.path }

// ID is the name of the folder that has the files. It is never used again.
func (v *View) ID() string { return v.id }

// GraphPath is the graph's path below that of the view.
func (v *View) GraphPath() string { return v.id + "/" + v.graph }

// Held tells whether somebody holds a lease on the view.
func (v *View) Held() (bool, error) { return Leased(v.path) }

// ToldUntil is when those who were told the view's path have had their time, zero if nobody was told.
func (v *View) ToldUntil() time.Time {
	served := v.served.Load()
	if served == 0 {
		return time.Time{}
	}
	return time.Unix(0, served).Add(PathGrace)
}

// OpenedBy tells who has one of the files open, or mapped. own is what the daemon has open.
func (v *View) OpenedBy(own *OwnFiles) Opener {
	by := ByNobody
	for i := range v.files {
		by = max(by, openedBy(filepath.Join(v.path, v.id, filepath.FromSlash(v.files[i].name)), own))
	}
	return by
}
