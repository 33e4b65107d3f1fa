package runtimes

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
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/filestamp"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/internal/watch"
)

// Content describes a runtime's files as they were at the last check. It is immutable. For
// libraries that the daemon does not run, only Spec and Digests are set, as far as they are known.
type Content struct {
	Spec    compilers.Runtime
	Machine MachineID // the machine at that time
	// ORT is the digest of libonnxruntime. It is not in build keys, because builds do not depend on
	// it.
	ORT     cas.Digest
	Digests map[string]cas.Digest // by EP: digest of all files that identify its library

	// Attached is the value from Options.Attach. It remembers facts about exactly these libraries.
	Attached any

	find  func() (compilers.Runtime, error)
	now   func() MachineID
	files []stampedFile
	dirs  *dirs // the same files, kept open for frequent checks
	// clientDigests has by EP the digests that an application shows if it has equal libraries.
	clientDigests map[string]contents
	// removedLibraries is set when other files have replaced these, so that no worker can load them
	// any more.
	removedLibraries atomic.Bool
	extended         atomic.Bool // a package was installed since
}

// contentWith is Content for a request of these execution providers. If the runtime lacks one, it
// reads the directory again, because a package may have been installed since; eps nil means any.
func contentWith(ctx context.Context, s *Set, rt *Runtime, eps []identity.EP,
	progress func(string)) (*Content, error) {
	rc, err := s.Content(ctx, rt, progress)
	if err != nil || eps != nil && rc.HasAll(eps) {
		return rc, err
	}
	if spec, err := rc.find(); err != nil || reflect.DeepEqual(spec, rc.Spec) {
		return rc, nil
	}
	rc.extended.Store(true)
	return s.Content(ctx, rt, progress)
}

// contents are digests of libraries, by their paths from an EP library's directory.
type contents map[string]cas.Digest

type stampedFile struct {
	path   string
	stamp  cas.Stamp
	digest cas.Digest
}

// onlyNewName reports whether only the ctime differs, as after a new link. The caller still hashes
// the bytes.
func (f *stampedFile) onlyNewName(now cas.Stamp) bool {
	if now.Ctime = f.stamp.Ctime; now != f.stamp {
		return false
	}
	open, err := os.Open(f.path)
	if err != nil {
		return false
	}
	defer open.Close() // opened for reading, so no data can be lost
	if err := filestamp.WriteBack(open); err != nil {
		return false
	}
	d, err := cas.Sum(context.Background(), open, 0, now.Size)
	return err == nil && d == f.digest
}

// filesUnchanged reports whether the files are unchanged after work with the libraries has ended.
// It ignores two harmless changes. The times of a directory may change if all libraries are the
// same, because Python writes files beside them when it first imports a package. A library may get
// another link, from a package manager, if the times of the directories show that no other file was
// in its place in the meantime.
func (rc *Content) filesUnchanged() bool {
	if rc.dirs.unchanged(0) {
		return true
	}
	inPlace := !slices.ContainsFunc(rc.dirs.list, func(f stampedDir) bool {
		s, err := cas.StampPath(f.path)
		return err != nil || s != f.ownStamp
	})
	for _, f := range rc.files {
		s, err := cas.StampPath(f.path)
		if err != nil || s != f.stamp && !(inPlace && f.onlyNewName(s)) {
			return false
		}
	}
	spec, err := rc.find()
	return err == nil && reflect.DeepEqual(spec, rc.Spec)
}

// IsCurrent reports whether all work with the libraries so far used exactly these, on this machine.
// It is false after a change of a driver, because the time of the change is unknown.
func (rc *Content) IsCurrent() bool { return rc.now() == rc.Machine && rc.filesUnchanged() }

func (rc *Content) newest() time.Time {
	var last int64
	for _, f := range rc.dirs.list {
		last = max(last, f.ownStamp.Ctime)
		for _, one := range f.files {
			last = max(last, one.stamp.Ctime)
		}
	}
	return time.Unix(0, last)
}

