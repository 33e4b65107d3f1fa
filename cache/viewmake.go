package cache

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

	"github.com/epcached/epcached/index"
)

// newID gives an id that was never used before and cannot be guessed.
func newID() string {
	var b [12]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err) // crypto/rand never fails on a system that works
	}
	return hex.EncodeToString(b[:])
}

func scopeFolder(scope string) string { return strings.ReplaceAll(scope, ":", "-") }

// scopeDir makes the folder of a scope. Path access opens the way, not the list: names of views cannot be guessed.
func (c *Cache) scopeDir(views, scope string) error {
	dir := filepath.Join(views, scopeFolder(scope))
	mode := fs.FileMode(0o700)
	if scope == "shared" && c.options.PathAccess {
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

// makeView links the build's files into a new folder. Until the index knows it, a crash leaves a folder that
// nobody refers to, which the next start removes.
func (c *Cache) makeView(ctx context.Context, b *index.Build) (*view, error) {
	v, err := c.newView(b.Scope, b.Graph, c.anyPacked(b))
	if err != nil {
		return nil, err
	}
	for _, f := range b.Files {
		vf, err := c.linkFile(ctx, v, f)
		if err != nil {
			c.discardView(v)
			return nil, fmt.Errorf("%s: %w", f.Name, err)
		}
		v.files = append(v.files, vf)
	}
	return v, c.sealView(v)
}

// newView makes the folders of a view, still writable. A view lies on one file system: one with unpacked files where they are.
func (c *Cache) newView(scope, graph string, unpacked bool) (*view, error) {
	folder := c.viewsFolder(unpacked)
	if err := c.scopeDir(folder, scope); err != nil {
		return nil, err
	}
	v := &view{scope: scopeFolder(scope), name: newID(), id: newID(), graph: graph}
	v.path = filepath.Join(folder, v.scope, v.name)
	c.views.mu.Lock()
	c.views.made[v.scope+"/"+v.name] = true
	c.views.mu.Unlock()
	if err := os.MkdirAll(filepath.Join(v.path, v.id), 0o700); err != nil {
		return nil, err
	}
	return v, v.open()
}

func (c *Cache) linkFile(ctx context.Context, v *view, f index.File) (viewFile, error) {
	if sub := path.Dir(f.Name); sub != "." {
		if err := os.MkdirAll(filepath.Join(v.path, v.id, sub), 0o700); err != nil {
			return viewFile{}, err
		}
	}
	store, unpacked, err := c.forms.Serving(f.Digest)
	if err != nil {
		return viewFile{}, err
	}
	stamp, err := store.Link(ctx, f.Digest, v.inner, f.Name)
	if err != nil {
		return viewFile{}, err
	}
	blob, ok := store.Stamp(f.Digest)
	copied := !ok || blob.Ino != stamp.Ino || blob.Dev != stamp.Dev
	return viewFile{name: f.Name, digest: f.Digest, copied: copied, stamp: stamp, unpacked: unpacked}, nil
}

// sealView takes away the right to write.
func (c *Cache) sealView(v *view) error {
	err := closeTree(v.path)
	if err != nil {
		c.discardView(v)
	}
	return err
}

// closeTree takes away the right to write, from the inside out.
func closeTree(path string) error {
	var dirs []string
	err := filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, p)
		}
		return err
	})
	for i := len(dirs) - 1; i >= 0 && err == nil; i-- {
		err = os.Chmod(dirs[i], 0o555)
	}
	return err
}

// openTree gives the owner the right to remove what closeTree closed.
func openTree(path string) error {
	return filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = os.Chmod(p, 0o700)
		}
		return err
	})
}

// discardView removes a view that was never given out.
func (c *Cache) discardView(v *view) {
	if v.inner != nil {
		_ = v.inner.Close() // read-only: nothing can be lost
	}
	if err := c.removeView(v.path, v.files); err != nil {
		c.log.Warn("view not removed", "path", v.path, "error", err)
	}
}
