package views

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

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
	if _, err := rand.Read(b[:]); err != nil {
		panic(err) // crypto/rand never fails on a system that works
	}
	return hex.EncodeToString(b[:])
}
