// Package lookup finds the build that answers a request, and takes the lease on its view.
package lookup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
)

// Judge decides how builds suit a runtime.
type Judge interface {
	// Judge judges a build. It loads the build if the result could change whether it is served.
	Judge(context.Context, *request.JudgeTarget, *index.Build) (judge.Judgement, error)
	// IsKnown reports whether Judge would return a remembered judgement.
	IsKnown(*request.JudgeTarget, *index.Build) bool
	// LoadsAlone loads each model of a group without the others.
	LoadsAlone(context.Context, *request.JudgeTarget, *index.Build) (compilers.CheckResult, error)
}

// Options are the dependencies of a Lookup.
type Options struct {
	Store   *store.Store
	Rights  *rights.Rights
	Reports *reports.Reports
	Judge   Judge
	Policy  func([]compilers.EP) request.Policy
	Now     func() time.Time

	// WhyNone returns why the last build of a request does not exist any more, "" if unknown; may
	// be nil.
	WhyNone func(rights.Peer, index.RequestKey) string
	// Planned returns the attempt with its plan.
	Planned func(context.Context, *request.Attempt) (*request.Attempt, error)
	// Lease takes the lease on a build's view; nil: [Lease].
	Lease func(context.Context, *store.Store, *index.Build,
		func(phase string)) (*request.Answer, error)
	// Pass is called for a build that fits but cannot be served. If it is nil, damaged builds are
	// withheld.
	Pass func(*index.Build, error)
	// Served is called for each build that is served; may be nil.
	Served func(*request.Attempt, *index.Build, judge.Judgement)
	// Warnings returns further warnings for a build; may be nil.
	Warnings func(index.BuildID) []string
}

// Lookup finds builds. Make one with New. Its methods may be called by several goroutines.
type Lookup struct{ o Options }

// New returns a Lookup.
func New(o Options) *Lookup {
	if o.Lease == nil {
		o.Lease = Lease
	}
	return &Lookup{o}
}

// Found is the result of a look-up.
type Found struct {
	Answer *request.Answer // nil if there is no build to serve
	Why    string          // why there is none
	Stale  bool            // there are builds, but none may be loaded with this runtime
	// why the build that a compile would make again is withheld from the caller, "" if it is not
	Withheld string
}

// Find finds the best build for the caller's runtime, and leases its view, or returns why not.
func (l *Lookup) Find(ctx context.Context, at *request.Attempt) (Found, error) {
	found := Found{Why: "never compiled for this request"}
	if at.Plan.Outside {
		found.Why += " with these libraries"
	}
	l.o.Store.Layers.Follow()
	some := false
	for one, err := range l.inOrder(ctx, at, l.StoredBuilds(at.Plan, at.Scopes)) {
		if err != nil {
			return found, err
		}
		some = true
		b := one.Build
		switch {
		case at.Plan.Outside && !at.Plan.MadeExactly(b): // cannot be judged without the libraries
		case one.withheld:
			found.Why = one.Refused
			if at.Plan.MadeExactly(b) {
				found.Withheld = l.o.Reports.WhyWithheld(b.ID, at.Peer.UID)
			}
		case cas.IsUnsound(one.notTried) || errors.Is(one.notTried, cas.ErrNotFound):
			found.Why = l.o.Store.WithholdDamaged(ctx, b, one.notTried)
		case one.Refused != "":
			found.Why = fmt.Sprintf("the build of %s by %s is %s: %s",
				b.Created.Format(time.RFC3339),
				judge.MakerNames(b), one.Judgement.Verdict, one.Refused)
			found.Stale = true
		default:
			if err := l.serve(ctx, at, b, one.Judgement, &found); found.Answer != nil ||
				err != nil {
				return found, err
			}
		}
	}
	if !some && l.o.WhyNone != nil {
		if gone := l.o.WhyNone(at.Peer, at.Plan.RequestKey); gone != "" {
			found.Why = gone
		}
	}
	return found, nil
}

// FindExact finds and leases a build that the plan would make and that accept accepts, nil if there
// is none.
func (l *Lookup) FindExact(ctx context.Context, at *request.Attempt,
	accept func(*index.Build) bool) *request.Answer {
	l.o.Store.Layers.Follow()
	for b, err := range l.StoredBuilds(at.Plan, at.Scopes) {
		if err != nil {
			return nil
		}
		if at.Plan.MadeExactly(b) && l.WhyWithheld(at, b) == "" {
			var found Found
			if !accept(b) || l.serve(ctx, at, b, at.Plan.OwnJudgement(b, at.RuntimeName),
				&found) != nil {
				return nil
			}
			return found.Answer
		}
	}
	return nil
}

