// Package readonly answers requests from a store that no daemon has open, and never writes to it.
package readonly

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
)

// Store is a store that no daemon has open, for example in a factory image, opened read-only. It
// answers with the daemon's look-up, but takes no lock, writes nothing, starts no worker and
// compiles nothing, and it hashes the files each time it serves them.
type Store struct {
	Builds []index.Build // all builds of the store

	dir     string
	uid     uint32 // of the caller
	owner   uint32
	store   *store.Store
	models  *identity.Models
	rights  *rights.Rights
	reports *reports.Reports // an empty value, which look-ups need
}

// readableHint ends hints about files that the caller may not read.
const readableHint = "can let others read it: chmod -R a+rX %s"

// Open opens the store in the state directory dir read-only for the user uid. It fails if a daemon
// has the store open, because the caller can ask that daemon. Problems lists what could not be
// read.
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
			Hint: "a daemon uses it: omit --state"}
	case errors.Is(err, fs.ErrNotExist):
		return nil, apierr.New(apierr.NotFound, nil, "it is not a store: it has no directory "+
			"\"manifests\"").
			WithHint("name the state directory of an epcached")
	case errors.Is(err, fs.ErrPermission):
		return nil, apierr.New(apierr.NotAllowed, err, "the store cannot be read").
			WithHint("only its owner may read a store; the maker of a factory image "+
				""+readableHint, dir)
	case err != nil:
		return nil, err
	}
	s.models = identity.NewModels(&s.store.Index().Memos, time.Now)
	none := func() (none rights.Privileged) { return none }
	s.rights = rights.New(uid, s.store.Index(), none, slog.New(slog.DiscardHandler))
	s.reports = reports.New(reports.Options{Now: time.Now})
	return s, nil
}

// Problems lists the parts of the store that could not be read, one line each.
func (s *Store) Problems() (lines []string) {
	for _, p := range s.store.Index().Problems() {
		lines = append(lines, fmt.Sprintf("%s: %s: %s", p.Kind, p.Object, p.Detail))
	}
	return lines
}

