// Package readonly answers requests from a store that no daemon has, and writes nothing.
package readonly

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
)

// Store is a store that no daemon has, opened read-only: that of a factory image, say. It answers
// by the ordinary look-up, but it keeps no lock, writes nothing, starts no worker and compiles
// nothing, and it hashes files whenever it serves them.
type Store struct {
	Builds []index.Build // that it has

	dir     string
	uid     uint32 // of the caller
	owner   uint32
	store   *store.Store
	models  *identity.Models
	rights  *rights.Rights
	reports *reports.Reports // none
}

// readable ends hints about files that the caller may not read.
const readable = "lets others read it: chmod -R a+rX %s"

// Open opens the store in the state directory dir read-only for the user uid. It fails where a
// daemon has the store: ask that one. Problems returns what could not be read.
func Open(ctx context.Context, dir string, uid uint32) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	s := &Store{dir: dir, uid: uid, owner: cas.Owner(info)}
	s.store, s.Builds, err = store.OpenReadOnly(ctx, dir)
	switch {
	case errors.As(err, new(*store.LockedError)):
		return nil, &apierr.Error{Class: apierr.Unavailable, Text: err.Error(), Err: err,
			Hint: "a daemon has it: ask that one, without --state"}
	case errors.Is(err, fs.ErrNotExist):
		return nil, apierr.New(apierr.NotFound, nil, "it is no store: there is no folder \"manifests\" in it").
			WithHint("name the state folder of an epcached")
	case errors.Is(err, fs.ErrPermission):
		return nil, apierr.New(apierr.NotAllowed, err, "the store cannot be read").
			WithHint("a store is its owner's alone; whoever makes it a factory image "+readable, dir)
	case err != nil:
		return nil, err
	}
	s.models = identity.NewModels(&s.store.Index().Memos, time.Now)
	none := func() (none rights.Privileged) { return none }
	s.rights = rights.New(uid, s.store.Index(), none, slog.New(slog.DiscardHandler))
	s.reports = reports.New(reports.Options{Now: time.Now})
	return s, nil
}

// Problems returns what of the store could not be read, a line each.
func (s *Store) Problems() (lines []string) {
	for _, p := range s.store.Index().Problems() {
		lines = append(lines, fmt.Sprintf("%s: %s: %s", p.Kind, p.Object, p.Detail))
	}
	return lines
}

// Find answers a request with the build that the store has for it, whose files it has hashed; its
// outcome is Hit, or PassThrough for a model that is compiled already. Runtime.Directory may say
// what the model will be loaded with: builds that these libraries made are optimal, all others
// unknown, because nothing is run to find out. build narrows to builds whose key begins so. A
// *identity.NeedFilesError says which external data the request lacks.
//
// The device that a request means, and so its key, is not known unless its execution provider is
// asked. So a build fits that was made for the same request and for a device such as the request
// names. Where several different ones do, the error is NotFound and lists them. A build with damage
// is passed over with a warning, and its damage is the error where there is no other. Whoever may
// read a group's files may have one of its models: only a daemon knows who has had the whole group.
//
// The answer's View is the caller's to close: it keeps a daemon that starts meanwhile from removing
// the files. It is nil where the store has no sound view of the build, because a file of it is
// packed or views were left out: Open reads the files then, and Unpack makes a view elsewhere.
func (s *Store) Find(ctx context.Context, r *request.Request, build string) (*request.Answer, error) {
	at, err := request.NewAttempt(r, jobs.NewTelling(nil, time.Now()))
	if err != nil {
		return nil, err
	}
	at.Peer = request.Peer{UID: s.uid}
	if at, err = at.Identified(ctx, s.models); err != nil {
		return nil, err
	}
	at.Scopes = nil // the plan lists the builds, because no request key is known
	if at.Identity.Compiled {
		return &request.Answer{Outcome: request.PassThrough, ModelDigest: at.Identity.Digest,
			Why: "the model is compiled already"}, nil
	}
	f := &finding{Store: s, build: build, why: "never compiled for this request"}
	if build != "" {
		f.why = fmt.Sprintf("no build of this model has a key that begins with %q", build)
	}
	rc, err := libraries(ctx, r)
	if err != nil {
		return nil, err
	}
	if at, err = f.planned(ctx, at.WithRuntime(rc.Spec.Directory, rc)); err != nil {
		return nil, err
	}
	serve := func([]compilers.EP) request.Policy { return request.Policy{Unknown: request.PolicyServe} }
	builds := lookup.New(lookup.Options{Store: s.store, Rights: s.rights,
		Reports: s.reports, Judge: recorded{}, Policy: serve, Now: time.Now, Planned: f.planned,
		Lease: s.lease, Pass: f.pass})
	found, err := builds.Find(ctx, at)
	a := builds.Finish(found.Answer, at)
	if a == nil && err == nil && f.several == nil {
		a, err = builds.FindMember(ctx, at)
	}
	if err != nil {
		return nil, err
	}
	if a == nil {
		return nil, f.none(r)
	}
	asked, _ := at.Plan.Canonical.OnDevicesOf(a.Build)
	a.RequestKey, _ = asked.Key()
	a.Record = asked.JSON()
	if at.RuntimeName == "" {
		a.ProviderOptions = a.Build.ProviderOptions
	}
	a.Warnings = append(a.Warnings, f.notes...)
	return a, nil
}

