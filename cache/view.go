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
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// A view is the folder from which applications load a build:
//
//	views/<scope>/<view>/<id>/<files under their exact names>
//
// The scope's folder is 0700 and the daemon's; <view> and <id> are 0555. A client gets a descriptor of <view> and
// loads /proc/self/fd/N/<id>/<graph>: it needs no right to any folder above, and has none to walk to a sibling.
// OpenVINO's EP keeps a context binary for each path string, so a path string is never used for two contents:
// <id> is random, made with the view, and never used again; whatever is repaired gets a new one. The files are
// hard links to the store's blobs.
type view struct {
	scope string // "shared", "uid-1000"
	name  string // <view>
	id    string
	graph string // the graph's name below <id>
	path  string // absolute, of <view>
	inner *os.File
	at    cas.Stamp // of inner, for its device and inode
	files []viewFile

	gone   atomic.Bool  // set before the view may be taken away
	served atomic.Int64 // when it was last given out, Unix nanoseconds
}

type viewFile struct {
	name   string
	digest cas.Digest
	copied bool      // not a link to the blob: it has its own stamp
	stamp  cas.Stamp // of a copied file
}

// views are the views that are in use, and those to be taken away.
type views struct {
	mu     sync.Mutex
	live   map[index.BuildID]*view // guarded by mu
	made   map[string]bool         // "<scope>/<view>" of every view that this process made; guarded by mu
	doomed map[string]*doomed      // by "<scope>/<view>"; guarded by mu
	making sync.Mutex              // one view is made at a time
}

// doomed is a view that goes as soon as nobody holds it.
type doomed struct {
	path  string
	inner *os.File // nil for a view of an earlier run; stays open as long as a hit may be looking through it
	files []viewFile
	after time.Time // clients that were told the path only have until then
}

// pathGrace is how long a view stays after it was last given out, for clients that load by path.
const pathGrace = 10 * time.Minute

// newID gives an id that was never used before and cannot be guessed.
func newID() string {
	var b [12]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err) // crypto/rand never fails on a system that works
	}
	return hex.EncodeToString(b[:])
}

func scopeFolder(scope string) string { return strings.ReplaceAll(scope, ":", "-") }

func (c *Cache) openViews() error {
	c.views.live = make(map[index.BuildID]*view)
	c.views.made = make(map[string]bool)
	c.views.doomed = make(map[string]*doomed)
	return c.scopeDir("shared")
}