// Find answers a request with the build that the store has for it, after hashing its files; its
// outcome is Hit, or PassThrough for a model that is compiled already. Runtime.Directory may name
// the libraries that the model will be loaded with. Builds of these libraries are optimal, and all
// others unknown, because no library is run to judge them. build, unless empty, is the beginning of
// the build key. A *identity.NeedFilesError says which external data the request lacks.
//
// Without running an execution provider, the devices of a request and so its key are unknown.
// Therefore a build fits if it was made for an equal request and for devices that the request may
// mean. If different builds fit, Find fails with NotFound and lists them. It skips a damaged build
// with a warning, and returns its damage as the error if no other build fits. A request for one
// model of a group is answered if the caller may read the group's files.
//
// The caller closes the answer's View, which prevents a daemon that starts in the meantime from
// removing the files. It is nil if the store has no intact view of the build, because a file is
// packed or the image has no views. Then Open reads the files, and Unpack makes a view elsewhere.
func (s *Store) Find(ctx context.Context, r *request.Request,
	build string) (*request.Answer, error) {
	at, err := request.NewAttempt(r.Canonical(nil), jobs.NewProgressReporter(nil, time.Now()))
	if err != nil {
		return nil, err
	}
	at.Peer = request.Peer{UID: s.uid}
	if at, err = at.WithIdentity(ctx, s.models); err != nil {
		return nil, err
	}
	at.Scopes = nil // the plan lists the builds, because no request key is known
	if at.Identity.Compiled {
		return &request.Answer{Outcome: request.PassThrough, ModelDigest: at.Identity.Digest,
			Why: "the model is compiled already"}, nil
	}
	f := &search{Store: s, build: build, why: "never compiled for this request"}
	if build != "" {
		f.why = fmt.Sprintf("no build of this model has the key prefix %q", build)
	}
	rc, err := libraries(ctx, r)
	if err != nil {
		return nil, err
	}
	if at, err = f.withPlan(ctx, at.WithRuntime(rc.Spec.Directory, rc)); err != nil {
		return nil, err
	}
	serve := func([]compilers.EP) request.Policy {
		return request.Policy{Unknown: request.PolicyServe}
	}
	builds := lookup.New(lookup.Options{Store: s.store, Rights: s.rights, Reports: s.reports,
		Judge: manifestJudge{}, Policy: serve, Now: time.Now, Planned: f.withPlan, Lease: s.lease,
		Pass: f.notePassed})
	found, err := builds.Find(ctx, at)
	a := builds.FillAnswer(found.Answer, at)
	if a == nil && err == nil && f.several == nil {
		a, err = builds.FindMember(ctx, at)
	}
	if err != nil {
		return nil, err
	}
	if a == nil {
		return nil, f.notFoundError(r)
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

// Open opens a file of the answer's build, whole or packed, for reading it once. Find has verified
// it; a caller that reads it later should verify it again.
func (s *Store) Open(a *request.Answer, f index.File) (io.ReadCloser, error) {
	from, err := s.store.Packing().OpenUnverified(f.Digest)
	if err != nil {
		return nil, s.cannotServe(a.Build, f, err)
	}
	return struct {
		io.Reader
		io.Closer
	}{io.NewSectionReader(from, 0, from.Size()), from}, nil
}

// manifestJudge judges builds by their manifests only.
type manifestJudge struct{}

// IsKnown reports false, because manifestJudge remembers no judgement.
func (manifestJudge) IsKnown(*request.JudgeTarget, *index.Build) bool { return false }

// LoadsAlone accepts each group, because no worker loads it here.
func (manifestJudge) LoadsAlone(context.Context, *request.JudgeTarget,
	*index.Build) (compilers.CheckResult, error) {
	return compilers.CheckResult{Outcome: compilers.Passed}, nil
}

// Judge judges a build by its manifest.
func (manifestJudge) Judge(_ context.Context, a *request.JudgeTarget,
	b *index.Build) (judge.Judgement, error) {
	j := judge.Judgement{Verdict: compilers.Unknown, At: time.Now(), Runtime: a.Runtime,
		Reason: "its compatibility was not checked: that needs a daemon"}
	switch known := a.Runtime != ""; {
	case known && a.Content.MadeBuild(b):
		j.Verdict, j.Source = compilers.Optimal, judge.SourceLibrary
		j.Reason = "the same libraries compiled it; the device was not checked"
	case known:
		j.Reason = "other libraries compiled it, and its compatibility was not checked: that " +
			"needs a daemon"
	}
	return j, nil
}

// cannotServe returns the error for a build with a file that cannot be served.
func (s *Store) cannotServe(b *index.Build, f index.File, err error) error {
	name := fmt.Sprintf("build %.12s", b.BuildKey)
	unit := name
	if n := len(b.Members); n > 0 {
		unit += fmt.Sprintf(", a group of %d models that must be requested together", n)
	}
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded),
		cas.IsDiskFull(err):
		return err
	case errors.Is(err, fs.ErrPermission):
		return apierr.New(apierr.NotAllowed, err, "%s cannot be read", name).
			WithHint("the maker of a factory image "+readableHint, s.dir)
	case errors.Is(err, dedupe.ErrNewer):
		return apierr.New(apierr.Version, err, "%s: %s", name, f.Name).
			WithHint("read it with the epcached that packed it, or a later one")
	case packing.IsDamage(err), errors.As(err, new(*dedupe.BaseError)):
		return fmt.Errorf("%s: %s: %w", unit, f.Name, err)
	case errors.Is(err, cas.ErrNotFound):
		return apierr.New(apierr.NotFound, nil, "%s: %s is not in %s", unit, f.Name, s.dir).
			WithHint("that store's daemon recompiles lost builds")
	}
	return apierr.New(apierr.Internal, err, "%s: %s", name, f.Name)
}

