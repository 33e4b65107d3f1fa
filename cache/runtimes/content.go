package runtimes

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/witness"
)

// Content is what a runtime's files were when they were last looked at. It does not change. Libraries
// that are not looked at have one with Spec and Digests alone, as far as these are known.
type Content struct {
	Spec    compilers.Runtime
	Machine MachineID             // that it was looked at on
	ORT     cas.Digest            // of libonnxruntime; in no build key, because builds do not depend on it
	Digests map[string]cas.Digest // by EP: over all files that its library's identity covers

	// Attached is what Options.Attach made: what is remembered of exactly these libraries. It is
	// forgotten with them.
	Attached any

	find    func() (compilers.Runtime, error)
	now     func() MachineID
	files   []stampedFile
	folders *folders // the same files, for looking often
	// by EP: what an application shows that has a library of this content
	shown map[string]contents
	past  atomic.Bool // other files are in its place: nothing can be run with it any more
}

// contents are digests of libraries, by their paths from an EP library's folder.
type contents map[string]cas.Digest

type stampedFile struct {
	path   string
	stamp  cas.Stamp
	digest cas.Digest
}

// linkedElsewhere: all but the ctime is the same, as with a new name. The bytes are hashed, though.
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

// intact is unchanged for work with the libraries that has ended. Other times of a directory do not matter
// if every library is there as it was, and no other: Python writes its own files beside them when it first
// imports a package. Nor does it matter that a package manager links a library into another environment,
// if the times of the directories show that no other file was in a library's place meanwhile.
func (rc *Content) intact() bool {
	if rc.folders.unchanged() {
		return true
	}
	inPlace := !slices.ContainsFunc(rc.folders.list, func(f stampedFolder) bool {
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
	return err == nil && reflect.DeepEqual(spec, rc.Spec)
}

// Stands reports whether work with the libraries until now was with these alone, and on this machine. A
// driver that is another one by now may have been another one before.
func (rc *Content) Stands() bool { return rc.now() == rc.Machine && rc.intact() }

func (rc *Content) newest() time.Time {
	var last int64
	for _, f := range rc.folders.list {
		last = max(last, f.own.Ctime)
		for _, s := range f.stamps {
			last = max(last, s.Ctime)
		}
	}
	return time.Unix(0, last)
}

// Same reports whether the libraries are, in content, what they were, on the same machine.
func (rc *Content) Same(other *Content) bool {
	return rc.Spec.ORTVersion == other.Spec.ORTVersion && rc.ORT == other.ORT && maps.Equal(rc.Digests, other.Digests) && rc.Machine == other.Machine
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

func (s *Set) lookOnce(ctx context.Context, rt *Runtime) (_ *Content, err error) {
	if err := s.machine.Await(ctx); err != nil {
		return nil, err
	}
	find := s.equipped(rt.find)
	spec, err := find()
	if err != nil {
		return nil, err
	}
	s.recallNoticed(rt)
	now := func() MachineID { return rt.on(s.machine.Now()) }
	rc := &Content{Spec: spec, find: find, Machine: now(), now: now,
		Digests: make(map[string]cas.Digest), shown: make(map[string]contents),
		Attached: s.options.Attach()}
	seen := make(map[string]bool)
	add := func(path string) error {
		if seen[path] {
			return nil
		}
		seen[path] = true
		stamp, err := cas.StampPath(path)
		if err != nil {
			return err
		}
		rc.files = append(rc.files, stampedFile{path: path, stamp: stamp})
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
	if rc.folders, err = openFolders(rc.files); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			rc.folders.close()
		}
	}()
	if again, err := find(); err != nil || !reflect.DeepEqual(spec, again) {
		return nil, cmp.Or(err, ErrMoving) // something came or went before its folder was stamped
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
		if l.Tool == "" && !l.Elsewhere { // else more counts than an application shows
			rc.shown[l.EP] = shown
		}
	}
	for i := range rc.files {
		rc.files[i].digest = read[rc.files[i].path]
	}
	return rc, nil
}

func (s *Set) equipped(find func() (compilers.Runtime, error)) func() (compilers.Runtime, error) {
	e, ok := s.options.Compiler.(compilers.Equipped)
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
			out[i].Devices = append(out[i].Devices, fmt.Sprintf("%s %04x:%04x", d.Type, d.VendorID, d.DeviceID))
		}
	}
	return out
}

// HasEvery reports whether the runtime has the execution providers of the build.
func (rc *Content) HasEvery(b *index.Build) bool {
	for i := range b.EPs {
		if _, ok := rc.Library(b.EPs[i].Name); !ok {
			return false
		}
	}
	return len(b.EPs) > 0
}

// Made reports whether the runtime's own libraries made the build.
func (rc *Content) Made(b *index.Build) bool {
	for i := range b.EPs {
		if rc.Digests[b.EPs[i].Name] != b.EPs[i].LibraryDigest {
			return false
		}
	}
	return true
}