// serve serves the build, or stores in found why it cannot be served.
func (l *Lookup) serve(ctx context.Context, at *request.Attempt, b *index.Build, j judge.Judgement,
	found *Found) error {
	a, err := l.o.Lease(ctx, l.o.Store, b, at.Phase)
	switch {
	case err == nil:
		a.Outcome, a.Compatibility, a.Why = request.Hit, j, j.Reason
		if b.Layer != "" {
			a.Why += "; served from layer " + b.Layer
		}
		found.Answer = a
		l.countHit(b)
		if l.o.Served != nil {
			l.o.Served(at, b, j)
		}
		return nil
	case ctx.Err() != nil:
		return request.ContextError(ctx, at.Name)
	case l.o.Pass != nil:
		l.o.Pass(b, err)
		return nil
	case errors.Is(err, store.ErrRemoved):
		found.Why = store.ErrRemoved.Error()
	case errors.Is(err, packing.ErrNoSpace):
		return noUnpackSpace(b, err)
	default:
		found.Why = l.o.Store.WithholdDamaged(ctx, b, err)
	}
	// Skip it in later look-ups of this request, so that the model is compiled instead.
	*at.SkipServing = append(*at.SkipServing, b.ID)
	return nil
}

// countHit counts a hit in memory. The index stores it within seconds.
func (l *Lookup) countHit(b *index.Build) {
	l.o.Store.Index().Uses.Add(b.ID, l.o.Now(), 1, b.CompileSeconds)
	l.o.Store.Index().Counters.Add("hits", 1)
	if b.Layer != "" {
		l.o.Store.Index().Counters.Add("layer_hits", 1)
	}
	l.o.Store.Index().Counters.Add("saved_milliseconds", uint64(b.CompileSeconds*1000))
}

// noUnpackSpace returns the error of a request for a build that cannot be unpacked for lack of
// space. The model is not compiled instead, because the result would not fit either.
func noUnpackSpace(b *index.Build, err error) error {
	err = fmt.Errorf("it is stored packed, and there is no space to unpack it: %w", err)
	return request.StoreError(err, b.ModelName)
}

// FillAnswer sets the fields that every answer with a build has. It returns nil for no answer.
func (l *Lookup) FillAnswer(a *request.Answer, at *request.Attempt) *request.Answer {
	if a == nil {
		return nil
	}
	a.RequestKey, a.ModelDigest, a.Record = at.Plan.RequestKey, at.Plan.Canonical.Model,
		at.Plan.RecordJSON
	a.Runtime, a.SessionOptions = at.RuntimeName, at.SessionOptions
	// An application that was granted a claim compiles at this level.
	a.GraphOptimizationLevel = at.Plan.Canonical.GraphOptimizationLevel
	if a.Build != nil {
		a.SessionOptions = a.Build.SessionOptions
		a.GraphOptimizationLevel = cmp.Or(a.Compatibility.Level, a.Build.GraphOptimizationLevel)
		a.Warnings = append(a.Warnings, a.Build.Warnings...)
		if l.o.Warnings != nil {
			a.Warnings = append(a.Warnings, l.o.Warnings(a.Build.ID)...)
		}
		a.FillMembers(at.Request, at.Plan.Canonical.Model)
		l.o.Rights.RecordSeen(at.Peer, a.Build)
	}
	for _, name := range slices.Sorted(maps.Keys(at.FreeDimensions)) {
		if !slices.Contains(at.Identity.FreeDims, name) {
			a.Warnings = append(a.Warnings,
				fmt.Sprintf("no input of the model has a free dimension %q; %s",
					name, namedDimensions(at.Identity.FreeDims)))
		}
	}
	a.ProviderOptions = make(map[string]map[string]string, len(at.EPs))
	for _, ep := range at.Plan.EPs {
		options := ep.Options
		if loads := at.Superseded.Loads[ep.Name]; len(loads) > 0 {
			options = maps.Clone(options)
			maps.Copy(options, loads)
		}
		a.ProviderOptions[cmp.Or(at.Named[ep.Name], ep.Name)] = options
	}
	a.Warnings = append(a.Warnings, at.Superseded.Warnings...)
	return a
}

// namedDimensions returns the free dimensions of a model's inputs as text for messages.
func namedDimensions(names []string) string {
	if len(names) == 0 {
		return "none of them is free"
	}
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = strconv.Quote(name)
	}
	return "they have " + strings.Join(quoted, ", ")
}