// search is one look-up, with the reasons why it has found nothing so far.
type search struct {
	*Store
	build string // beginning of the wanted build key

	why     string   // why no build fits
	passed  error    // why the first build that fits is not served; nil if none was skipped
	several error    // the error if different builds fit
	notes   []string // a warning for each skipped build
}

// libraries hashes the libraries of the runtime that the request names, without loading them. It
// returns empty contents if the request names no directory.
func libraries(ctx context.Context, r *request.Request) (*runtimes.Content, error) {
	rc := &runtimes.Content{Digests: make(map[string]cas.Digest)}
	if r.Runtime.Directory == "" {
		return rc, nil
	}
	var err error
	if rc.Spec, err = compilers.Find(r.Runtime.Directory); err != nil {
		return nil, &apierr.Error{Class: apierr.Unavailable, Text: err.Error(), Err: err}
	}
	for _, l := range rc.Spec.EPs {
		if rc.Digests[l.EP], err = runtimes.LibraryDigest(ctx, l); err != nil {
			return nil, apierr.New(apierr.Unavailable, err, "runtime %q", r.Runtime.Directory)
		}
	}
	return rc, nil
}

// withPlan returns the attempt with a plan that is made without running an execution provider, and
// has the builds that fit.
func (f *search) withPlan(ctx context.Context, at *request.Attempt) (_ *request.Attempt,
	err error) {
	p := &request.Plan{}
	p.Canonical, err = at.Terms().Record(ctx, allOptions(at.Request), identity.UnresolvedDevices)
	if err != nil {
		return nil, err
	}
	for _, ep := range at.EPs {
		p.EPs = append(p.EPs, compilers.EP{Name: ep.Name})
	}
	known := at.Content.Spec.Directory != ""
	p.Fitting = f.matching(&p.Canonical, at.Content.Spec.ORTVersion)
	if len(p.Fitting) > 0 && known {
		if p.EPs, err = runtimes.ResolveEPs(at.EPs, p.Canonical.EPs, at.Content); err != nil {
			return nil, err
		}
	}
	made := func(b *index.Build) bool { return known && at.Content.MadeBuild(b) }
	own := slices.DeleteFunc(slices.Clone(p.Fitting), func(b *index.Build) bool { return !made(b) })
	switch others := slices.DeleteFunc(slices.Clone(p.Fitting), made); {
	case areDifferent(own):
		f.several, p.Fitting = f.ambiguousError(at.Name, own), nil
	case areDifferent(others):
		f.several, p.Fitting = f.ambiguousError(at.Name, others), own
	}
	return at.WithPlan(p), nil
}

