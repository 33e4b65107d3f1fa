package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// The outcomes of a request.
const (
	Hit         = "hit"
	Compiled    = "compiled"    // by this request
	Waited      = "waited"      // by another request for the same, which this one waited for
	PassThrough = "passthrough" // the model is compiled already: load it as it is
	Key         = "key"         // only the key was asked for
	Explained   = "explanation" // only the decision was asked for, and its reasons
	Later       = "background"  // it is being compiled: Answer.Job tells which job it is
	Claimed     = "claim"       // the caller is to compile it: Answer.Claim says how
	Taken       = "put"         // what the caller compiled is kept: the answer to a Put
	Adopted     = "adopted"     // the caller's compiled model is kept now
)

// Answer is what a request got. View, where there is one, is the caller's to close: it is the lease.
type Answer struct {
	Outcome       string
	RequestKey    index.RequestKey
	ModelDigest   cas.Digest
	Record        string       // the request record as JSON
	Build         *index.Build // nil for PassThrough and Key; shared: read only
	Unkept        bool         // nothing of Build is kept: its files go with View, and nobody made digests of them
	Compatibility judge.Judgement
	Why           string
	Explanation   *wire.Explanation // for Explain
	Runtime       string            // what the answer is for
	Job           string            // of Later: what Follow and CancelJobs name
	Claim         *Claim            // of Claimed

	view  *views.View // that View is of
	View  *os.File
	Path  string // of the view
	Graph string // relative to the view: "<id>/<graph>"

	Members []Member // of a group: all of them in order, which is the order to load several of them in one process; else none
	Member  int      // which of them was asked for

	ProviderOptions        map[string]map[string]string // by EP: load the graph with exactly these
	SessionOptions         map[string]string
	GraphOptimizationLevel string // "" where it does not matter
	Warnings               []string
}

// Acquire answers one request: with the build that there is, or with one that is compiled now. progress is called
// at each change of phase, from any goroutine, and not after Acquire returned.
func (c *Cache) Acquire(ctx context.Context, r *Request, progress func(Progress)) (*Answer, error) {
	return c.acquireResumed(ctx, r, resumedJob{}, progress)
}

// acquireResumed is Acquire for a job that an earlier daemon did not finish.
func (c *Cache) acquireResumed(ctx context.Context, r *Request, resumed resumedJob,
	progress func(Progress)) (*Answer, error) {
	t := jobs.NewTelling(progress, c.now())
	defer t.End()
	defer c.store.Packer().Asking()()
	ctx = withTelling(ctx, t)
	at, err := newAttempt(r, t)
	if err != nil {
		return nil, err
	}
	at.resumed = resumed
	for tries := 1; ; tries++ {
		a, err := c.acquire(ctx, at)
		moved := errors.Is(err, runtimes.ErrMoving) || errors.Is(err, runtimes.ErrReplaced)
		most := acquireAttempts
		if errors.Is(err, store.ErrGone) {
			moved, most = true, goneAttempts
		}
		if !moved || tries >= most || ctx.Err() != nil {
			if err == nil && a.view != nil && !r.HoldsView {
				c.views.Told(a.view)
			}
			return a, err
		}
		t.Phase("probing") // the runtime changed under the work, or the build is gone: begin again, with what is there now
	}
}

// acquireAttempts bounds how often a request begins again because its runtime is being replaced, goneAttempts for a build that is
// collected, or replaced by another's refresh, each time before it is taken.
const (
	acquireAttempts = 3
	goneAttempts    = 10
)

func (c *Cache) acquire(ctx context.Context, at *attempt) (*Answer, error) {
	at, err := c.identified(ctx, at)
	if err != nil {
		return nil, err
	}
	rt, rc, err := c.runtimes.Resolve(ctx, at.wanted(), at.phase)
	if err != nil && c.bringsLibraries(at.Request, err) {
		a, err := c.answerOwn(ctx, at, err)
		return withoutVerifying(a, at), err
	}
	if err != nil {
		return nil, err
	}
	var slow atomic.Bool
	at = at.withRuntime(rt.Name, rc)
	a, err := c.answer(ctx, at.withPhase(func(name string) {
		slow.Store(true)
		at.phase(name)
	}))
	if err == nil && at.VerifyOutput > 0 {
		if err = c.verifyOutput(ctx, at, a); err != nil && a.View != nil {
			err = errors.Join(err, a.View.Close())
		}
	}
	if err == nil && slow.Load() {
		err = c.unmoved(a, at)
	}
	if err != nil {
		return nil, err
	}
	return a, nil
}