// Open opens a file of the answer's build, whole or packed, for reading it once. Find has hashed
// it; a caller that reads it later hashes it again.
func (s *Store) Open(a *request.Answer, f index.File) (io.ReadCloser, error) {
	from, err := s.store.Forms().Look(f.Digest)
	if err != nil {
		return nil, s.cannotServe(a.Build, f, err)
	}
	return struct {
		io.Reader
		io.Closer
	}{io.NewSectionReader(from, 0, from.Size()), from}, nil
}

// recorded judges by what the builds' manifests say.
type recorded struct{}

// Knows reports false: there is nothing to remember.
func (recorded) Knows(*request.Against, *index.Build) bool { return false }

// LoadsAlone lets each group pass, because nothing is loaded here.
func (recorded) LoadsAlone(context.Context, *request.Against, *index.Build) (compilers.CheckResult, error) {
	return compilers.CheckResult{Outcome: compilers.Passed}, nil
}

// Judge judges a build by what its manifest says.
func (recorded) Judge(_ context.Context, a *request.Against, b *index.Build) (judge.Judgement, error) {
	j := judge.Judgement{Verdict: compilers.Unknown, At: time.Now(), Runtime: a.Runtime,
		Reason: "no execution provider was asked whether it suits: that takes a daemon"}
	switch known := a.Runtime != ""; {
	case known && a.Content.Made(b):
		j.Verdict, j.Source = compilers.Optimal, judge.SourceLibrary
		j.Reason = "the same libraries made it; whether this machine has the device nobody was asked"
	case known:
		j.Reason = "other libraries made it, and none was asked whether it suits: that takes a daemon"
	}
	return j, nil
}

// cannotServe returns the error for a build of which one file cannot be served.
func (s *Store) cannotServe(b *index.Build, f index.File, err error) error {
	name := fmt.Sprintf("build %.12s", b.BuildKey)
	unit := name
	if n := len(b.Members); n > 0 {
		unit += fmt.Sprintf(", a group of %d models that is served as a whole or not at all", n)
	}
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), cas.Full(err):
		return err
	case errors.Is(err, fs.ErrPermission):
		return apierr.New(apierr.NotAllowed, err, "%s cannot be read", name).
			WithHint("whoever makes the store a factory image "+readable, s.dir)
	case errors.Is(err, dedupe.ErrNewer):
		return apierr.New(apierr.Version, err, "%s: %s", name, f.Name).
			WithHint("read it with the epcached that packed it, or a later one")
	case packing.Broken(err), errors.As(err, new(*dedupe.ContainerError)):
		return fmt.Errorf("%s: %s: %w", unit, f.Name, err)
	case errors.Is(err, cas.ErrNotFound):
		return apierr.New(apierr.NotFound, nil, "%s: %s is not in %s", unit, f.Name, s.dir).
			WithHint("that store's daemon compiles anew what is lost")
	}
	return apierr.New(apierr.Internal, err, "%s: %s", name, f.Name)
}