// FindMember finds a group that contains the request's model and was requested with the same
// options, nil if there is none. A user gets a group only after an earlier request with all of its
// models, because a request with one model does not prove that the user has the others.
func (l *Lookup) FindMember(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	member, err := l.GroupAttempt(ctx, at)
	if member == nil || err != nil {
		return nil, err
	}
	found, err := l.Find(ctx, member)
	if found.Answer == nil || err != nil {
		return nil, err
	}
	a := l.FillAnswer(found.Answer, member)
	a.RequestKey, a.Record = at.Plan.RequestKey, at.Plan.RecordJSON
	a.Why = "part of a group of models compiled together: " + a.Why
	return a, nil
}

// GroupAttempt plans the request as one for a group that contains its model. It returns nil if
// there is no such group.
func (l *Lookup) GroupAttempt(ctx context.Context, at *request.Attempt) (*request.Attempt, error) {
	if len(at.Identity.Group) > 0 || at.Embed {
		return nil, nil
	}
	member := at.WithRequest(at.Sharing())
	member.AsMember = true
	member, err := l.o.Planned(ctx, member)
	if err != nil && ctx.Err() == nil {
		return nil, nil // the request itself is answered without the group
	}
	return member, err
}

// whyNotAlone returns why a group's build is not served for one of its models alone, "" if it is.
// It is served if each model loaded without the others, either when an equal library compiled the
// group or now.
func (l *Lookup) whyNotAlone(ctx context.Context, at *request.Attempt,
	one *Candidate) (string, error) {
	const notKnownAlone = "whether a single model of this group loads is unknown: "
	b := one.Build
	if !at.AsMember || b.LoadCheck == compilers.Passed &&
		one.Judgement.Source == judge.SourceLibrary {
		return "", nil
	}
	checked, err := l.o.Judge.LoadsAlone(ctx, at.Plan.JudgeTarget(at.RuntimeName, at.Content), b)
	switch {
	case err != nil && runtimes.IsTransient(ctx, err):
		return "", err
	case err != nil:
		return notKnownAlone + err.Error(), nil
	case checked.Outcome == compilers.Failed:
		return "the models of this group load as a group only: " +
			"" + compilers.LastWords(checked.Text), nil
	case checked.Outcome != compilers.Passed:
		return notKnownAlone + "it cannot be tested on this machine", nil
	case checked.GraphOptimizationLevel == "disable_all" &&
		b.GraphOptimizationLevel != "disable_all":
		return "a single model of this group loads only without graph optimization", nil
	}
	return "", nil
}

// Unpacking is the phase of a request that waits while a packed build is unpacked.
const Unpacking = "unpacking"

// Lease takes a lease on the build's view, after comparing the stamp of each file with that of the
// verified bytes.
func Lease(ctx context.Context, st *store.Store, b *index.Build,
	phase func(string)) (*request.Answer, error) {
	done, err := st.BeginServing(b.ID)
	if err != nil {
		return nil, err
	}
	defer done()
	for attempt := 0; ; attempt++ {
		v, err := View(ctx, st, b, phase)
		if err != nil {
			return nil, st.AsErrRemoved(b.ID, err)
		}
		a, err := Leased(b, v)
		if errors.Is(err, fs.ErrNotExist) && attempt < 3 {
			// The build was removed between the check and the lease.
			st.Views().Drop(b.ID, v, 0)
			continue
		}
		return a, err
	}
}

// Leased answers with a lease on the view.
func Leased(b *index.Build, v *views.View) (*request.Answer, error) {
	f, err := v.Lease()
	if err != nil {
		return nil, err
	}
	return &request.Answer{Build: b, View: f, Path: v.Path(), Graph: v.GraphPath(), LeasedView: v},
		nil
}

// View returns the build's view, and reports progress to the request that waits for it.
func View(ctx context.Context, st *store.Store, b *index.Build,
	phase func(string)) (*views.View, error) {
	return st.View(ctx, b, store.Phases{Phase: phase, Unpacked: unpackProgress(ctx)})
}

type progressKey struct{}

// WithProgress returns a context with which unpacking reports its progress to the request.
func WithProgress(ctx context.Context, t *jobs.ProgressReporter) context.Context {
	if t == nil {
		return ctx
	}
	return context.WithValue(ctx, progressKey{}, t)
}

// unpackProgress returns the function that reports unpacked bytes, nil if no request waits.
func unpackProgress(ctx context.Context) func(done, total int64) {
	t, _ := ctx.Value(progressKey{}).(*jobs.ProgressReporter)
	if t == nil {
		return nil
	}
	return func(done, total int64) {
		t.Report(request.Progress{Phase: Unpacking, Done: done, Total: total})
	}
}
