package cache

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// resolve finds the runtime that the request means, with its files looked at.
func (c *Cache) resolve(ctx context.Context, r *Request, progress func(string)) (*runtime, *runtimeContent, error) {
	switch {
	case r.Runtime.Directory != "":
		return c.resolveDirectory(ctx, r, progress)
	case len(r.Runtime.EPLibraries) > 0:
		return c.resolveLibraries(ctx, r, progress)
	}
	return c.resolveDefault(ctx, r, progress)
}

// resolveDefault takes the first runtime that has every execution provider of the request.
func (c *Cache) resolveDefault(ctx context.Context, r *Request, progress func(string)) (*runtime, *runtimeContent, error) {
	var have []string
	var last error
	for _, rt := range c.runtimes.all() {
		if !rt.registered {
			continue
		}
		rc, err := c.content(ctx, rt, progress)
		if err != nil {
			last = err
			continue
		}
		if rc.hasAll(r.EPs) && (!r.StrictORT || r.Runtime.ORTVersion == "" || r.Runtime.ORTVersion == rc.spec.ORTVersion) {
			return rt, rc, nil
		}
		have = append(have, rc.providers()...)
	}
	if last != nil && len(have) == 0 {
		return nil, nil, last
	}
	return nil, nil, noRuntime(r, have)
}

func noRuntime(r *Request, have []string) error {
	names := make([]string, 0, len(r.EPs))
	for _, ep := range r.EPs {
		if !slices.Contains(have, ep.Name) {
			names = append(names, ep.Name)
		}
	}
	if len(names) == 0 { // each is somewhere, and nowhere all of them
		return apierr.New(apierr.Unavailable, nil, "no registered runtime has all of %s", epNames(r.EPs))
	}
	slices.Sort(have)
	have = slices.Compact(have)
	e := apierr.New(apierr.Unavailable, nil, "no registered runtime has execution provider %s", strings.Join(names, ", "))
	if len(have) == 0 {
		return e.WithHint("name the runtime that it will be loaded with (epcachectl: --runtime DIR), or start epcached with --runtime DIR, a folder made by: pip install --no-deps --target DIR onnxruntime onnxruntime-ep-openvino")
	}
	return e.WithHint("the registered runtimes have %s; epcachectl probe shows them", strings.Join(have, ", "))
}

func (rc *runtimeContent) providers() (names []string) {
	for _, l := range rc.spec.EPs {
		names = append(names, l.EP)
	}
	return names
}

func (rc *runtimeContent) hasAll(eps []identity.EP) bool {
	for _, ep := range eps {
		if _, ok := rc.library(ep.Name); !ok {
			return false
		}
	}
	return true
}

func (c *Cache) resolveDirectory(ctx context.Context, r *Request, progress func(string)) (*runtime, *runtimeContent, error) {
	dir := filepath.Clean(r.Runtime.Directory)
	if !filepath.IsAbs(dir) {
		return nil, nil, apierr.New(apierr.BadRequest, nil, "runtime directory %q is not an absolute path", r.Runtime.Directory)
	}
	own := c.mayName(r.Peer)
	same := func(rt *runtime) bool { return rt.name == dir || own && sameFile(rt.name, dir) }
	var found *runtime
	all := c.runtimes.all()
	if i := slices.IndexFunc(all, same); i >= 0 {
		found = all[i]
	} else {
		if !own {
			if rt, rc, err := c.equalRuntime(ctx, r, progress); rc != nil || err != nil {
				return rt, rc, err
			}
			return nil, nil, c.notMine(r, dir)
		}
		if _, err := compilers.Find(dir); err != nil {
			return nil, nil, &apierr.Error{Class: apierr.Unavailable, Text: err.Error(), Err: err}
		}
		found = c.addNamed(directoryRuntime(dir, false), same)
	}
	rc, err := c.content(ctx, found, progress)
	if err != nil {
		return nil, nil, err
	}
	if !rc.hasAll(r.EPs) {
		return nil, nil, noRuntime(r, rc.providers())
	}
	return found, rc, nil
}

// mayName: only a client that is the daemon's own user may bring libraries, for they are executed as that user.
func (c *Cache) mayName(p Peer) bool { return p.UID == c.uid }

// factInstead of an error lists what the client can do instead, the best first, separated by
// spaces.
const (
	factInstead = "instead"
	insteadShow = "show" // ask again, and show all libraries beside those of the EPs
	// ask again with on_miss claim, and compile with the client's own libraries
	insteadClaim = "claim"
	insteadOwn   = "own" // ask a daemon of the user's own, which may run the user's libraries
)

