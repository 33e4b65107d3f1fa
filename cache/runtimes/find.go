package runtimes

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/suggest"
)

// Wanted describes the runtime that a request needs.
type Wanted struct {
	Ref
	EPs       []identity.EP // which the runtime must have
	UID       uint32        // of the client
	StrictORT bool          // ONNX Runtime must have the version ORTVersion
	MayClaim  bool          // the client may compile with its own libraries instead
}

// Ref names the libraries that the caller will load the model with. The zero value means the
// default runtime.
type Ref struct {
	Directory   string
	ORTVersion  string
	ORTLibrary  string
	EPLibraries []LibraryRef
}

// LibraryRef names one execution provider's library as the caller sees it. File may be nil.
type LibraryRef struct {
	EP, Path string
	File     *os.File
	// Beside has other libraries that carry its SDK, by path relative to its directory.
	Beside   map[string]*os.File
	Complete bool // Beside has all files that compilers.LibrariesBeside lists
}

// Library returns the reference to an execution provider's library, nil if there is none.
func (ref *Ref) Library(ep string) *LibraryRef {
	for i := range ref.EPLibraries {
		if ref.EPLibraries[i].EP == ep {
			return &ref.EPLibraries[i]
		}
	}
	return nil
}

// Resolve finds the runtime that the request means, and checks its files. A client of the daemon's
// own user may name a runtime that the set does not have yet. It fails with class Unavailable if
// there is none.
func (s *Set) Resolve(ctx context.Context, w *Wanted, progress func(string)) (*Runtime,
	*Content, error) {
	switch {
	case w.Directory != "":
		return s.resolveDirectory(ctx, w, progress)
	case len(w.EPLibraries) > 0:
		return s.resolveLibraries(ctx, w, progress)
	}
	return s.resolveDefault(ctx, w, progress)
}

// Generation changes with the runtimes of the set and their contents.
func (s *Set) Generation() uint64 { return s.generation.Load() }

// StaysResolved reports whether Resolve, which has found a runtime with these contents, finds it
// again for an equal request with unchanged files, for as long as the generation is the same and
// IsStill holds.
func (s *Set) StaysResolved(w *Wanted, rt *Runtime, rc *Content) bool {
	switch {
	case w.Directory != "":
		return w.Directory == rt.Name // otherwise a link may lead elsewhere
	case len(w.EPLibraries) > 0:
		return !slices.ContainsFunc(w.EPLibraries, func(ref LibraryRef) bool {
			lib, ok := rc.Library(ref.EP)
			return ref.File == nil && !(ok && lib.Path == ref.Path)
		})
	}
	all := s.All()
	return len(all) > 0 && all[0] == rt // one before it may have changed since
}

// IsStill reports whether the libraries and the machine are unchanged, as Resolve does.
func (rc *Content) IsStill() bool { return rc.isCurrent(recently) }

func (s *Set) resolveDefault(ctx context.Context, w *Wanted, progress func(string)) (*Runtime,
	*Content, error) {
	var have, later []string
	var last error
	var found *Runtime
	var content *Content
	for _, rt := range s.All() {
		if !rt.Registered {
			continue
		}
		rc, err := contentWith(ctx, s, rt, w.EPs, progress)
		if err != nil {
			last = err
			continue
		}
		all := rc.HasAll(w.EPs)
		switch {
		case all && (w.ORTVersion == "" || w.ORTVersion == rc.Spec.ORTVersion):
			return rt, rc, nil
		case all && !w.StrictORT && !w.loadsGraphsOf(rc):
			later = append(later, rc.Spec.ORTVersion)
		case all && !w.StrictORT && found == nil:
			found, content = rt, rc
		}
		have = append(have, rc.providers()...)
	}
	if found != nil {
		return found, content, nil
	}
	if len(later) > 0 {
		return nil, nil, laterError(w, later...)
	}
	if last != nil && len(have) == 0 {
		return nil, nil, last
	}
	return nil, nil, NoRuntimeError(w.EPs, have)
}