// scopeDir makes the folder of a scope. Path access opens the way, not the list: names of views cannot be guessed.
func (c *Cache) scopeDir(scope string) error {
	dir := c.path("views", scopeFolder(scope))
	mode := fs.FileMode(0o700)
	if scope == "shared" && c.options.PathAccess {
		mode = 0o711
	}
	if err := os.MkdirAll(c.path("views"), 0o711); err != nil { // somebody may have deleted it
		return err
	}
	if err := os.Mkdir(dir, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.Chmod(dir, mode)
}

// viewOf gives the build's view with every file checked: the one in use, the one of an earlier run, or a new one.
func (c *Cache) viewOf(ctx context.Context, b *index.Build, progress func(string)) (*view, error) {
	c.views.mu.Lock()
	v := c.views.live[b.ID]
	c.views.mu.Unlock()
	if v != nil && c.intact(v) {
		return v, nil
	}
	return c.mendView(ctx, b, progress)
}

// intact compares every file of the view with what it was when its bytes were last checked.
func (c *Cache) intact(v *view) bool {
	if v.gone.Load() {
		return false
	}
	dir := int(v.inner.Fd())
	for i := range v.files {
		f := &v.files[i]
		want, ok := f.stamp, true
		if !f.copied {
			want, ok = c.cas.Stamp(f.digest)
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

// mendView verifies the blobs, and makes a view with a new id unless the existing one turns out to be sound.
func (c *Cache) mendView(ctx context.Context, b *index.Build, progress func(string)) (*view, error) {
	c.views.making.Lock()
	defer c.views.making.Unlock()
	for i := range b.Files {
		if _, ok := c.cas.Stamp(b.Files[i].Digest); !ok {
			progress("verifying")
		}
		if err := c.cas.Verify(ctx, b.Files[i].Digest, nil); err != nil {
			return nil, fmt.Errorf("%s: %w", b.Files[i].Name, err)
		}
	}
	c.views.mu.Lock()
	v := c.views.live[b.ID]
	c.views.mu.Unlock()
	if v == nil {
		v = c.earlierView(b)
	}
	if v != nil {
		if c.intact(v) {
			c.keepView(b.ID, v)
			return v, nil
		}
		c.dropView(b.ID, v, pathGrace)
	}
	v, err := c.makeView(ctx, b)
	if err != nil {
		return nil, err
	}
	if err := c.index.SaveView(b.ID, path.Join(scopeFolder(b.Scope), v.name, v.id)); err != nil {
		c.log.Warn("view not remembered", "error", err) // it is made anew after a restart
	}
	c.keepView(b.ID, v)
	return v, nil
}

func (c *Cache) keepView(id index.BuildID, v *view) {
	c.views.mu.Lock()
	defer c.views.mu.Unlock()
	c.views.live[id] = v
}

// earlierView opens the view that an earlier run made for the build, nil if there is none.
func (c *Cache) earlierView(b *index.Build) *view {
	where, ok := c.index.View(b.ID)
	if !ok {
		return nil
	}
	parts := strings.Split(where, "/")
	if len(parts) != 3 || parts[0] != scopeFolder(b.Scope) {
		return nil
	}
	v := &view{scope: parts[0], name: parts[1], id: parts[2], graph: b.Graph, path: c.path("views", parts[0], parts[1])}
	if err := v.open(); err != nil {
		return nil
	}
	for _, f := range b.Files {
		v.files = append(v.files, viewFile{name: f.Name, digest: f.Digest})
	}
	return v
}

// makeView links the build's files into a new folder. Until the index knows it, a crash leaves a folder that
// nobody refers to, which the next start removes.
func (c *Cache) makeView(ctx context.Context, b *index.Build) (*view, error) {
	v, err := c.newView(b.Scope, b.Graph)
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

// newView makes the folders of a view, still writable.
func (c *Cache) newView(scope, graph string) (*view, error) {
	if err := c.scopeDir(scope); err != nil {
		return nil, err
	}
	v := &view{scope: scopeFolder(scope), name: newID(), id: newID(), graph: graph}
	v.path = c.path("views", v.scope, v.name)
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
	stamp, err := c.cas.Link(ctx, f.Digest, v.inner, f.Name)
	if err != nil {
		return viewFile{}, err
	}
	blob, ok := c.cas.Stamp(f.Digest)
	copied := !ok || blob.Ino != stamp.Ino || blob.Dev != stamp.Dev
	return viewFile{name: f.Name, digest: f.Digest, copied: copied, stamp: stamp}, nil
}

// sealView takes away the right to write, from the inside out.
func (c *Cache) sealView(v *view) error {
	var dirs []string
	err := filepath.WalkDir(v.path, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, p)
		}
		return err
	})
	for i := len(dirs) - 1; i >= 0 && err == nil; i-- {
		err = os.Chmod(dirs[i], 0o555)
	}
	if err != nil {
		c.discardView(v)
	}
	return err
}

// lease opens the view's folder and takes a shared lock on that open folder: it lasts as long as somebody holds
// the descriptor, in whatever process, and survives the daemon.
func (v *view) lease(now time.Time) (*os.File, error) {
	f, err := openFolder(v.path)
	if err != nil {
		return nil, err
	}
	if err := shareLock(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if v.gone.Load() || !v.leadsTo(f) {
		return nil, errors.Join(fs.ErrNotExist, f.Close())
	}
	v.served.Store(now.UnixNano())
	return f, nil
}

// open opens the folder of the files, which is looked through from then on.
func (v *view) open() (err error) {
	if v.inner, err = os.Open(filepath.Join(v.path, v.id)); err != nil {
		return err
	}
	v.at, err = cas.StampOf(v.inner)
	return err
}

// leadsTo tells whether the folder of the files is still in the view, under its name: it was looked through its own
// descriptor so far.
func (v *view) leadsTo(f *os.File) bool {
	there, err := cas.StampAt(int(f.Fd()), v.id)
	if err != nil {
		return false
	}
	return there.Dev == v.at.Dev && there.Ino == v.at.Ino
}

// dropView takes a view out of use. It goes when nobody holds it, and not before the grace is over.
func (c *Cache) dropView(id index.BuildID, v *view, grace time.Duration) {
	v.gone.Store(true)
	c.index.DropView(id)
	c.views.mu.Lock()
	defer c.views.mu.Unlock()
	if c.views.live[id] == v {
		delete(c.views.live, id)
	}
	after := c.now()
	if served := v.served.Load(); served != 0 && grace > 0 {
		after = time.Unix(0, served).Add(grace)
	}
	c.views.doomed[v.scope+"/"+v.name] = &doomed{path: v.path, inner: v.inner, files: v.files, after: after}
}

// doomLater marks a view that is still being given out, but to nobody new.
func (c *Cache) doomLater(v *view) {
	c.views.mu.Lock()
	defer c.views.mu.Unlock()
	c.views.doomed[v.scope+"/"+v.name] = &doomed{path: v.path, inner: v.inner, files: v.files, after: c.now().Add(pathGrace)}
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

// sweepViews removes the doomed views that nobody holds.
func (c *Cache) sweepViews() {
	c.views.mu.Lock()
	todo := make(map[string]*doomed, len(c.views.doomed))
	now := c.now()
	for name, d := range c.views.doomed {
		if !now.Before(d.after) {
			todo[name] = d
		}
	}
	c.views.mu.Unlock()
	for name, d := range todo {
		held, err := leased(d.path)
		if held {
			continue
		}
		if err == nil {
			err = c.removeView(d.path, d.files)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			c.log.Warn("view not removed", "path", d.path, "error", err)
			continue
		}
		if d.inner != nil {
			_ = d.inner.Close() // read-only: nothing can be lost
		}
		c.views.mu.Lock()
		delete(c.views.doomed, name)
		delete(c.views.made, name)
		c.views.mu.Unlock()
	}
}

// leased tells whether somebody holds a descriptor of the view that was sent as a lease.
func leased(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	free, err := tryLock(f)
	return !free && err == nil, errors.Join(err, f.Close())
}

// removeView unlinks the files through the store, which renews the blobs' stamps, and then the folders.
func (c *Cache) removeView(dir string, files []viewFile) error {
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = os.Chmod(p, 0o700)
		}
		return err
	})
	if err != nil {
		return err
	}
	inner, err := filepath.Glob(filepath.Join(dir, "*"))
	if err == nil && len(inner) == 1 && len(files) > 0 {
		if f, err := os.Open(inner[0]); err == nil {
			for _, file := range files {
				if !file.copied {
					_ = c.cas.Unlink(file.digest, f, file.name) // a stamp not renewed costs hashing once
				}
			}
			_ = f.Close() // read-only: nothing can be lost
		}
	}
	return os.RemoveAll(dir)
}

// doomStrangers marks for removal every view on disk that no build refers to and this process did not make.
func (c *Cache) doomStrangers(ctx context.Context) error {
	known := make(map[string]bool)
	err := c.index.Each(ctx, func(b index.Build) error {
		if where, ok := c.index.View(b.ID); ok {
			known[path.Dir(where)] = true
		}
		return nil
	})
	if err != nil {
		return err
	}
	found, err := filepath.Glob(c.path("views", "*", "*"))
	if err != nil {
		return err
	}
	c.views.mu.Lock()
	defer c.views.mu.Unlock()
	for _, p := range found {
		name := path.Join(filepath.Base(filepath.Dir(p)), filepath.Base(p))
		if !known[name] && !c.views.made[name] {
			c.views.doomed[name] = &doomed{path: p}
		}
	}
	return nil
}

func (vs *views) close() {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for _, v := range vs.live {
		_ = v.inner.Close() // read-only: nothing can be lost
	}
}