// SameLibraries reports whether both have libraries with equal bytes on the same machine.
func (rc *Content) SameLibraries(other *Content) bool {
	return rc.Spec.ORTVersion == other.Spec.ORTVersion && rc.ORT == other.ORT &&
		maps.Equal(rc.Digests, other.Digests) && rc.Machine == other.Machine
}

// Library returns the library of an execution provider.
func (rc *Content) Library(ep string) (compilers.EPLibrary, bool) {
	for _, l := range rc.Spec.EPs {
		if l.EP == ep {
			return l, true
		}
	}
	return compilers.EPLibrary{}, false
}

func (s *Set) readContent(ctx context.Context, rt *Runtime) (_ *Content, err error) {
	if err := s.machine.AwaitFirst(ctx); err != nil {
		return nil, err
	}
	find := s.equipped(rt.find)
	spec, err := find()
	if err != nil {
		return nil, err
	}
	s.recallNoticed(rt)
	now := func() MachineID { return rt.machineID(s.machine.ID()) }
	rc := &Content{Spec: spec, find: find, Machine: now(), now: now,
		Digests: make(map[string]cas.Digest), clientDigests: make(map[string]contents),
		Attached: s.options.Attach()}
	paths := []string{spec.ORTLibrary}
	for _, l := range spec.EPs {
		paths = append(paths, l.Files...)
	}
	seen := make(map[string]bool)
	for _, path := range paths {
		if seen[path] {
			continue
		}
		seen[path] = true
		stamp, err := cas.StampPath(path)
		if err != nil {
			return nil, err
		}
		rc.files = append(rc.files, stampedFile{path: path, stamp: stamp})
	}
	if rc.dirs, err = openDirs(rc.files, len(s.All()) <= maxWatched); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			rc.dirs.close()
		}
	}()
	if rc.dirs.watchErr != nil {
		s.log.Debug("each request looks at all libraries", "runtime", rt.Name,
			"reason", watch.Explain(rc.dirs.watchErr))
	}
	if again, err := find(); err != nil || !reflect.DeepEqual(spec, again) {
		// a file was added or removed before its directory was stamped
		return nil, cmp.Or(err, ErrFilesChanging)
	}
	read := make(map[string]cas.Digest, len(rc.files))
	digest := func(path string) (d cas.Digest, err error) {
		d, err = s.digests.file(ctx, path)
		read[path] = d
		return d, err
	}
	if rc.ORT, err = digest(spec.ORTLibrary); err != nil {
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
		rc.Digests[l.EP] = d
		// otherwise the digest covers more files than an application shows
		if l.Tool == "" && !l.Elsewhere {
			rc.clientDigests[l.EP] = shown
		}
	}
	for i := range rc.files {
		rc.files[i].digest = read[rc.files[i].path]
	}
	return rc, nil
}