// NoRuntimeError is the error for EPs that no runtime has all of. have lists the EPs of all
// runtimes.
func NoRuntimeError(eps []identity.EP, have []string) error {
	var all, names []string
	for _, ep := range eps {
		all = append(all, ep.Name)
		if !slices.Contains(have, ep.Name) {
			names = append(names, ep.Name)
		}
	}
	if len(names) == 0 { // each EP is in some runtime, but no runtime has all
		return apierr.New(apierr.Unavailable, nil, "no registered runtime has all of %s",
			strings.Join(all, ", "))
	}
	slices.Sort(have)
	have = slices.Compact(have)
	e := apierr.New(apierr.Unavailable, nil, "no registered runtime has execution provider %s",
		strings.Join(names, ", "))
	if len(have) == 0 {
		return e.WithHint("name the runtime that it will be loaded with (epcachectl: --runtime " +
			"DIR), or start epcached with --runtime DIR, a directory made by: pip install " +
			"--no-deps --target DIR onnxruntime onnxruntime-ep-openvino")
	}
	meant := ""
	if near := suggest.Closest(names[0], slices.Values(have)); near != "" {
		meant = "did you mean " + near + "? "
	}
	return e.WithHint("%sthe registered runtimes have %s; epcachectl probe shows them", meant,
		strings.Join(have, ", "))
}

func (rc *Content) providers() (names []string) {
	for _, l := range rc.Spec.EPs {
		names = append(names, l.EP)
	}
	return names
}

// HasAll reports whether the runtime has all of the execution providers.
func (rc *Content) HasAll(eps []identity.EP) bool {
	for _, ep := range eps {
		if _, ok := rc.Library(ep.Name); !ok {
			return false
		}
	}
	return true
}

func (s *Set) resolveDirectory(ctx context.Context, w *Wanted, progress func(string)) (*Runtime,
	*Content, error) {
	dir := filepath.Clean(w.Directory)
	if !filepath.IsAbs(dir) {
		return nil, nil, apierr.New(apierr.BadRequest, nil,
			"runtime directory %q is not an absolute path", w.Directory)
	}
	own := s.mayName(w)
	same := func(rt *Runtime) bool { return rt.Name == dir || own && sameFile(rt.Name, dir) }
	var found *Runtime
	all := s.All()
	if i := slices.IndexFunc(all, same); i >= 0 {
		found = all[i]
	} else {
		if !own {
			if rt, rc, err := s.equalRuntime(ctx, w, progress); rc != nil || err != nil {
				return rt, rc, err
			}
			return nil, nil, s.notOwnError(w, dir)
		}
		if _, err := compilers.Find(dir); err != nil {
			return nil, nil, &apierr.Error{Class: apierr.Unavailable, Text: err.Error(), Err: err}
		}
		found = s.addNamed(directoryRuntime(dir, false), same)
	}
	rc, err := contentWith(ctx, s, found, w.EPs, progress)
	if err != nil {
		return nil, nil, err
	}
	switch {
	case !rc.HasAll(w.EPs):
		return nil, nil, NoRuntimeError(w.EPs, rc.providers())
	case w.ORTVersion != "" && !w.loadsGraphsOf(rc):
		return nil, nil, laterError(w, rc.Spec.ORTVersion)
	}
	return found, rc, nil
}

// mayName reports whether the client may name libraries: only the daemon's own user may, because
// they run as that user.
func (s *Set) mayName(w *Wanted) bool { return w.UID == s.options.UID }

// FactAlternatives is the fact of an error that lists what the client can do instead, separated by
// spaces, the best first.
const (
	FactAlternatives = "instead"
	AlternativeShow  = "show" // repeat the request with all libraries beside those of the EPs
	// AlternativeClaim: repeat the request with on_miss claim, and compile with the client's own
	// libraries.
	AlternativeClaim = "claim"
	AlternativeOwn   = "own" // ask the user's own daemon, which may run the user's libraries
)