// unmoved refuses an answer that took its time, to verify, to load or to compile something, and is for libraries that
// were replaced meanwhile. One that took none was compared with the files just before.
func (c *Cache) unmoved(a *Answer, at *attempt) error {
	if a.View == nil || at.rc.Stands() {
		return nil
	}
	return errors.Join(apierr.New(apierr.Busy, runtimes.ErrMoving, "model %q: the runtime's libraries changed meanwhile", at.Name).WithHint("ask again when the update is done"), a.View.Close())
}

func (c *Cache) answer(ctx context.Context, at *attempt) (*Answer, error) {
	if at.model.Compiled {
		return c.answerCompiled(ctx, at)
	}
	at, err := c.planned(ctx, at)
	if err != nil {
		return nil, err
	}
	if at.OnMiss == KeyOnly {
		return at.answer(Key), nil
	}
	if at.OnMiss == Explain {
		return c.explain(ctx, at)
	}
	var found search
	if at.OnMiss != Refresh && at.OnMiss != Bypass {
		if found, err = c.lookUp(ctx, at); found.answer != nil || err != nil {
			return c.finish(found.answer, at), err
		}
		if a, err := c.lookUpMember(ctx, at); a != nil || err != nil {
			return a, err
		}
		if found.doubted == 0 {
			if a, err := c.otherForm(ctx, at); a != nil || err != nil {
				return c.finish(a, at), err
			}
		}
		c.index.Counters.Add("misses", 1)
	}
	if at.OnMiss == Fail && !found.stale {
		if f := c.failedBefore(at); f != nil {
			return nil, f.Missing(at.Name)
		}
	}
	if at.OnMiss == Fail {
		if found.running = c.underWay(at); found.running != nil && found.stale {
			found.why += "; it is being compiled now"
		}
	}
	if err := c.mayCompile(at, &found); err != nil {
		return nil, err
	}
	if found.doubted > 0 {
		at = at.apart()
	}
	if err := c.mayReplace(at); err != nil {
		return nil, err
	}
	if at.OnMiss == ForClaim {
		a, err := c.claimOrWait(ctx, at, found.why)
		return c.finish(a, at), err
	}
	if at.OnMiss == Background {
		return c.compileLater(ctx, at, found.why)
	}
	a, err := c.compileOnce(ctx, at, found.why)
	if a != nil && a.Compatibility.Source == "" {
		a.Compatibility = judge.Judgement{Verdict: compilers.Optimal, Source: judge.SourceLibrary, Reason: "made now", At: c.now(), Runtime: at.runtime}
	}
	return c.finish(a, at), err
}

// mayCompile says why a miss is not made good by compiling, if it is not.
func (c *Cache) mayCompile(at *attempt, found *search) error {
	switch {
	case found.doubted >= reports.MaxRounds:
		return errDoubted(at)
	case found.stale && (at.OnMiss == Fail || c.policyOf(at.plan.eps).Unsupported == PolicyFail && at.OnMiss != Refresh):
		return apierr.New(apierr.Stale, nil, "model %q: %s", at.Name, found.why).WithFact("request_key", at.plan.requestKey.String()).
			WithHint("compile it for what is here now: ask with on_miss refresh")
	case at.OnMiss == Fail && found.running != nil:
		return c.notYet(at, found)
	case at.OnMiss == Fail:
		return apierr.New(apierr.NotFound, nil, "no build for model %q: %s", at.Name, found.why).WithFact("request_key", at.plan.requestKey.String()).
			WithHint("compile it: ask again with on_miss wait")
	}
	return nil
}

// mayReplace: a refresh takes the place of the build that there is, and a shared one is not every user's to replace.
func (c *Cache) mayReplace(at *attempt) error {
	if at.OnMiss != Refresh || at.store != "shared" || c.rights.Administrator(at.Peer) {
		return nil
	}
	for b, err := range c.stored(at.plan, []string{at.store}) {
		if err != nil {
			return err
		}
		if b.BuildKey == at.plan.buildKey && c.index.Journal.StateOf(b.ID).Name != index.Damaged {
			return apierr.New(apierr.NotAllowed, nil, "build %s is shared: replacing it is for administrators", at.plan.buildKey).
				WithHint("bypass compiles for this request alone, and store user keeps a build of your own")
		}
	}
	return nil
}

// maxEPs and maxOptions bound what one request may carry.
const (
	maxEPs     = 16
	maxOptions = 1024
)

