package cache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
)

// An application may load with libraries that this daemon does not have, or may not run because another user chose
// them. It can still have what it compiled itself, under a claim, kept and given to it again. Such a build is known by
// what the application shows of its libraries, since nothing of them is run here: their bytes, the version of ONNX
// Runtime that it states, and this machine. All of it is in the build key, and only an equal key is a hit: without the
// libraries nobody could judge what is nearly equal.

// Bounds of what is shown of one execution provider.
const (
	maxBeside      = 512
	maxLibraryName = 4096
	maxLibrary     = 8 << 30 // bytes of one file
	maxVersion     = 100     // of what a client says a version is
)

// bringsLibraries tells whether the request can be answered though no runtime here is for it.
func (c *Cache) bringsLibraries(r *Request, err error) bool {
	if apierr.ClassOf(err) != apierr.Unavailable || r.Runtime.ORTVersion == "" || len(r.EPs) == 0 || len(r.Group) > 0 {
		return false
	}
	switch r.OnMiss {
	case Wait, ForClaim, Fail, KeyOnly, Explain, Background:
	default:
		return false
	}
	for _, ep := range r.EPs {
		if ref := r.Runtime.library(ep.Name); ref == nil || ref.File == nil {
			return false
		}
	}
	return c.replacedPath(r) == "" // what the caller has open is no whole runtime any more
}

// library finds what the reference says of an execution provider's library.
func (ref *RuntimeRef) library(ep string) *EPLibraryRef {
	for i := range ref.EPLibraries {
		if ref.EPLibraries[i].EP == ep {
			return &ref.EPLibraries[i]
		}
	}
	return nil
}

// answerOwn answers a request for libraries that are the caller's own. missing says why no runtime here will do.
func (c *Cache) answerOwn(ctx context.Context, at *attempt, missing error) (*Answer, error) {
	if at.model.Compiled {
		return nil, missing
	}
	p, err := c.planOwn(ctx, at)
	if err != nil {
		return nil, err
	}
	at = at.withRuntime(p.eps[0].Library, nil).withPlan(p)
	switch at.OnMiss {
	case KeyOnly:
		return at.answer(Key), nil
	case Explain:
		return c.explain(ctx, at)
	}
	found, err := c.lookUp(ctx, at)
	if found.answer != nil || err != nil {
		return c.finish(found.answer, at), err
	}
	if at.shows() || at.OnMiss != Wait && at.OnMiss != Background {
		c.index.Counters.Add("misses", 1) // else the client asks again, and shows its libraries
	}
	switch {
	case found.doubted >= maxRounds:
		return nil, errDoubted(at)
	case at.OnMiss == Fail:
		return nil, apierr.New(apierr.NotFound, nil, "no build for model %q: %s", at.Name, found.why).WithFact("request_key", p.requestKey.String()).
			WithHint("compile it: ask again with on_miss claim")
	case at.OnMiss == Background:
		return nil, missing // no job of the daemon's can compile it
	case at.OnMiss == ForClaim:
		a, err := c.claimOrWait(ctx, at, found.why)
		return c.finish(a, at), err
	}
	a, err := c.awaitClaim(ctx, at, missing)
	return c.finish(a, at), err
}

// planOwn thinks a request through for libraries that are not run here.
func (c *Cache) planOwn(ctx context.Context, at *attempt) (*plan, error) {
	if len(at.Runtime.ORTVersion) > maxVersion {
		return nil, apierr.New(apierr.BadRequest, nil, "ONNX Runtime's version %.40q...: not a version", at.Runtime.ORTVersion)
	}
	p := &plan{outside: true, libraries: make(map[string]cas.Stamp)}
	var err error
	if p.canonical, err = at.terms().Record(ctx, c.settings.Load().allowed, identity.StatedDevices); err != nil {
		return nil, err
	}
	p.requestKey, p.record = p.canonical.Key()
	p.recordJSON = p.canonical.JSON()
	for i, ep := range at.EPs {
		ref := at.Runtime.library(ep.Name)
		at.phase("reading")
		digest, stamp, err := c.ownDigest(ctx, at.Peer.UID, ref)
		if err != nil {
			return nil, err
		}
		p.libraries[ep.Name] = stamp
		info, _ := compilers.EPByName(ep.Name)
		one := compilers.EP{Name: ep.Name, Library: ref.Path, Options: info.Resolve(ref.Path, identity.BaseNames(info, ep.Options))}
		facts := index.EPFacts{Name: ep.Name, Library: strings.ToValidUTF8(ref.Path, "?"), LibraryDigest: digest}
		for _, d := range p.canonical.EPs[i].Devices {
			one.Devices = append(one.Devices, compilers.Device(d))
			facts.Devices = append(facts.Devices, fmt.Sprintf("%s %04x:%04x", d.Type, d.VendorID, d.DeviceID))
		}
		p.eps, p.facts = append(p.eps, one), append(p.facts, facts)
	}
	p.buildKey = identity.OwnBuildKey(p.requestKey, p.facts, p.canonical.Route, at.Runtime.ORTVersion, c.machine.Now())
	return p, nil
}