func (s *Set) notOwnError(w *Wanted, what string) error {
	var instead []string
	if !w.ShowsLibraries() {
		instead = append(instead, AlternativeShow)
	}
	if w.MayClaim {
		instead = append(instead, AlternativeClaim)
	}
	at := len(instead)
	if !slices.ContainsFunc(s.All(), func(rt *Runtime) bool { return rt.Registered }) {
		at = 0 // the user's own daemon first, because this one cannot compile for the user
	}
	instead = slices.Insert(instead, at, AlternativeOwn)
	return apierr.New(apierr.Unavailable, nil,
		"runtime %q is not registered with this daemon, nor one with equal libraries", what).
		WithFact(FactAlternatives, strings.Join(instead, " ")).
		WithHint("the daemon runs as another user and loads only registered runtimes: --runtime " +
			"DIR, or [[runtime]] in its configuration")
}

// ShowsLibraries reports whether the caller sent descriptors of all libraries of all EPs, and not
// only paths.
func (w *Wanted) ShowsLibraries() bool {
	for _, ep := range w.EPs {
		if ref := w.Library(ep.Name); ref == nil || ref.File == nil || !ref.Complete {
			return false
		}
	}
	return len(w.EPs) > 0
}

// resolveLibraries finds a runtime that has the files that the caller will load as EP libraries, or
// files of the same content in another place. Libraries beside an EP library carry its SDK, so
// their content counts too.
func (s *Set) resolveLibraries(ctx context.Context, w *Wanted, progress func(string)) (*Runtime,
	*Content, error) {
	likely, unknown := s.candidates(w)
	for _, rt := range likely {
		if rc, err := s.contentIfCarrying(ctx, rt, w, progress); rc != nil || err != nil {
			return rt, rc, err
		}
	}
	for _, rt := range unknown {
		if rc := rt.LastContent(); rc != nil && rc.isCurrent(0) {
			continue // unchanged, and without the caller's libraries
		}
		if rc, err := s.contentIfCarrying(ctx, rt, w, progress); rc != nil || err != nil {
			return rt, rc, err
		}
	}
	if path := s.ReplacedPath(w); path != "" {
		return nil, nil, replacedError(path)
	}
	if rt, rc, err := s.equalRuntime(ctx, w, progress); rc != nil || err != nil {
		return rt, rc, err
	}
	if !s.mayName(w) {
		return nil, nil, s.notOwnError(w, w.EPLibraries[0].Path)
	}
	if w.ORTLibrary == "" {
		return nil, nil, apierr.New(apierr.Unavailable, nil,
			"runtime of %q: the application names no libonnxruntime, which a compile needs",
			w.EPLibraries[0].Path).
			WithHint("put libonnxruntime.so.VERSION beside the other files of onnxruntime/capi, " +
				"or register a runtime with this library: epcached --runtime DIR")
	}
	return s.nameLibraries(ctx, w, progress)
}

// equalRuntime finds a runtime with libraries equal to those that the caller shows, and with an
// ONNX Runtime whose graphs the caller's loads, preferring the caller's version; nil if there is
// none. A client of the daemon's own user names its libraries by path instead.
func (s *Set) equalRuntime(ctx context.Context, w *Wanted,
	progress func(string)) (*Runtime, *Content, error) {
	if s.mayName(w) || !w.ShowsLibraries() {
		return nil, nil, nil
	}
	shown := make(map[string]contents)
	for _, ep := range w.EPs {
		ref := w.Library(ep.Name)
		all, err := s.digests.contents(ctx, w.UID, ref)
		if err != nil {
			return nil, nil, err
		}
		shown[ep.Name] = all.like(ref)
	}
	var found *Runtime
	var content *Content
	for _, rt := range s.All() {
		rc, err := s.Content(ctx, rt, progress)
		if err != nil || !rc.equals(shown) {
			continue // try the next runtime; probe reports the error of this one
		}
		if rc.Spec.ORTVersion == w.ORTVersion {
			return rt, rc, nil
		}
		if found == nil && w.loadsGraphsOf(rc) {
			found, content = rt, rc
		}
	}
	return found, content, nil
}

