package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// runtime is one libonnxruntime with the EP libraries used with it, as it lies on this machine.
type runtime struct {
	name       string // the directory, or the path of libonnxruntime where it was named one by one
	registered bool   // by the administrator; others were named by a client of the daemon's own user
	find       func() (compilers.Runtime, error)

	mu    sync.Mutex                     // held while the files are looked at anew
	facts atomic.Pointer[runtimeContent] // nil until looked at
}

// runtimeContent is what a runtime's files were when they were last looked at. Nothing but its plans ever changes in it.
type runtimeContent struct {
	spec    compilers.Runtime
	files   []stampedFile
	folders []stampedFolder       // the same files, for looking often
	digests map[string]cas.Digest // by EP: over all files that its library's identity covers

	plans plans // requests thought through for exactly these contents
}

type stampedFile struct {
	path  string
	stamp cas.Stamp
}

// unchanged compares the stamp of every file of the runtime. It is on the path of each hit, so files are looked up
// in folders that are kept open; the folders themselves by path, for one may have been put in another's place.
func (rc *runtimeContent) unchanged() bool {
	for i := range rc.folders {
		if !rc.folders[i].unchanged() {
			return false
		}
	}
	return true
}

// stampedFolder is a folder with files of a runtime. Its own times count too: a library that is added beside the
// others may be one that the EP loads. Its descriptor is closed when the runtime's contents are forgotten.
type stampedFolder struct {
	path   string
	open   *os.File
	own    cas.Stamp
	names  []string
	stamps []cas.Stamp
}

func (f *stampedFolder) unchanged() bool {
	now, err := stampPath(f.path)
	if err != nil || now != f.own {
		return false
	}
	dir := int(f.open.Fd())
	for i := range f.names {
		if s, err := stampThrough(dir, f.names[i]); err != nil || s != f.stamps[i] {
			return false
		}
	}
	return true
}

// byFolder groups the files by the folder they lie in.
func byFolder(files []stampedFile) ([]stampedFolder, error) {
	at := make(map[string]int)
	var out []stampedFolder
	for _, f := range files {
		dir, name := filepath.Split(f.path)
		i, ok := at[dir]
		if !ok {
			open, err := os.Open(dir)
			if err != nil {
				return nil, err
			}
			s, err := cas.StampOf(open)
			if err != nil {
				return nil, errors.Join(err, open.Close())
			}
			i = len(out)
			at[dir] = i
			out = append(out, stampedFolder{path: dir, open: open, own: s})
		}
		out[i].names = append(out[i].names, name)
		out[i].stamps = append(out[i].stamps, f.stamp)
	}
	return out, nil
}

func (rc *runtimeContent) library(ep string) (compilers.EPLibrary, bool) {
	for _, l := range rc.spec.EPs {
		if l.EP == ep {
			return l, true
		}
	}
	return compilers.EPLibrary{}, false
}

// content gives the runtime as it is now, looking again if any of its files changed since.
func (c *Cache) content(ctx context.Context, rt *runtime, progress func(string)) (*runtimeContent, error) {
	if rc := rt.facts.Load(); rc != nil && rc.unchanged() {
		return rc, nil
	}
	progress("probing")
	rt.mu.Lock()
	defer rt.mu.Unlock()
	before := rt.facts.Load()
	if before != nil && before.unchanged() {
		return before, nil
	}
	rc, err := c.look(ctx, rt)
	if err != nil {
		if !rt.registered && ctx.Err() == nil {
			c.runtimes.forget(rt) // a client brought it, and it is gone: who brings it again names it again
		}
		return nil, fail(Unavailable, err, "runtime %q cannot be used", rt.name)
	}
	if before != nil && !before.same(rc) {
		c.log.Info("runtime changed", "runtime", rt.name)
	}
	rt.facts.Store(rc)
	return rc, nil
}

// same reports whether the libraries are, in content, what they were.
func (rc *runtimeContent) same(other *runtimeContent) bool {
	return rc.spec.ORTVersion == other.spec.ORTVersion && maps.Equal(rc.digests, other.digests)
}

// Attempts and pause while a package manager is at work on a runtime's files.
const (
	lookAttempts = 20
	lookPause    = 250 * time.Millisecond
)

var errMoving = errors.New("its files keep changing")

// look identifies the runtime's libraries. Stamps are taken before and after the bytes are hashed; as long as
// they differ, somebody is writing, and what was read is nobody's library.
func (c *Cache) look(ctx context.Context, rt *runtime) (*runtimeContent, error) {
	for attempt := 0; ; attempt++ {
		rc, err := c.lookOnce(ctx, rt)
		if err == nil && rc.unchanged() {
			return rc, nil
		}
		if attempt == lookAttempts {
			return nil, cmp.Or(err, errMoving)
		}
		if err != nil && !errors.Is(err, errMoving) && rt.facts.Load() == nil {
			return nil, err // never seen whole: no reason to wait for it to come back
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(lookPause):
		}
	}
}

