package cache

import (
	"context"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
	"github.com/epcached/epcached/requests"
)

// libraries are those of a runtime, and what they are known by; nil: nothing is known.
type libraries struct {
	spec    compilers.Runtime
	digests map[string]cas.Digest // by EP
}

// librariesIn hashes the libraries of the runtime in dir, "" for none. They are not loaded.
func librariesIn(ctx context.Context, dir string) (*libraries, error) {
	if dir == "" {
		return nil, nil
	}
	spec, err := compilers.Find(dir)
	if err != nil {
		return nil, &refusal.Error{Class: refusal.Unavailable, Text: err.Error(), Err: err}
	}
	out := &libraries{spec: spec, digests: make(map[string]cas.Digest)}
	for _, l := range spec.EPs {
		if out.digests[l.EP], err = LibraryDigest(ctx, l); err != nil {
			return nil, refusal.New(refusal.Unavailable, err, "runtime %q", dir)
		}
	}
	return out, nil
}

// LibraryDigest hashes an EP library and the libraries beside it that carry its SDK. Libraries of
// equal digests are the same, wherever they are.
func LibraryDigest(ctx context.Context, l compilers.EPLibrary) (cas.Digest, error) {
	return libraryDigest(l, func(path string) (cas.Digest, error) { return cas.SumFile(ctx, path) })
}

// made tells whether these libraries made the build.
func (l *libraries) made(b *index.Build) bool {
	return l != nil && !slices.ContainsFunc(b.EPs, func(ep index.EPFacts) bool { return l.digests[ep.Name] != ep.LibraryDigest })
}

// options gives the request's provider options as these libraries take them; nil where no libraries are known.
func (l *libraries) options(r *Request) (map[string]map[string]string, error) {
	if l == nil {
		return nil, nil
	}
	out := make(map[string]map[string]string, len(r.EPs))
	for _, ep := range r.EPs {
		lib := compilers.EPLibrary{}
		for _, one := range l.spec.EPs {
			if one.EP == ep.Name {
				lib = one
			}
		}
		if lib.EP == "" {
			return nil, refusal.New(refusal.Unavailable, nil, "the runtime has no execution provider %q", ep.Name)
		}
		var err error
		if out[ep.Name], err = requests.FillOptions(ep.Name, ep.Options, lib); err != nil {
			return nil, err
		}
	}
	return out, nil
}