// laterGraphs is the first ONNX Runtime that writes graphs of IR version 14, which earlier ones do
// not load.
const laterGraphs = "1.32"

// loadsGraphsOf reports whether the caller's ONNX Runtime loads the graphs that the runtime writes.
func (w *Wanted) loadsGraphsOf(rc *Content) bool {
	return compilers.CompareVersions(rc.Spec.ORTVersion, laterGraphs) < 0 ||
		compilers.CompareVersions(w.ORTVersion, laterGraphs) >= 0
}

func laterError(w *Wanted, have ...string) error {
	return apierr.New(apierr.Unavailable, nil, "ONNX Runtime %s may not load what the runtime "+
		"compiles, which has %s", w.ORTVersion, strings.Join(have, ", ")).
		WithHint("name, or register, a runtime with that version: --runtime DIR")
}

// LoadsIR reports whether that version of ONNX Runtime may load a graph of the IR version.
func LoadsIR(ort string, ir int64) bool {
	return ir < 14 || ort == "" || compilers.CompareVersions(ort, laterGraphs) >= 0
}

// equals reports whether the shown libraries, by EP, equal this runtime's.
func (rc *Content) equals(shown map[string]contents) bool {
	for ep, have := range shown {
		if want := rc.clientDigests[ep]; want == nil || !maps.Equal(want, have) {
			return false
		}
	}
	return true
}

// contentIfCarrying returns the runtime's contents if they include the caller's libraries and all
// EPs it needs, otherwise nil. It fails if this process has too many open files, because the next
// runtime could not be read either.
func (s *Set) contentIfCarrying(ctx context.Context, rt *Runtime, w *Wanted,
	progress func(string)) (*Content, error) {
	rc := rt.LastContent()
	if rc == nil || !rc.isCurrent(recently) {
		if rc != nil && rc.replacedLibrary(w) {
			// do not wait for the update to end, because the caller has a library from before it
			return nil, nil
		}
		var err error
		if rc, err = s.Content(ctx, rt, progress); errors.Is(err, syscall.EMFILE) {
			return nil, err
		} else if err != nil {
			// the runtime is gone or broken: try the next one; probe reports the error
			return nil, nil
		}
	}
	if !rc.HasAll(w.EPs) || !rc.carries(w, s.mayName(w)) {
		return nil, nil
	}
	return rc, nil
}

// candidates lists the runtimes that had the caller's EP libraries when last looked at, those with
// the caller's own ONNX Runtime first, and the other runtimes, which may have got them since. It
// checks no file, because a hit needs only the first candidate.
func (s *Set) candidates(w *Wanted) (likely, unknown []*Runtime) {
	var own, other []*Runtime
	for _, rt := range s.All() {
		rc := rt.LastContent()
		switch {
		case rc == nil || !rc.carries(w, s.mayName(w)):
			unknown = append(unknown, rt)
		case rc.Spec.ORTVersion == w.ORTVersion:
			own = append(own, rt)
		default:
			other = append(other, rt)
		}
	}
	return append(own, other...), unknown
}

func (rc *Content) carries(w *Wanted, own bool) bool {
	for _, ref := range w.EPLibraries {
		if !needs(w.EPs, ref.EP) {
			continue
		}
		if lib, ok := rc.Library(ref.EP); !ok || !ref.matches(lib.Path, rc.files, own) {
			return false
		}
	}
	return true
}

