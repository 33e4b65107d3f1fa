package readonly

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// finding is one look-up in a store that is only read, and why it found nothing so far.
type finding struct {
	*Store
	build string // how the build's key begins

	why     string   // no build fits
	passed  error    // why the first that fits is not served; nil: none was passed over
	several error    // different builds fit; nil: at most one does
	notes   []string // one for each that was passed over
}

// libraries hashes the libraries of the runtime that the request names, without loading them. It
// returns contents without a directory where the request names none.
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

// planned is the attempt with a plan that is made without asking an execution provider, and has the
// builds that fit.
func (f *finding) planned(ctx context.Context, at *request.Attempt) (_ *request.Attempt, err error) {
	p := &request.Plan{}
	p.Canonical, err = at.Terms().Record(ctx, everyOption(at.Request), identity.StatedDevices)
	if err != nil {
		return nil, err
	}
	for _, ep := range at.EPs {
		p.EPs = append(p.EPs, compilers.EP{Name: ep.Name})
	}
	known := at.Content.Spec.Directory != ""
	if p.Fitting = f.fitting(&p.Canonical); len(p.Fitting) > 0 && known {
		if p.EPs, err = runtimes.ResolveEPs(at.EPs, p.Canonical.EPs, at.Content); err != nil {
			return nil, err
		}
	}
	made := func(b *index.Build) bool { return known && at.Content.Made(b) }
	own := slices.DeleteFunc(slices.Clone(p.Fitting), func(b *index.Build) bool { return !made(b) })
	switch others := slices.DeleteFunc(slices.Clone(p.Fitting), made); {
	case different(own):
		f.several, p.Fitting = f.ambiguous(at.Name, own), nil
	case different(others):
		f.several, p.Fitting = f.ambiguous(at.Name, others), own
	}
	return at.WithPlan(p), nil
}

// everyOption allows every option of the request: what an administrator once allowed is in the
// builds' records, and nothing is compiled here.
func everyOption(r *request.Request) (all identity.Allowed) {
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

// fitting lists the builds that were made for the request and may be served. Builds for all users,
// the caller's own, and those of the store's owner are considered: what another user put is served
// to no one else, even where file rights would let one read it.
func (f *finding) fitting(wanted *identity.Record) (fitting []*index.Build) {
	scopes := []string{rights.Shared, rights.OwnScope(rights.Peer{UID: f.uid}),
		rights.OwnScope(rights.Peer{UID: f.owner})}
	for i := range f.Builds {
		b := &f.Builds[i]
		ofModel := b.ModelDigest == wanted.Model || wanted.Member && b.MemberOf(wanted.Model) >= 0
		if !ofModel || !slices.Contains(scopes, b.Scope) || !strings.HasPrefix(b.BuildKey.String(), f.build) {
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
		if why := ofAnotherMachine(b); why != "" {
			f.pass(b, apierr.New(apierr.NotFound, nil, "build %.12s: %s", b.BuildKey, why).
				WithHint("a daemon runs it once before it serves it: the same without --state"))
			continue
		}
		fitting = append(fitting, b)
	}
	return fitting
}

// ofAnotherMachine says why a build may load here and fail when it is run: its execution provider
// states no hardware, and the processor that it was made on is of another class, or not known.
func ofAnotherMachine(b *index.Build) string {
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
			return ep.Name + " states no hardware, and the machine that it was made on is not known"
		case !compilers.IsMachineClass(made) || !strings.Contains(made, "cpu:"):
		case !strings.Contains(made, here):
			return fmt.Sprintf("it was made on a machine of class %s, and this one is %s", made, here)
		}
	}
	return ""
}

// different reports whether the builds are not all equal: which is meant is not known unless an
// execution provider is run.
func different(builds []*index.Build) bool {
	return slices.ContainsFunc(builds, func(b *index.Build) bool { return b.BuildKey != builds[0].BuildKey })
}

// ambiguous names the builds that fit.
func (f *finding) ambiguous(model string, builds []*index.Build) error {
	var lines []string
	for _, b := range builds {
		var makers []string
		for _, ep := range b.EPs {
			makers = append(makers, fmt.Sprintf("%s %s, SDK %s, for %s (%s)", ep.Name, ep.Version, ep.SDKVersion,
				ep.HardwareArchitecture, strings.Join(ep.Devices, ", ")))
		}
		line := fmt.Sprintf("%.12s by %s", b.BuildKey, strings.Join(makers, " and "))
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return apierr.New(apierr.NotFound, nil, "%d different builds for model %q in %s: %s", len(lines), model,
		f.dir, strings.Join(lines, "; ")).
		WithHint("say which: --build KEY, a device, or --runtime DIR with the libraries that it will be loaded with")
}

// pass notes that a build that fits is not served.
func (f *finding) pass(b *index.Build, err error) {
	f.passed = cmp.Or(f.passed, err)
	f.notes = append(f.notes, fmt.Sprintf("the build of %s is passed over: %s",
		b.Created.Format(time.RFC3339), err))
}

// none says why there is no answer.
func (f *finding) none(r *request.Request) error {
	hint := "a daemon compiles it: the same without --state"
	if f.build != "" {
		hint = "without --build any build that fits is taken"
	}
	return cmp.Or(f.passed, f.several, error(apierr.New(apierr.NotFound, nil, "no build for model %q in %s: %s",
		r.Name, f.dir, f.why).WithHint("%s", hint)))
}