// ownDigest stands for an execution provider's library and what it shows of those beside it. Who shows nothing beside
// it is known by the very file and its path as well: another place may have another SDK around an equal library.
// It never equals a digest of libraries that are run here.
func (c *Cache) ownDigest(ctx context.Context, uid uint32, ref *EPLibraryRef) (digest cas.Digest, library cas.Stamp, err error) {
	all, err := c.shownContents(ctx, uid, ref)
	if err != nil {
		return digest, library, err
	}
	if library, err = cas.StampOf(ref.File); err != nil {
		return digest, library, shownError(ctx, err, ref, "")
	}
	b := []byte("own")
	if len(ref.Beside) == 0 && !ref.Complete {
		b = append(memo.AppendStamp(b, library), ref.Path...)
	}
	for _, name := range sortedKeys(all) {
		d := all[name]
		b = memo.AppendText(b, name)
		b = append(b, d[:]...)
	}
	return cas.Digest(digestOf(b)), library, nil
}

// shownContents gives what a client shows: the library under the empty name, and those beside it.
func (c *Cache) shownContents(ctx context.Context, uid uint32,
	ref *EPLibraryRef) (contents, error) {
	if len(ref.Beside) > maxBeside || len(ref.Path) > maxLibraryName {
		return nil, apierr.New(apierr.BadRequest, nil,
			"library of %s: more than %d libraries beside it, or a path of more than %d bytes",
			ref.EP, maxBeside, maxLibraryName)
	}
	out := make(contents, 1+len(ref.Beside))
	var err error
	if out[""], err = c.shownDigest(ctx, uid, ref.File); err != nil {
		return nil, shownError(ctx, err, ref, "")
	}
	for _, name := range sortedKeys(ref.Beside) {
		if name == "" || len(name) > maxLibraryName || ref.Beside[name] == nil {
			return nil, apierr.New(apierr.BadRequest, nil,
				"library of %s: %.80q beside it: not a name", ref.EP, name)
		}
		if out[name], err = c.shownDigest(ctx, uid, ref.Beside[name]); err != nil {
			return nil, shownError(ctx, err, ref, name)
		}
	}
	return out, nil
}

// of gives the contents as those of a runtime are given: the library by its name, and nothing that
// is no part of it.
func (shown contents) of(ref *EPLibraryRef) contents {
	out := make(contents, len(shown))
	for name, d := range shown {
		if name != "" && !compilers.Foreign(name) {
			out[name] = d
		}
	}
	out[filepath.Base(ref.Path)] = shown[""]
	return out
}

var errReplacedOpen = errors.New("it has been replaced since it was opened")

// shownDigest hashes a library that a client has open, or remembers it. A package manager may link
// or unlink another name of the file meanwhile: its stamp changes and its bytes do not, so it is
// hashed again.
func (c *Cache) shownDigest(ctx context.Context, uid uint32, f *os.File) (cas.Digest, error) {
	for range maxRounds {
		before, err := cas.StampOf(f)
		if err != nil {
			return cas.Digest{}, err
		}
		if before.Size > maxLibrary {
			return cas.Digest{}, fmt.Errorf("%d bytes, more than %d", before.Size, int64(maxLibrary))
		}
		if gone, err := unlinked(f); gone || err != nil {
			return cas.Digest{}, errors.Join(err, errReplacedOpen)
		}
		d, err := c.readShown(ctx, uid, f)
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

// readShown hashes a library or remembers it. The library may lie on a file system that never
// answers, so one of an owner's is read at a time, on a goroutine of its own.
func (c *Cache) readShown(ctx context.Context, uid uint32, f *os.File) (cas.Digest, error) {
	if d, ok := c.memoDigest(uid, f); ok {
		return d, nil
	}
	leave, err := c.reading.Lock(ctx, c.owners.Of(uid))
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
		d, err := c.openDigest(ctx, uid, f)
		done <- read{d, err}
	}()
	select {
	case r := <-done:
		return r.digest, r.err
	case <-ctx.Done():
		return cas.Digest{}, ctx.Err()
	}
}

func shownError(ctx context.Context, err error, ref *EPLibraryRef, name string) error {
	path := ref.Path
	if name != "" {
		path = name
	}
	switch {
	case ctx.Err() != nil:
		return apierr.New(apierr.Cancelled, ctx.Err(), "library %q", path)
	case errors.Is(err, errReplacedOpen):
		return replaced(path)
	}
	return apierr.New(apierr.BadRequest, err, "library %q of %s", path, ref.EP)
}
