package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/epcached/epcached/atrest"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/flock"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
	"github.com/epcached/epcached/requests"
)

// Stored is a store that no daemon has, read in place: that of a factory image, say. Nothing is ever written, no vendor's
// code is run and nothing compiled. Manifests and journal are read once; files are hashed whenever they are given out.
type Stored struct {
	dir      string
	uid      uint32
	owner    uint32 // of the store
	files    *atrest.Store
	snapshot *index.Snapshot
}

// ReadStore reads the store in the state folder dir for the user uid. It fails with a *LockedError where a daemon has it: that
// one is to be asked. What cannot be read of a store is left out, and told by Problems.
func ReadStore(ctx context.Context, dir string, uid uint32) (*Stored, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	who, err := ownerOf(dir)
	if err != nil {
		return nil, err
	}
	if err := nobodyHas(dir); err != nil {
		return nil, err
	}
	s := &Stored{dir: dir, uid: uid, owner: who.uid, files: atrest.In(dir)}
	switch s.snapshot, err = index.ReadSnapshot(ctx, dir); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, refusal.New(refusal.NotFound, nil, "it is no store: there is no folder \"manifests\" in it").WithHint("name the state folder of an epcached")
	case errors.Is(err, fs.ErrPermission):
		return nil, refusal.New(refusal.NotAllowed, err, "the store cannot be read").
			WithHint("a store is its owner's alone; whoever makes it a factory image lets others read it: chmod -R a+rX %s", dir)
	}
	return s, err
}

// Problems tells what of the store could not be read, a line each.
func (s *Stored) Problems() (lines []string) {
	for _, p := range s.snapshot.Problems {
		lines = append(lines, fmt.Sprintf("%s: %s: %s", p.Kind, p.Object, p.Detail))
	}
	return lines
}

// nobodyHas looks whether a daemon holds the store's lock. It is not kept: a daemon that starts meanwhile finds the store
// free, and leaves alone what the lease on a view holds.
func nobodyHas(dir string) error {
	f, err := os.Open(filepath.Join(dir, "lock"))
	if err != nil {
		return nil // none was ever made, or this user may not look: then a lease is what there is
	}
	defer f.Close()
	if err := flock.Share(f); !errors.Is(err, syscall.EWOULDBLOCK) {
		return nil
	}
	holder := make([]byte, 128)
	n, _ := f.ReadAt(holder, 0) // the text is a courtesy
	return &LockedError{Directory: dir, Holder: strings.TrimSpace(string(holder[:n]))}
}

// Find answers a request with the build that the store has for it, whose files it has hashed; its outcome is Hit, or PassThrough
// for a model that is compiled already. Runtime.Directory may say what the model will be loaded with: builds that these libraries
// made are optimal, all others unknown, for nothing is run to find out. build narrows to builds whose key begins so.
//
// Without asking the execution provider nobody knows which device a request means, and so not its whole key. So a build fits that
// was made for the same request and for a device such as the request names. Where several different ones do, it is NotFound, with
// what there is. A *NeedFilesError says which external data the request lacks.
//
// It looks in a daemon's order: at builds of the request, and for a single model then at groups that have it among their models; a
// build with damage is passed over, which a warning says, and is the error where there is no other. Whoever may read a group's files may have one of
// its models: who has had the whole group only a daemon knows.
//
// The answer's View is the caller's to close: it keeps a daemon that starts meanwhile from removing the files. It is nil where the
// store has no view of the build, because a file of it is packed or views were left out: Open reads the files then, and Unpack makes a view elsewhere.
func (s *Stored) Find(ctx context.Context, r *Request, build string) (*Answer, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	if err := r.fold(); err != nil {
		return nil, err
	}
	id, r, err := identifyAllNow(ctx, r)
	if err != nil {
		return nil, err
	}
	if id.Compiled {
		return &Answer{Outcome: PassThrough, ModelDigest: id.Digest, Why: "the model is compiled already"}, nil
	}
	asked, err := spelledWithout(ctx, r, id.Digest)
	if err != nil {
		return nil, err
	}
	with, err := librariesIn(ctx, r.Runtime.Directory)
	if err != nil {
		return nil, err
	}
	f := &finding{s: s, build: build, with: with, asked: &asked, why: "never compiled for this request"}
	if a, err := f.builds(ctx, r, &asked); a != nil || err != nil {
		return a, err
	}
	if member, wanted := asMember(ctx, r, id.Digest); member != nil {
		if a, err := f.builds(ctx, member, wanted); a != nil || err != nil {
			return a, err
		}
	}
	return nil, f.none(r)
}