func (c *Cache) lookOnce(ctx context.Context, rt *runtime) (*runtimeContent, error) {
	spec, err := rt.find()
	if err != nil {
		return nil, err
	}
	rc := &runtimeContent{spec: spec, digests: make(map[string]cas.Digest)}
	seen := make(map[string]bool)
	add := func(path string) error {
		if seen[path] {
			return nil
		}
		seen[path] = true
		s, err := stampPath(path)
		if err != nil {
			return err
		}
		rc.files = append(rc.files, stampedFile{path, s})
		return nil
	}
	if err := add(spec.ORTLibrary); err != nil {
		return nil, err
	}
	for _, l := range spec.EPs {
		for _, path := range l.Files {
			if err := add(path); err != nil {
				return nil, err
			}
		}
	}
	if rc.folders, err = byFolder(rc.files); err != nil {
		return nil, err
	}
	if again, err := rt.find(); err != nil || !reflect.DeepEqual(spec, again) {
		return nil, cmp.Or(err, errMoving) // something came or went before its folder was stamped
	}
	for _, l := range spec.EPs {
		d, err := c.libraryDigest(ctx, l)
		if err != nil {
			return nil, fmt.Errorf("execution provider %s: %w", l.EP, err)
		}
		rc.digests[l.EP] = d
	}
	return rc, nil
}

// libraryDigest covers the EP library and the libraries beside it that carry its SDK: names relative to the
// library's folder and contents, in the order of the names.
func (c *Cache) libraryDigest(ctx context.Context, l compilers.EPLibrary) (cas.Digest, error) {
	var b []byte
	files := slices.Clone(l.Files)
	slices.Sort(files)
	for _, path := range files {
		d, err := c.fileDigest(ctx, path)
		if err != nil {
			return cas.Digest{}, err
		}
		name, err := filepath.Rel(filepath.Dir(l.Path), path)
		if err != nil {
			name = filepath.Base(path)
		}
		b = append(appendInt(b, uint64(len(name))), name...)
		b = append(b, d[:]...)
	}
	return cas.Digest(digestOf(b)), nil
}

// fileDigest hashes one library file, or remembers it by its stamp.
func (c *Cache) fileDigest(ctx context.Context, path string) (cas.Digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return cas.Digest{}, err
	}
	defer f.Close()
	key, believable := memoKey(0, f)
	if believable {
		if raw, ok := c.index.Memo(append([]byte("file:"), key[:]...)); ok && len(raw) == 32 {
			return cas.Digest(raw), nil
		}
	}
	w := witness{began: c.now()}
	if err := settle(f); err != nil {
		return cas.Digest{}, &os.PathError{Op: "fdatasync", Path: path, Err: err}
	}
	before, err := cas.StampOf(f)
	if err != nil {
		return cas.Digest{}, err
	}
	d, err := cas.Sum(ctx, f, 0, before.Size)
	if err != nil {
		return cas.Digest{}, err
	}
	after, err := cas.StampOf(f)
	if err != nil {
		return cas.Digest{}, err
	}
	w.stamps = []cas.Stamp{after}
	if believable && before == after && w.old() {
		// Not saved costs another hashing at the next start, nothing else.
		_ = c.index.SaveMemo(append([]byte("file:"), key[:]...), d[:])
	}
	return d, nil
}

// runtimes is the register: what the administrator named, in order, and what own clients brought.
type runtimes struct {
	mu   sync.Mutex
	list []*runtime // registered ones first; guarded by mu
}

// maxNamedRuntimes bounds what clients can bring; the oldest goes first.
const maxNamedRuntimes = 64

func directoryRuntime(dir string, registered bool) *runtime {
	return &runtime{name: dir, registered: registered, find: func() (compilers.Runtime, error) { return compilers.Find(dir) }}
}

// explicitRuntime is a runtime that was given library by library.
func explicitRuntime(spec compilers.Runtime, registered bool) *runtime {
	return &runtime{name: spec.ORTLibrary, registered: registered, find: func() (compilers.Runtime, error) {
		return compilers.Complete(spec)
	}}
}

func (rs *runtimes) all() []*runtime {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return slices.Clone(rs.list)
}

func (rs *runtimes) forget(rt *runtime) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.list = slices.DeleteFunc(rs.list, func(old *runtime) bool { return old == rt })
}

func (rs *runtimes) add(rt *runtime, same func(*runtime) bool) *runtime {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	for _, old := range rs.list {
		if same(old) {
			return old
		}
	}
	named := 0
	for _, old := range rs.list {
		if !old.registered {
			named++
		}
	}
	if named >= maxNamedRuntimes {
		i := slices.IndexFunc(rs.list, func(old *runtime) bool { return !old.registered })
		rs.list = slices.Delete(rs.list, i, i+1)
	}
	rs.list = append(rs.list, rt)
	return rt
}

// epFacts describes the EP libraries of a build.
func (rc *runtimeContent) epFacts(eps []compilers.EP, marks []compilers.Fingerprint) []index.EPFacts {
	out := make([]index.EPFacts, len(eps))
	for i, ep := range eps {
		lib, _ := rc.library(ep.Name)
		out[i] = index.EPFacts{
			Name: ep.Name, Library: lib.Path, LibraryDigest: rc.digests[ep.Name],
			Version: marks[i].EPVersion, SDKVersion: marks[i].SDKVersion,
			HardwareArchitecture: marks[i].HardwareArchitecture,
			CompatibilityString:  marks[i].CompatibilityString,
			DriverVersion:        marks[i].DriverVersion,
		}
		for _, d := range ep.Devices {
			out[i].Devices = append(out[i].Devices, fmt.Sprintf("%s %04x:%04x", d.Type, d.VendorID, d.DeviceID))
		}
	}
	return out
}