// check refuses what no request may have.
func (r *Request) check() error {
	switch {
	case r.Graph == nil:
		return apierr.New(apierr.BadRequest, nil, "the request has no model")
	case len(r.EPs) == 0:
		return apierr.New(apierr.BadRequest, nil, "model %q: the request names no execution provider", r.Name).
			WithHint("for example OpenVINOExecutionProvider or QNNExecutionProvider")
	case len(r.EPs) > maxEPs:
		return apierr.New(apierr.BadRequest, nil, "model %q: %d execution providers, more than %d", r.Name, len(r.EPs), maxEPs)
	case len(r.SessionOptions)+len(r.FreeDimensions)+len(r.FreeDimensionsByDenotation) > maxOptions:
		return apierr.New(apierr.BadRequest, nil, "model %q: more than %d options", r.Name, maxOptions)
	}
	if err := r.checkGroup(); err != nil {
		return err
	}
	if r.VerifyOutput < 0 || math.IsNaN(r.VerifyOutput) || math.IsInf(r.VerifyOutput, 0) {
		return apierr.New(apierr.BadRequest, nil, "verify_output %g is no tolerance", r.VerifyOutput)
	}
	switch r.Store {
	case "", "shared", "user", "none":
	default:
		return apierr.New(apierr.BadRequest, nil, "store %q: it is one of shared, user, none", r.Store)
	}
	seen := make(map[string]bool)
	for _, ep := range r.EPs {
		if ep.Name == "" || len(ep.Name) > 200 || strings.ContainsAny(ep.Name, "/\x00\n") {
			return apierr.New(apierr.BadRequest, nil, "execution provider %q: not a name", ep.Name)
		}
		if seen[ep.Name] {
			return apierr.New(apierr.BadRequest, nil, "execution provider %q is named twice", ep.Name)
		}
		seen[ep.Name] = true
	}
	for name, v := range r.FreeDimensions {
		if v <= 0 {
			return apierr.New(apierr.BadRequest, nil, "free dimension %q: %d is not a size", name, v)
		}
	}
	return nil
}

// scopes gives the scope that a build of the request is stored in, "" for none, and those that it is looked for in.
// A model that every local user can read may be shared; what is private stays its user's. wish is the model's own.
func (r *Request) scopes(wish string) (store string, look []string) {
	own := rights.OwnScope(r.Peer)
	store = "shared"
	for _, f := range r.files() {
		if info, err := f.Stat(); err != nil || info.Mode().Perm()&0o004 == 0 {
			store = own
		}
	}
	for _, wish := range []string{wish, r.Store} {
		switch {
		case wish == "none":
			store = ""
		case wish == "user" && store != "":
			store = own
		}
	}
	if store == own {
		return store, []string{own, "shared"}
	}
	return store, []string{"shared", own}
}

// finish fills in what every answer with a build says.
func (c *Cache) finish(a *Answer, at *attempt) *Answer {
	if a == nil {
		return nil
	}
	a.RequestKey, a.ModelDigest, a.Record = at.plan.requestKey, at.plan.canonical.Model, at.plan.recordJSON
	a.Runtime = at.runtime
	a.SessionOptions, a.GraphOptimizationLevel = at.SessionOptions, at.plan.canonical.GraphOptimizationLevel // of a claim: to compile with
	if a.Build != nil {
		a.SessionOptions, a.GraphOptimizationLevel = a.Build.SessionOptions, cmp.Or(a.Compatibility.Level, a.Build.GraphOptimizationLevel)
		a.Warnings = append(a.Warnings, a.Build.Warnings...)
		if !c.readOnly {
			a.Warnings = append(a.Warnings, c.gains.Of(a.Build.ID).Warnings()...)
		}
		a.tellMembers(at.Request, at.plan.canonical.Model)
		c.rights.Saw(at.Peer, a.Build)
	}
	for _, name := range slices.Sorted(maps.Keys(at.FreeDimensions)) {
		if !slices.Contains(at.model.FreeDims, name) {
			a.Warnings = append(a.Warnings, fmt.Sprintf("no input of the model has a free dimension %q; %s", name, namedDimensions(at.model.FreeDims)))
		}
	}
	a.ProviderOptions = make(map[string]map[string]string, len(at.EPs))
	for _, ep := range at.plan.eps {
		a.ProviderOptions[ep.Name] = ep.Options
	}
	return a
}

// namedDimensions lists the free dimensions of a model's inputs, for people.
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

// contextError is the error of a caller that went away, or whose time is over.
func contextError(ctx context.Context, model string) error {
	return apierr.OfContext(ctx, "model %q", model)
}