// Open gives a file of the answer's build, of whichever form: the caller reads it once and closes it. What is read was hashed by Find;
// who reads later hashes again.
func (s *Stored) Open(a *Answer, f index.File) (io.ReadCloser, error) {
	return s.files.Open(a.Build, f)
}

// Unpack gives an answer that has no view one in a folder below dir, outside the store: see atrest.Store.Unpack.
func (s *Stored) Unpack(ctx context.Context, a *Answer, dir string, progress func(done, total int64)) error {
	if a.View != nil || a.Build == nil {
		return nil
	}
	v, err := s.files.Unpack(ctx, a.Build, dir, progress)
	if err != nil {
		return err
	}
	a.takeView(v)
	return nil
}

// takeView says where the files are.
func (a *Answer) takeView(v *atrest.View) {
	a.View, a.Path, a.Graph = v.Folder, v.Path, v.ID+"/"+a.Graph
	for i := range a.Members {
		a.Members[i].Graph = v.ID + "/" + a.Members[i].Graph
	}
}

// asMember is the request as one for a group that has its model among its members; nil: no group could answer it.
func asMember(ctx context.Context, r *Request, model cas.Digest) (*Request, *requests.Record) {
	if len(r.group) > 0 || r.Embed {
		return nil, nil
	}
	member := r.sharing()
	member.member = true
	wanted, err := spelledWithout(ctx, member, model)
	if err != nil {
		return nil, nil // the request itself is answered as if nobody had looked
	}
	return member, &wanted
}

// spelledWithout brings the request into its one spelling without asking an execution provider which devices it means.
func spelledWithout(ctx context.Context, r *Request, model cas.Digest) (requests.Record, error) {
	return r.terms(model).Record(ctx, anyOption(r), requests.StatedDevices)
}

// anyOption takes every option there is: what an administrator once allowed is in the builds' records, and nothing is compiled here.
func anyOption(r *Request) (all requests.Allowed) {
	for _, ep := range r.EPs {
		for name := range ep.Options {
			all = append(all, ep.Name+"/"+name)
		}
	}
	for name := range r.SessionOptions {
		all = append(all, "session/"+name)
	}
	return all
}

// identifyAllNow is Cache.identifyAll without a memo.
func identifyAllNow(ctx context.Context, r *Request) (identity, *Request, error) {
	known := &sums{now: time.Now}
	return r.identified(func(one *Request) (identity, error) {
		one.sums = known
		return identifyNow(ctx, one)
	})
}

// identifyNow reads and hashes the model, and remembers nothing.
func identifyNow(ctx context.Context, r *Request) (identity, error) {
	src, err := epmodel.FileSource(r.Graph)
	if err != nil {
		return identity{}, refusal.New(refusal.BadModel, err, "model %q cannot be read", r.Name)
	}
	m, err := epmodel.Read(ctx, r.Name, src)
	if err != nil {
		return identity{}, modelError(r, err)
	}
	id := identity{Locations: m.Locations(), Compiled: isArtefact(m)}
	if id.Compiled {
		m.Initializers, id.Locations = nil, nil
	}
	if missing := r.missing(id.Locations); len(missing) > 0 {
		return identity{}, &NeedFilesError{Locations: missing}
	}
	sum, err := epmodel.Digest(ctx, m, src, r.open, r.sums.of)
	if err != nil {
		return identity{}, modelError(r, err)
	}
	id.Digest = cas.Digest(sum)
	return id, nil
}