func (c *Cache) notMine(r *Request, what string) error {
	var instead []string
	if !r.shows() {
		instead = append(instead, insteadShow)
	}
	if r.OnMiss == Wait && len(r.Group) == 0 && r.Store != "none" {
		instead = append(instead, insteadClaim)
	}
	at := len(instead)
	if !slices.ContainsFunc(c.runtimes.all(), func(rt *runtime) bool { return rt.registered }) {
		at = 0 // a daemon that can compile nothing for this user steps aside
	}
	instead = slices.Insert(instead, at, insteadOwn)
	return apierr.New(apierr.Unavailable, nil,
		"runtime %q is not registered with this daemon, nor one of equal libraries", what).
		WithFact(factInstead, strings.Join(instead, " ")).
		WithHint("the daemon runs as another user and loads only what its administrator registered: --runtime DIR, or [[runtime]] in its configuration")
}

// shows tells whether the caller shows the whole libraries of all EPs of the request, and not only
// their paths.
func (r *Request) shows() bool {
	for _, ep := range r.EPs {
		if ref := r.Runtime.library(ep.Name); ref == nil || ref.File == nil || !ref.Complete {
			return false
		}
	}
	return len(r.EPs) > 0
}

// resolveLibraries finds a runtime that has the files that the caller will load as EP libraries, or
// files of the same content in another place. What is beside an EP library carries its SDK, so its
// content counts too.
func (c *Cache) resolveLibraries(ctx context.Context, r *Request, progress func(string)) (*runtime, *runtimeContent, error) {
	likely, unknown := c.candidates(r)
	for _, rt := range likely {
		if rc := c.carrying(ctx, rt, r, progress); rc != nil {
			return rt, rc, nil
		}
	}
	for _, rt := range unknown {
		if rc := rt.facts.Load(); rc != nil && c.holds(rc) {
			continue // it is as it was, and it was not the caller's
		}
		if rc := c.carrying(ctx, rt, r, progress); rc != nil {
			return rt, rc, nil
		}
	}
	if path := c.replacedPath(r); path != "" {
		return nil, nil, replaced(path)
	}
	if rt, rc, err := c.equalRuntime(ctx, r, progress); rc != nil || err != nil {
		return rt, rc, err
	}
	if !c.mayName(r.Peer) {
		return nil, nil, c.notMine(r, r.Runtime.EPLibraries[0].Path)
	}
	if r.Runtime.ORTLibrary == "" {
		return nil, nil, apierr.New(apierr.Unavailable, nil, "runtime of %q: the application names no libonnxruntime, which a compile needs", r.Runtime.EPLibraries[0].Path).
			WithHint("where it was packed, libonnxruntime.so.VERSION belongs beside the other files of onnxruntime/capi; epcached --runtime DIR names another runtime with this library")
	}
	return c.nameLibraries(ctx, r, progress)
}

// equalRuntime finds a runtime whose libraries have the content that the caller shows, one with the
// caller's ONNX Runtime first; nil where there is none. A client of the daemon's own user names its
// libraries by path instead.
func (c *Cache) equalRuntime(ctx context.Context, r *Request,
	progress func(string)) (*runtime, *runtimeContent, error) {
	if c.mayName(r.Peer) || !r.shows() {
		return nil, nil, nil
	}
	shown := make(map[string]contents)
	for _, ep := range r.EPs {
		ref := r.Runtime.library(ep.Name)
		all, err := c.shownContents(ctx, r.Peer.UID, ref)
		if err != nil {
			return nil, nil, err
		}
		shown[ep.Name] = all.of(ref)
	}
	var found *runtime
	var content *runtimeContent
	for _, rt := range c.runtimes.all() {
		rc, err := c.content(ctx, rt, progress)
		if err != nil || !rc.equals(shown) {
			continue // probe shows the error of a runtime, and another one may do
		}
		if rc.spec.ORTVersion == r.Runtime.ORTVersion {
			return rt, rc, nil
		}
		if found == nil {
			found, content = rt, rc
		}
	}
	return found, content, nil
}

// equals tells whether an application that shows these libraries, by EP, has what this runtime has.
func (rc *runtimeContent) equals(shown map[string]contents) bool {
	for ep, have := range shown {
		if want := rc.shown[ep]; want == nil || !maps.Equal(want, have) {
			return false
		}
	}
	return true
}

// carrying gives the runtime's contents if they have all that the request needs, and the caller's very libraries.
func (c *Cache) carrying(ctx context.Context, rt *runtime, r *Request, progress func(string)) *runtimeContent {
	rc := rt.facts.Load()
	if rc == nil || !c.holds(rc) {
		if rc != nil && rc.replacedUnder(r) {
			return nil // no waiting for the new libraries: the caller has one from before
		}
		var err error
		if rc, err = c.content(ctx, rt, progress); err != nil {
			return nil // a runtime that is gone or broken: probe shows its error, and another one may do
		}
	}
	if !rc.hasAll(r.EPs) || !rc.carries(r, c.mayName(r.Peer)) {
		return nil
	}
	return rc
}

