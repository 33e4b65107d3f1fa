package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

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

	unpacked bool // of the blob's unpacked form
}

// views are the views that are in use, and those to be taken away.
type views struct {
	mu       sync.Mutex
	live     map[index.BuildID]*view // guarded by mu
	made     map[string]bool         // "<scope>/<view>" of every view that this process made; guarded by mu
	doomed   map[string]*doomed      // by "<scope>/<view>"; guarded by mu
	answered map[index.BuildID]bool  // whose unkept view is there still; guarded by mu
	making   sync.Mutex              // one view is made at a time
}

func (c *Cache) openViews() error {
	c.views.live = make(map[index.BuildID]*view)
	c.views.made = make(map[string]bool)
	c.views.doomed = make(map[string]*doomed)
	c.views.answered = make(map[index.BuildID]bool)
	return c.scopeDir(c.path("views"), "shared")
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
		switch {
		case f.copied:
		case f.unpacked:
			want, ok = c.forms.CopyStamp(f.digest)
		default:
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

// mendView verifies the blobs, unpacks those that are packed, and makes a view with a new id unless the existing one turns
// out to be sound.
func (c *Cache) mendView(ctx context.Context, b *index.Build, progress func(string)) (*view, error) {
	for attempt := 1; ; attempt++ {
		if err := c.unpackAll(ctx, b, progress); err != nil {
			return nil, err
		}
		v, err := c.mendUnpacked(ctx, b, progress)
		if !errors.Is(err, cas.ErrNotFound) || attempt == mendAttempts || !c.anyPacked(b) {
			return v, err
		}
		// It was packed just now, or what was unpacked is gone already.
	}
}

// mendAttempts bounds how often a view is begun anew because a form of one of its blobs went meanwhile.
const mendAttempts = 3

// mendUnpacked is mendView for a build whose packed files have their unpacked form.
func (c *Cache) mendUnpacked(ctx context.Context, b *index.Build, progress func(string)) (*view, error) {
	c.views.making.Lock()
	defer c.views.making.Unlock()
	for i := range b.Files {
		if c.forms.OnlyPacked(b.Files[i].Digest) {
			continue
		}
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
	if err := c.index.SaveView(b.ID, c.savedPath(v)); err != nil {
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
	where, apart := strings.CutPrefix(where, viewsApart)
	parts := strings.Split(where, "/")
	if _, elsewhere := c.forms.Folder(); len(parts) != 3 || parts[0] != scopeFolder(b.Scope) || apart != (elsewhere && c.anyPacked(b)) {
		return nil
	}
	v := &view{scope: parts[0], name: parts[1], id: parts[2], graph: b.Graph, path: filepath.Join(c.viewsFolder(apart), parts[0], parts[1])}
	if err := v.open(); err != nil {
		return nil
	}
	for _, f := range b.Files {
		v.files = append(v.files, viewFile{name: f.Name, digest: f.Digest, unpacked: c.forms.OnlyPacked(f.Digest)})
	}
	return v
}

// viewsApart marks, in what the index keeps, a view that lies beside the unpacked forms.
const viewsApart = "unpacked:"

func (c *Cache) savedPath(v *view) string {
	where := path.Join(v.scope, v.name, v.id)
	if filepath.Dir(filepath.Dir(v.path)) != c.path("views") {
		return viewsApart + where
	}
	return where
}

// lease opens the view's folder and takes a shared lock on that open folder: it lasts as long as somebody holds
// the descriptor, in whatever process, and survives the daemon.
func (v *view) lease() (*os.File, error) {
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
	return f, nil
}

// pathTold notes that a client was told a view's path, which does not hold on to the descriptor: the view stays for a while.
func (c *Cache) pathTold(v *view) {
	now := c.now()
	v.served.Store(now.UnixNano())
	c.views.mu.Lock()
	defer c.views.mu.Unlock()
	d := c.views.doomed[v.scope+"/"+v.name]
	if d != nil && v.scope == unkept {
		d.after = now.Add(handOver) // there was no room for it: it may be there for who loads it now, and in no count for longer
	} else if d != nil {
		d.after = now.Add(pathGrace)
	}
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