func (s *Set) equipped(find func() (compilers.Runtime, error)) func() (compilers.Runtime, error) {
	e, ok := s.options.Compiler.(compilers.ToolCompiler)
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

// EPFacts describes the EP libraries of a build.
func (rc *Content) EPFacts(eps []compilers.EP, marks []compilers.Fingerprint) []index.EPFacts {
	out := make([]index.EPFacts, len(eps))
	for i, ep := range eps {
		lib, _ := rc.Library(ep.Name)
		out[i] = index.EPFacts{
			Name: ep.Name, Library: lib.Path, LibraryDigest: rc.Digests[ep.Name],
			Version: marks[i].EPVersion, SDKVersion: marks[i].SDKVersion,
			HardwareArchitecture: marks[i].Hardware(),
			CompatibilityString:  marks[i].CompatibilityString,
			DriverVersion:        marks[i].DriverVersion,
		}
		for _, d := range ep.Devices {
			out[i].Devices = append(out[i].Devices,
				fmt.Sprintf("%s %04x:%04x", d.Type, d.VendorID, d.DeviceID))
		}
	}
	return out
}

// HasEvery reports whether the runtime has the execution providers of the build.
func (rc *Content) HasEvery(b *index.Build) bool {
	return len(b.EPs) > 0 && !slices.ContainsFunc(b.EPs, func(ep index.EPFacts) bool {
		_, has := rc.Library(ep.Name)
		return !has
	})
}

// MadeBuild reports whether the runtime's own libraries made the build.
func (rc *Content) MadeBuild(b *index.Build) bool {
	return !slices.ContainsFunc(b.EPs, func(ep index.EPFacts) bool {
		return rc.Digests[ep.Name] != ep.LibraryDigest
	})
}

// Bounds of the libraries that a client shows for one execution provider.
const (
	maxBeside      = 512
	maxLibraryName = 4096
	maxLibrary     = 8 << 30 // bytes of one file
)

// digests hashes libraries, and remembers the digests of files by their stamps.
type digests struct {
	book    memo.Book
	now     func() time.Time
	mayRead func(ctx context.Context, uid uint32) (leave func(), err error) // Options.ReadShown
}

// LibraryDigest hashes an EP library and the libraries beside it that carry its SDK. Libraries with
// equal digests are equal, at any path.
func LibraryDigest(ctx context.Context, l compilers.EPLibrary) (cas.Digest, error) {
	return libraryDigest(l, func(path string) (cas.Digest, error) { return cas.SumFile(ctx, path) })
}

// libraryDigest hashes the EP library and the libraries beside it that carry its SDK: names
// relative to the library's directory, and contents, sorted by name. fileDigest returns the digest
// of one file.
func libraryDigest(l compilers.EPLibrary,
	fileDigest func(path string) (cas.Digest, error)) (cas.Digest, error) {
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
	return blake3.Sum256(b), nil
}

func (x *digests) file(ctx context.Context, path string) (cas.Digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return cas.Digest{}, err
	}
	defer f.Close()
	return x.open(ctx, 0, f)
}

func (x *digests) open(ctx context.Context, uid uint32, f *os.File) (cas.Digest, error) {
	if d, ok := x.remembered(uid, f); ok {
		return d, nil
	}
	key, believable := memo.FileKey(uid, f)
	before, err := filestamp.Watch([]*os.File{f}, x.now(), believable)
	if err != nil {
		return cas.Digest{}, err
	}
	info, err := f.Stat()
	if err != nil {
		return cas.Digest{}, err
	}
	d, err := cas.Sum(ctx, f, 0, info.Size())
	if err == nil && before.Reliable() && before.Unchanged() == nil {
		// Best effort: without it the file is hashed again after the next start.
		_ = x.book.Save(append([]byte("file:"), key[:]...), d[:])
	}
	return d, err
}

func (x *digests) remembered(uid uint32, f *os.File) (cas.Digest, bool) {
	key, believable := memo.FileKey(uid, f)
	if !believable {
		return cas.Digest{}, false
	}
	raw, ok := x.book.Get(append([]byte("file:"), key[:]...))
	if !ok || len(raw) != 32 {
		return cas.Digest{}, false
	}
	return cas.Digest(raw), true
}

// OwnDigest returns a digest of the client's library of an execution provider and of the libraries
// that the client shows beside it. If it shows none, the digest also covers the library's path and
// stamp, because an equal library elsewhere may have another SDK beside it. The digest never equals
// that of libraries that the daemon runs.
func (s *Set) OwnDigest(ctx context.Context, uid uint32, ref *LibraryRef) (digest cas.Digest,
	library cas.Stamp, err error) {
	all, err := s.digests.contents(ctx, uid, ref)
	if err != nil {
		return digest, library, err
	}
	if library, err = cas.StampOf(ref.File); err != nil {
		return digest, library, clientLibraryError(ctx, err, ref, "")
	}
	b := []byte("own")
	if len(ref.Beside) == 0 && !ref.Complete {
		b = append(memo.AppendStamp(b, library), ref.Path...)
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		d := all[name]
		b = memo.AppendText(b, name)
		b = append(b, d[:]...)
	}
	return blake3.Sum256(b), library, nil
}