// candidates lists the runtimes whose EP libraries were the caller's when last looked at, those with the caller's
// own ONNX Runtime first, and the others: nobody has looked at them yet, or they may be the caller's by now. No file of
// theirs is looked at, for a hit needs only the first.
func (c *Cache) candidates(r *Request) (likely, unknown []*runtime) {
	var own, other []*runtime
	for _, rt := range c.runtimes.all() {
		rc := rt.facts.Load()
		switch {
		case rc == nil || !rc.carries(r, c.mayName(r.Peer)):
			unknown = append(unknown, rt)
		case rc.spec.ORTVersion == r.Runtime.ORTVersion:
			own = append(own, rt)
		default:
			other = append(other, rt)
		}
	}
	return append(own, other...), unknown
}

// carries tells whether every EP library that the request needs and names is this runtime's own file.
func (rc *runtimeContent) carries(r *Request, own bool) bool {
	for _, ref := range r.Runtime.EPLibraries {
		if !needs(r.EPs, ref.EP) {
			continue
		}
		lib, ok := rc.library(ref.EP)
		if !ok || !ref.is(lib.Path, rc.files, own) {
			return false
		}
	}
	return true
}

func needs(eps []identity.EP, name string) bool {
	return slices.ContainsFunc(eps, func(ep identity.EP) bool { return ep.Name == name })
}

// is compares by the file that the caller opened, else by the path that it spelled. A path of another user's is
// not looked up: it may lie on a file system that never answers.
func (ref EPLibraryRef) is(path string, files []stampedFile, own bool) bool {
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

// stillAt tells whether the path leads to the file that the caller opened, and so loads. A package manager may have
// put another in its place since, and what is compiled for that one is not for this caller.
func (ref EPLibraryRef) stillAt(path string) bool {
	if ref.File == nil {
		return true // the caller knows no more than the path
	}
	theirs, err := cas.StampOf(ref.File)
	if err != nil {
		return false
	}
	now, err := cas.StampPath(path)
	return err == nil && now.Dev == theirs.Dev && now.Ino == theirs.Ino
}

// replacedUnder tells whether one of the caller's open libraries is no longer what its path leads to.
func (rc *runtimeContent) replacedUnder(r *Request) bool {
	return slices.ContainsFunc(r.Runtime.EPLibraries, func(ref EPLibraryRef) bool {
		lib, ok := rc.library(ref.EP)
		return ok && needs(r.EPs, ref.EP) && !ref.stillAt(lib.Path)
	})
}

// replacedPath finds a library of a known runtime that the caller has open as it was before it was replaced. What was
// compiled for it then is not served either: execution providers open most of their SDK only when a session is made,
// and by path, so the caller would load the new one's (seen with QNN and OpenVINO: the load is refused). Who has the
// earlier libraries in another place names that place.
func (c *Cache) replacedPath(r *Request) string {
	for _, ref := range r.Runtime.EPLibraries {
		if !needs(r.EPs, ref.EP) || ref.File == nil {
			continue
		}
		for _, rt := range c.runtimes.all() {
			rc := rt.facts.Load()
			if rc == nil {
				continue
			}
			if lib, ok := rc.library(ref.EP); ok && lib.Path == ref.Path && !ref.stillAt(lib.Path) {
				return lib.Path
			}
		}
	}
	return ""
}

func replaced(path string) error {
	return apierr.New(apierr.Unavailable, nil, "library %q is another file now than the one that the caller has open", path).
		WithHint("it was replaced, perhaps by an update: restart the application")
}

// nameLibraries takes the libraries that a client of the daemon's own user named.
func (c *Cache) nameLibraries(ctx context.Context, r *Request, progress func(string)) (*runtime, *runtimeContent, error) {
	for _, l := range r.Runtime.EPLibraries {
		if !l.stillAt(l.Path) {
			return nil, nil, replaced(l.Path)
		}
	}
	spec := compilers.Runtime{ORTLibrary: r.Runtime.ORTLibrary, ORTVersion: r.Runtime.ORTVersion}
	for _, l := range r.Runtime.EPLibraries {
		spec.EPs = append(spec.EPs, compilers.EPLibrary{EP: l.EP, Path: l.Path})
	}
	full, err := compilers.Complete(spec)
	if err != nil {
		return nil, nil, apierr.New(apierr.Unavailable, err, "runtime %q", spec.ORTLibrary)
	}
	rt := explicitRuntime(full, false)
	rt = c.addNamed(rt, func(old *runtime) bool { return !old.registered && old.subject == rt.subject })
	rc, err := c.content(ctx, rt, progress)
	if err != nil {
		return nil, nil, err
	}
	if !rc.carries(r, true) {
		return nil, nil, replaced(r.Runtime.EPLibraries[0].Path)
	}
	if !rc.hasAll(r.EPs) {
		return nil, nil, noRuntime(r, nil)
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