func needs(eps []identity.EP, name string) bool {
	return slices.ContainsFunc(eps, func(ep identity.EP) bool { return ep.Name == name })
}

// matches compares the open file, or without one the path. It does not look up paths of other
// users, because their file systems may never answer.
func (ref LibraryRef) matches(path string, files []stampedFile, own bool) bool {
	if ref.File == nil {
		return ref.Path == path || own && sameFile(path, ref.Path)
	}
	theirs, err := cas.StampOf(ref.File)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(files, func(f stampedFile) bool {
		return f.path == path && f.stamp.Dev == theirs.Dev && f.stamp.Ino == theirs.Ino
	})
}

// isAt reports whether the path still names the file that the caller opened, so that no update has
// replaced it.
func (ref LibraryRef) isAt(path string) bool {
	if ref.File == nil {
		return true // the caller sent only the path
	}
	theirs, err := cas.StampOf(ref.File)
	if err != nil {
		return false
	}
	now, err := cas.StampPath(path)
	return err == nil && now.Dev == theirs.Dev && now.Ino == theirs.Ino
}

func (rc *Content) replacedLibrary(w *Wanted) bool {
	return slices.ContainsFunc(w.EPLibraries, func(ref LibraryRef) bool {
		lib, ok := rc.Library(ref.EP)
		return ok && needs(w.EPs, ref.EP) && !ref.isAt(lib.Path)
	})
}

// ReplacedPath returns the path of a library that the caller opened before an update replaced it,
// "" if there is none. Builds for the old library are not served either, because execution
// providers open most of their SDK by path when a session is made. The caller would load the new
// SDK with the old library, which QNN and OpenVINO refuse. The caller can name a directory that
// still has the old files.
func (s *Set) ReplacedPath(w *Wanted) string {
	for _, ref := range w.EPLibraries {
		if !needs(w.EPs, ref.EP) || ref.File == nil {
			continue
		}
		for _, rt := range s.All() {
			rc := rt.LastContent()
			if rc == nil {
				continue
			}
			if lib, ok := rc.Library(ref.EP); ok && lib.Path == ref.Path && !ref.isAt(lib.Path) {
				return lib.Path
			}
		}
	}
	return ""
}

func replacedError(path string) error {
	return apierr.New(apierr.Unavailable, nil, "library %q was replaced after the caller opened "+
		"it", path).
		WithHint("restart the application: an update may have replaced the library")
}

func (s *Set) nameLibraries(ctx context.Context, w *Wanted, progress func(string)) (*Runtime,
	*Content, error) {
	for _, l := range w.EPLibraries {
		if !l.isAt(l.Path) {
			return nil, nil, replacedError(l.Path)
		}
	}
	spec := compilers.Runtime{ORTLibrary: w.ORTLibrary, ORTVersion: w.ORTVersion}
	for _, l := range w.EPLibraries {
		spec.EPs = append(spec.EPs, compilers.EPLibrary{EP: l.EP, Path: l.Path})
	}
	full, err := compilers.Complete(spec)
	if err != nil {
		return nil, nil, apierr.New(apierr.Unavailable, err, "runtime %q", spec.ORTLibrary)
	}
	rt := explicitRuntime(full, false)
	rt = s.addNamed(rt, func(old *Runtime) bool {
		return !old.Registered && old.subject == rt.subject
	})
	rc, err := s.Content(ctx, rt, progress)
	if err != nil {
		return nil, nil, err
	}
	if !rc.carries(w, true) {
		return nil, nil, replacedError(w.EPLibraries[0].Path)
	}
	if !rc.HasAll(w.EPs) {
		return nil, nil, NoRuntimeError(w.EPs, nil)
	}
	return rt, rc, nil
}

func sameFile(a, b string) bool {
	if a == b {
		return true
	}
	ai, err := os.Stat(a)
	if err != nil {
		return false
	}
	bi, err := os.Stat(b)
	return err == nil && os.SameFile(ai, bi)
}