func (x *digests) contents(ctx context.Context, uid uint32, ref *LibraryRef) (contents, error) {
	if len(ref.Beside) > maxBeside || len(ref.Path) > maxLibraryName {
		return nil, apierr.New(apierr.BadRequest, nil,
			"library of %s: more than %d libraries beside it, or a path of more than %d bytes",
			ref.EP, maxBeside, maxLibraryName)
	}
	out := make(contents, 1+len(ref.Beside))
	var err error
	if out[""], err = x.clientLibrary(ctx, uid, ref.File); err != nil {
		return nil, clientLibraryError(ctx, err, ref, "")
	}
	for _, name := range slices.Sorted(maps.Keys(ref.Beside)) {
		if name == "" || len(name) > maxLibraryName || ref.Beside[name] == nil {
			return nil, apierr.New(apierr.BadRequest, nil,
				"library of %s: %.80q beside it: not a name", ref.EP, name)
		}
		if out[name], err = x.clientLibrary(ctx, uid, ref.Beside[name]); err != nil {
			return nil, clientLibraryError(ctx, err, ref, name)
		}
	}
	return out, nil
}

// like returns the digests with the same keys as clientDigests: the library's digest is under its
// file name, and files that do not identify the library are left out.
func (shown contents) like(ref *LibraryRef) contents {
	out := make(contents, len(shown))
	for name, d := range shown {
		if name != "" && !compilers.IsForeign(name) {
			out[name] = d
		}
	}
	out[filepath.Base(ref.Path)] = shown[""]
	return out
}

var errReplacedOpen = errors.New("it was replaced after it was opened")

// clientLibrary returns the digest of a library that a client has open, from the memo or by
// hashing. It retries if the stamp changes in the meantime, because a package manager may add or
// remove a link without changing the bytes.
func (x *digests) clientLibrary(ctx context.Context, uid uint32, f *os.File) (cas.Digest, error) {
	for range 2 {
		before, err := cas.StampOf(f)
		if err != nil {
			return cas.Digest{}, err
		}
		if before.Size > maxLibrary {
			return cas.Digest{}, fmt.Errorf("%d bytes, more than %d", before.Size,
				int64(maxLibrary))
		}
		if gone, err := Unlinked(f); gone || err != nil {
			return cas.Digest{}, errors.Join(err, errReplacedOpen)
		}
		d, err := x.read(ctx, uid, f)
		if err != nil {
			return cas.Digest{}, err
		}
		after, err := cas.StampOf(f)
		if err != nil || after == before {
			return d, err
		}
		if after.Size != before.Size || after.Mtime != before.Mtime {
			break
		}
	}
	return cas.Digest{}, errReplacedOpen
}

// read returns the digest of a library, from the memo or by hashing. The file system may never
// answer, so one library of each user is read at a time, in a goroutine of its own.
func (x *digests) read(ctx context.Context, uid uint32, f *os.File) (cas.Digest, error) {
	if d, ok := x.remembered(uid, f); ok {
		return d, nil
	}
	leave, err := x.mayRead(ctx, uid)
	if err != nil {
		return cas.Digest{}, err
	}
	type read struct {
		digest cas.Digest
		err    error
	}
	done := make(chan read, 1)
	go func() {
		defer leave()
		d, err := x.open(ctx, uid, f)
		done <- read{d, err}
	}()
	select {
	case r := <-done:
		return r.digest, r.err
	case <-ctx.Done():
		return cas.Digest{}, ctx.Err()
	}
}

func clientLibraryError(ctx context.Context, err error, ref *LibraryRef, name string) error {
	path := cmp.Or(name, ref.Path)
	switch {
	case ctx.Err() != nil:
		return apierr.FromContext(ctx, "library %q", path)
	case errors.Is(err, errReplacedOpen):
		return replacedError(path)
	}
	return apierr.New(apierr.BadRequest, err, "library %q of %s", path, ref.EP)
}

// Unlinked reports whether the name that a file was opened by is removed, or now names another
// file. The link count does not show that, because package managers link their files into many
// places, and an update removes one of the links.
func Unlinked(f *os.File) (bool, error) {
	path, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
	if err != nil {
		return false, err
	}
	return strings.HasSuffix(path, " (deleted)"), nil
}
