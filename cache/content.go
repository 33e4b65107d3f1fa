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
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/internal/witness"
)

// runtimeContent is what a runtime's files were when they were last looked at. Nothing but its plans ever changes in it.
type runtimeContent struct {
	spec    compilers.Runtime
	find    func() (compilers.Runtime, error)
	machine runtimes.MachineID // that it was looked at on
	now     func() runtimes.MachineID
	files   []stampedFile
	folders []stampedFolder       // the same files, for looking often
	ort     cas.Digest            // of libonnxruntime; in no build key, for builds do not depend on it
	digests map[string]cas.Digest // by EP: over all files that its library's identity covers
	// by EP: what an application shows that has a library of this content
	shown map[string]contents
	past  atomic.Bool // other files are in its place: nothing can be run with it any more

	plans  plans  // requests thought through for exactly these contents
	judged judged // what is known of builds that others made
}

// contents are digests of libraries, by their paths from an EP library's folder.
type contents map[string]cas.Digest

type stampedFile struct {
	path   string
	stamp  cas.Stamp
	digest cas.Digest
}

// linkedElsewhere reports whether the file has other names now and is the same in all else. This
// changes its ctime, as a store with the mtime set back does, so its bytes are hashed again.
func (f *stampedFile) linkedElsewhere(now cas.Stamp) bool {
	if now.Ctime = f.stamp.Ctime; now != f.stamp {
		return false
	}
	open, err := os.Open(f.path)
	if err != nil {
		return false
	}
	defer open.Close() // read only
	if err := witness.Settle(open); err != nil {
		return false
	}
	d, err := cas.Sum(context.Background(), open, 0, now.Size)
	return err == nil && d == f.digest
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
	now, err := cas.StampPath(f.path)
	if err != nil || now != f.own {
		return false
	}
	dir := int(f.open.Fd())
	for i := range f.names {
		if s, err := cas.StampThrough(dir, f.names[i]); err != nil || s != f.stamps[i] {
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

// intact is unchanged for who has worked with the libraries: that a folder's times moved is nothing as long as every
// library is there as it was, and no other. Python writes its own files beside them when it first imports a package.
// Nor does it matter that a package manager links a library into another environment, where the times of the folders
// show that no other file was in a library's place meanwhile.
func (rc *runtimeContent) intact() bool {
	if rc.unchanged() {
		return true
	}
	inPlace := !slices.ContainsFunc(rc.folders, func(f stampedFolder) bool {
		s, err := cas.StampPath(f.path)
		return err != nil || s != f.own
	})
	for _, f := range rc.files {
		s, err := cas.StampPath(f.path)
		if err != nil || s != f.stamp && !(inPlace && f.linkedElsewhere(s)) {
			return false
		}
	}
	spec, err := rc.find()
	return err == nil && reflect.DeepEqual(spec, rc.spec)
}

// stands tells who has worked with the libraries whether it was with these alone, and on this machine: a driver that
// is another by now may have been another before.
func (rc *runtimeContent) stands() bool { return rc.now() == rc.machine && rc.intact() }

// newest is the last time at which any of the files or their folders changed.
func (rc *runtimeContent) newest() time.Time {
	var last int64
	for _, f := range rc.folders {
		last = max(last, f.own.Ctime)
		for _, s := range f.stamps {
			last = max(last, s.Ctime)
		}
	}
	return time.Unix(0, last)
}

// same reports whether the libraries are, in content, what they were, on the same machine.
func (rc *runtimeContent) same(other *runtimeContent) bool {
	return rc.spec.ORTVersion == other.spec.ORTVersion && rc.ort == other.ort && maps.Equal(rc.digests, other.digests) && rc.machine == other.machine
}

func (rc *runtimeContent) library(ep string) (compilers.EPLibrary, bool) {
	for _, l := range rc.spec.EPs {
		if l.EP == ep {
			return l, true
		}
	}
	return compilers.EPLibrary{}, false
}

func (c *Cache) lookOnce(ctx context.Context, rt *runtime) (*runtimeContent, error) {
	find := c.equipped(rt.find)
	spec, err := find()
	if err != nil {
		return nil, err
	}
	c.recallNoticed(rt)
	now := func() runtimes.MachineID { return rt.on(c.machine.Now()) }
	rc := &runtimeContent{spec: spec, find: find, machine: now(), now: now,
		digests: make(map[string]cas.Digest), shown: make(map[string]contents)}
	seen := make(map[string]bool)
	add := func(path string) error {
		if seen[path] {
			return nil
		}
		seen[path] = true
		s, err := cas.StampPath(path)
		if err != nil {
			return err
		}
		rc.files = append(rc.files, stampedFile{path: path, stamp: s})
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
	if again, err := find(); err != nil || !reflect.DeepEqual(spec, again) {
		return nil, cmp.Or(err, errMoving) // something came or went before its folder was stamped
	}
	read := make(map[string]cas.Digest, len(rc.files))
	digest := func(path string) (d cas.Digest, err error) {
		d, err = c.fileDigest(ctx, path)
		read[path] = d
		return d, err
	}
	if rc.ort, err = digest(spec.ORTLibrary); err != nil {
		return nil, err
	}
	for _, l := range spec.EPs {
		shown := make(contents)
		d, err := libraryDigest(l, func(path string) (cas.Digest, error) {
			d, err := digest(path)
			if name, relative := filepath.Rel(filepath.Dir(l.Path), path); relative == nil {
				shown[name] = d
			}
			return d, err
		})
		if err != nil {
			return nil, fmt.Errorf("execution provider %s: %w", l.EP, err)
		}
		rc.digests[l.EP] = d
		if l.Tool == "" && !l.Elsewhere { // else more counts than an application shows
			rc.shown[l.EP] = shown
		}
	}
	for i := range rc.files {
		rc.files[i].digest = read[rc.files[i].path]
	}
	return rc, nil
}

// equipped adds the tools that compile in the place of libraries.
func (c *Cache) equipped(find func() (compilers.Runtime, error)) func() (compilers.Runtime, error) {
	e, ok := c.compiler.(compilers.Equipped)
	if !ok {
		return find
	}
	return func() (compilers.Runtime, error) {
		r, err := find()
		if err != nil {
			return r, err
		}
		return e.Equip(r), nil
	}
}

// libraryDigest covers the EP library and the libraries beside it that carry its SDK: names relative to the
// library's folder and contents, in the order of the names. fileDigest gives a file's.
func libraryDigest(l compilers.EPLibrary, fileDigest func(path string) (cas.Digest, error)) (cas.Digest, error) {
	var b []byte
	files := slices.Clone(l.Files)
	slices.Sort(files)
	for _, path := range files {
		d, err := fileDigest(path)
		if err != nil {
			return cas.Digest{}, err
		}
		name, err := filepath.Rel(filepath.Dir(l.Path), path)
		if err != nil {
			name = filepath.Base(path)
		}
		b = memo.AppendText(b, name)
		b = append(b, d[:]...)
	}
	if l.Tool != "" {
		b = append(b, "tool "+l.Tool...)
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
	return c.openDigest(ctx, 0, f)
}

// openDigest hashes an open file, or remembers it by its stamp for the user whose it is.
func (c *Cache) openDigest(ctx context.Context, uid uint32, f *os.File) (cas.Digest, error) {
	if d, ok := c.memoDigest(uid, f); ok {
		return d, nil
	}
	key, believable := memo.FileKey(uid, f)
	before, err := witness.Watch([]*os.File{f}, c.now(), believable)
	if err != nil {
		return cas.Digest{}, err
	}
	info, err := f.Stat()
	if err != nil {
		return cas.Digest{}, err
	}
	d, err := cas.Sum(ctx, f, 0, info.Size())
	if err == nil && before.Believed() && before.Unchanged() == nil {
		// Not saved costs another hashing at the next start, nothing else.
		_ = c.index.Memos.Save(append([]byte("file:"), key[:]...), d[:])
	}
	return d, err
}

// memoDigest gives the digest of an open file that is remembered by its stamp.
func (c *Cache) memoDigest(uid uint32, f *os.File) (cas.Digest, bool) {
	key, believable := memo.FileKey(uid, f)
	if !believable {
		return cas.Digest{}, false
	}
	raw, ok := c.index.Memos.Get(append([]byte("file:"), key[:]...))
	if !ok || len(raw) != 32 {
		return cas.Digest{}, false
	}
	return cas.Digest(raw), true
}

// epFacts describes the EP libraries of a build.
func (rc *runtimeContent) epFacts(eps []compilers.EP, marks []compilers.Fingerprint) []index.EPFacts {
	out := make([]index.EPFacts, len(eps))
	for i, ep := range eps {
		lib, _ := rc.library(ep.Name)
		out[i] = index.EPFacts{
			Name: ep.Name, Library: lib.Path, LibraryDigest: rc.digests[ep.Name],
			Version: marks[i].EPVersion, SDKVersion: marks[i].SDKVersion,
			HardwareArchitecture: marks[i].Hardware(),
			CompatibilityString:  marks[i].CompatibilityString,
			DriverVersion:        marks[i].DriverVersion,
		}
		for _, d := range ep.Devices {
			out[i].Devices = append(out[i].Devices, fmt.Sprintf("%s %04x:%04x", d.Type, d.VendorID, d.DeviceID))
		}
	}
	return out
}
