package cache

import (
	"context"
	"slices"

	"github.com/epcached/epcached/cas"
)

// earlierContent finds the past contents of a runtime whose very libraries the caller has open, though other ones are in
// their place by now. What was compiled for them is still right for that caller; nothing can be compiled for it.
func (c *Cache) earlierContent(ctx context.Context, r *Request) (*runtime, *runtimeContent) {
	if !slices.ContainsFunc(r.Runtime.EPLibraries, func(ref EPLibraryRef) bool { return ref.File != nil }) {
		return nil, nil // who names a path means what is there now
	}
	for _, rt := range c.runtimes.all() {
		for _, rc := range rt.past() {
			if rc.hasAll(r.EPs) && rc.carries(r, false) && c.sameBytes(ctx, r, rc) {
				return rt, rc
			}
		}
	}
	return nil, nil
}

// past lists what the runtime was, newest first.
func (rt *runtime) past() []*runtimeContent {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	out := slices.Clone(rt.earlier)
	if rc := rt.facts.Load(); rc != nil {
		out = append([]*runtimeContent{rc}, out...)
	}
	return out
}

// sameBytes compares the caller's open libraries with what theirs were: an inode number is used again when the file
// that had it is gone.
func (c *Cache) sameBytes(ctx context.Context, r *Request, rc *runtimeContent) bool {
	for _, ref := range r.Runtime.EPLibraries {
		if !needs(r.EPs, ref.EP) {
			continue
		}
		if ref.File == nil {
			return false
		}
		lib, _ := rc.library(ref.EP)
		i := slices.IndexFunc(rc.files, func(f stampedFile) bool { return f.path == lib.Path })
		if i < 0 {
			return false
		}
		d, err := c.openDigest(ctx, ref.File)
		if err != nil || d == (cas.Digest{}) || d != rc.files[i].digest {
			return false
		}
	}
	return true
}

// replacedUnder tells whether one of the caller's open libraries is no longer what its path leads to.
func (rc *runtimeContent) replacedUnder(r *Request) bool {
	return slices.ContainsFunc(r.Runtime.EPLibraries, func(ref EPLibraryRef) bool {
		lib, ok := rc.library(ref.EP)
		return ok && ref.File != nil && needs(r.EPs, ref.EP) && !ref.stillAt(lib.Path)
	})
}
