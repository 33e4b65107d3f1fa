// Package lookup finds the build that a request is answered with, and takes the lease on its view.
package lookup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
)

// Judge says how builds suit a runtime.
type Judge interface {
	// Judge judges a build. It loads it where that could change what becomes of it.
	Judge(context.Context, *request.Against, *index.Build) (judge.Judgement, error)
	// Knows reports whether Judge need not work anything out.
	Knows(*request.Against, *index.Build) bool
	// LoadsAlone loads the models of a group without sharing.
	LoadsAlone(context.Context, *request.Against, *index.Build) (compilers.CheckResult, error)
}

// Options say what a Lookup works with.
type Options struct {
	Index   *index.Index
	Store   *store.Store
	Rights  *rights.Rights
	Reports *reports.Reports
	Judge   Judge
	Policy  func([]compilers.EP) request.Policy
	Now     func() time.Time

	// WhyNone returns what became of the last build of a request, "" if that is not known; may be nil.
	WhyNone func(rights.Peer, index.RequestKey) string
	// Planned returns the attempt with its plan.
	Planned func(context.Context, *request.Attempt) (*request.Attempt, error)
	// Lease takes the lease on a build's view; nil: [Lease].
	Lease func(context.Context, *store.Store, *index.Build, func(phase string)) (*request.Answer, error)
	// Pass is called for a build that fits and cannot be served; nil: one that is damaged is withheld.
	Pass func(*index.Build, error)
	// Served is called for each build that is served; may be nil.
	Served func(*request.Attempt, *index.Build, judge.Judgement)
	// Warnings returns what more is told of a build; may be nil.
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
	Answer  *request.Answer // nil: there is no build to serve
	Why     string          // there is none
	Stale   bool            // there are builds, and they must not be loaded with this runtime
	Doubted int             // builds that would be served if the caller had not reported them
}

// Find finds the best build for the caller's runtime, and takes a lease on its view. Without one it
// returns why.
func (l *Lookup) Find(ctx context.Context, at *request.Attempt) (Found, error) {
	found := Found{Why: "never compiled for this request"}
	if at.Plan.Outside {
		found.Why += " with these libraries"
	}
	some := false
	for one, err := range l.inOrder(ctx, at, l.Stored(at.Plan, at.Scopes)) {
		if err != nil {
			return found, err
		}
		some = true
		b := one.Build
		switch {
		case at.Plan.Outside && !at.Plan.MadeExactly(b): // nothing is known of it
		case one.barred:
			found.Why = one.Refused
			l.countDoubt(at, b, &found)
		case cas.Unsound(one.untried) || errors.Is(one.untried, cas.ErrNotFound):
			found.Why = l.o.Store.WithholdDamaged(ctx, b, one.untried)
		case one.Refused != "":
			found.Why = fmt.Sprintf("the build of %s by %s is %s: %s", b.Created.Format(time.RFC3339),
				judge.MakerNames(b), one.Judgement.Verdict, one.Refused)
			found.Stale = true
		default:
			if err := l.try(ctx, at, b, one.Judgement, &found); found.Answer != nil || err != nil {
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

// countDoubt counts a build that is not served only because the caller reported it.
func (l *Lookup) countDoubt(at *request.Attempt, b *index.Build, found *Found) {
	switch {
	case !at.Plan.MadeExactly(b) || l.o.Reports.Doubt(b.ID, at.Peer.UID) == "":
	case at.Plan.Outside: // an earlier one is superseded, and removed
		found.Doubted = l.o.Reports.Doubted(at.Plan.RequestKey, at.Peer.UID)
	default:
		found.Doubted++
	}
}

// try serves the build, or notes in found why it cannot be.
func (l *Lookup) try(ctx context.Context, at *request.Attempt, b *index.Build, j judge.Judgement,
	found *Found) error {
	a, err := l.o.Lease(ctx, l.o.Store, b, at.Phase)
	switch {
	case err == nil:
		a.Outcome, a.Compatibility, a.Why = request.Hit, j, j.Reason
		found.Answer = a
		l.used(b)
		if l.o.Served != nil {
			l.o.Served(at, b, j)
		}
		return nil
	case ctx.Err() != nil:
		return request.ContextError(ctx, at.Name)
	case l.o.Pass != nil:
		l.o.Pass(b, err)
		return nil
	case errors.Is(err, store.ErrGone):
		found.Why = store.ErrGone.Error()
	case errors.Is(err, packing.ErrNoRoom):
		return noCopy(b, err)
	default:
		found.Why = l.o.Store.WithholdDamaged(ctx, b, err)
	}
	// Until it is removed, it is not to be found again instead of being compiled.
	*at.Unserved = append(*at.Unserved, b.ID)
	return nil
}

// used counts a hit, in memory: the index writes it down within seconds.
func (l *Lookup) used(b *index.Build) {
	l.o.Index.Uses.Add(b.ID, l.o.Now(), 1, b.CompileSeconds)
	l.o.Index.Counters.Add("hits", 1)
	l.o.Index.Counters.Add("saved_milliseconds", uint64(b.CompileSeconds*1000))
}

// noCopy is the error for a build of which there is no space for a copy: a compile would have none either.
func noCopy(b *index.Build, err error) error {
	err = fmt.Errorf("it is kept packed, and there is no room to unpack it: %w", err)
	return request.StoreError(err, b.ModelName)
}