// allOptions allows every option of the request: options that an administrator permitted are in the
// builds' records, and nothing is compiled here.
func allOptions(r *request.Request) (all identity.Allowed) {
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

// matching lists the builds that were made for the request and may be served to that version of
// ONNX Runtime, "" if it is unknown. It considers shared builds, the caller's own, and those of the
// store's owner. Builds of other users are not served, even if the file permissions let the caller
// read them.
func (f *search) matching(wanted *identity.Record, ort string) (fitting []*index.Build) {
	scopes := []string{rights.Shared, rights.OwnScope(rights.Peer{UID: f.uid}),
		rights.OwnScope(rights.Peer{UID: f.owner})}
	for i := range f.Builds {
		b := &f.Builds[i]
		ofModel := b.ModelDigest == wanted.Model || wanted.Member && b.MemberOf(wanted.Model) >= 0
		if !ofModel || !slices.Contains(scopes, b.Scope) ||
			!strings.HasPrefix(b.BuildKey.String(), f.build) {
			continue
		}
		if state := f.store.Index().Journal.StateOf(b.ID); state.Name != index.Current {
			f.why = fmt.Sprintf("the build of %s is %s: %s",
				b.Created.Format(time.RFC3339), state.Name, state.Reason)
			continue
		}
		if _, made := wanted.OnDevicesOf(b); !made {
			f.why = "the model was compiled for other requests only"
			continue
		}
		if why := whyOtherMachine(b); why != "" {
			f.notePassed(b, apierr.New(apierr.NotFound, nil, "build %.12s: %s", b.BuildKey, why).
				WithHint("a daemon tests it before it serves it: omit --state"))
			continue
		}
		if !runtimes.LoadsIR(ort, b.IRVersion) {
			f.notePassed(b, apierr.New(apierr.NotFound, nil, "build %.12s: ONNX Runtime %s wrote "+
				"its graph in IR version %d, which %s does not load", b.BuildKey, b.ORTVersion,
				b.IRVersion, ort).WithHint("a daemon recompiles it: omit --state"))
			continue
		}
		fitting = append(fitting, b)
	}
	return fitting
}

// whyOtherMachine returns why a build may load here but fail when it runs, "" if it should not: its
// execution provider states no hardware, and the processor it was made on is unknown or of another
// class.
func whyOtherMachine(b *index.Build) string {
	for i := range b.EPs {
		ep := &b.EPs[i]
		made, here := ep.HardwareArchitecture, compilers.ProcessorClass()
		info, _ := compilers.EPByName(ep.Name)
		absent := func(device string) bool {
			return info.TargetAbsent != "" && strings.HasPrefix(device, info.TargetAbsent+" ")
		}
		switch {
		case ep.TookNone, slices.ContainsFunc(ep.Devices, absent):
		case made == "":
			return ep.Name + " states no hardware, and the machine that compiled it is unknown"
		case !compilers.IsMachineClass(made) || !strings.Contains(made, "cpu:"):
		case !strings.Contains(made, here):
			return fmt.Sprintf("it was compiled on a machine of class %s, and this one is "+
				"%s", made, here)
		}
	}
	return ""
}

// areDifferent reports whether the builds are not all equal, so that without running an execution
// provider the wanted one is unknown.
func areDifferent(builds []*index.Build) bool {
	return slices.ContainsFunc(builds, func(b *index.Build) bool {
		return b.BuildKey != builds[0].BuildKey
	})
}

// ambiguousError returns the error that lists several builds that fit.
func (f *search) ambiguousError(model string, builds []*index.Build) error {
	var lines []string
	for _, b := range builds {
		var makers []string
		for _, ep := range b.EPs {
			makers = append(makers, fmt.Sprintf("%s %s, SDK %s, for %s (%s)", ep.Name, ep.Version,
				ep.SDKVersion, ep.HardwareArchitecture, strings.Join(ep.Devices, ", ")))
		}
		line := fmt.Sprintf("%.12s by %s", b.BuildKey, strings.Join(makers, " and "))
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return apierr.New(apierr.NotFound, nil, "%d different builds for model %q in %s: %s",
		len(lines), model, f.dir, strings.Join(lines, "; ")).
		WithHint("choose one: --build KEY, a device, or --runtime DIR with the libraries that " +
			"will load it")
}

// notePassed records that a build that fits is not served.
func (f *search) notePassed(b *index.Build, err error) {
	f.passed = cmp.Or(f.passed, err)
	f.notes = append(f.notes, fmt.Sprintf("the build of %s is skipped: %s",
		b.Created.Format(time.RFC3339), err))
}

// notFoundError returns the error of a search without an answer.
func (f *search) notFoundError(r *request.Request) error {
	hint := "a daemon compiles it: omit --state"
	if f.build != "" {
		hint = "without --build any fitting build is used"
	}
	return cmp.Or(f.passed, f.several,
		error(apierr.New(apierr.NotFound, nil, "no build for model %q in %s: %s",
			r.Name, f.dir, f.why).WithHint("%s", hint)))
}
