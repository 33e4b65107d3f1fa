package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
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
	Compatibility Judgement
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
	t := newTelling(progress, c.now())
	defer t.end()
	defer c.sharing.asking()()
	ctx = withTelling(ctx, t)
	if err := r.check(); err != nil {
		return nil, err
	}
	for attempt := 1; ; attempt++ {
		a, err := c.acquire(ctx, r, t)
		moved := errors.Is(err, errMoving) || errors.Is(err, errReplaced)
		most := acquireAttempts
		if errors.Is(err, errGone) {
			moved, most = true, goneAttempts
		}
		if !moved || attempt >= most || ctx.Err() != nil {
			if err == nil && a.view != nil && !r.HoldsView {
				c.views.Told(a.view)
			}
			return a, err
		}
		t.phase("probing") // the runtime changed under the work, or the build is gone: begin again, with what is there now
	}
}

// acquireAttempts bounds how often a request begins again because its runtime is being replaced, goneAttempts for a build that is
// collected, or replaced by another's refresh, each time before it is taken.
const (
	acquireAttempts = 3
	goneAttempts    = 10
)

func (c *Cache) acquire(ctx context.Context, r *Request, t *telling) (*Answer, error) {
	if err := c.boundAdoption(r); err != nil {
		return nil, err
	}
	id, r, err := c.identifyAll(ctx, r, t.phase)
	if err != nil {
		return nil, err
	}
	rt, rc, err := c.resolve(ctx, r, t.phase)
	if err != nil && c.bringsLibraries(r, err) {
		a, err := c.answerOwn(ctx, r, id, err, t)
		return withoutVerifying(a, r), err
	}
	if err != nil {
		return nil, err
	}
	var slow atomic.Bool
	a, err := c.answer(ctx, r, id, rt, rc, t, func(name string) {
		slow.Store(true)
		t.phase(name)
	})
	if err == nil && r.VerifyOutput > 0 {
		if err = c.verifyOutput(ctx, r, id, rc, a, t.phase); err != nil && a.View != nil {
			err = errors.Join(err, a.View.Close())
		}
	}
	if err == nil && slow.Load() {
		err = c.unmoved(a, r, rc)
	}
	if err != nil {
		return nil, err
	}
	return a, nil
}

// unmoved refuses an answer that took its time, to verify, to load or to compile something, and is for libraries that
// were replaced meanwhile. One that took none was compared with the files just before.
func (c *Cache) unmoved(a *Answer, r *Request, rc *runtimeContent) error {
	if a.View == nil || rc.stands() {
		return nil
	}
	return errors.Join(apierr.New(apierr.Busy, errMoving, "model %q: the runtime's libraries changed meanwhile", r.Name).WithHint("ask again when the update is done"), a.View.Close())
}

func (c *Cache) answer(ctx context.Context, r *Request, id modelIdentity, rt *runtime, rc *runtimeContent, t *telling, phase func(string)) (*Answer, error) {
	if id.Compiled {
		return c.answerCompiled(ctx, ownArtefact{r, id, rt, rc, t, phase})
	}
	p, err := c.plan(ctx, r, id.Digest, rc, phase)
	if err != nil {
		return nil, err
	}
	if r.OnMiss == KeyOnly {
		return &Answer{Outcome: Key, RequestKey: p.requestKey, ModelDigest: id.Digest, Record: p.recordJSON, Runtime: rt.name}, nil
	}
	if r.OnMiss == Explain {
		return c.explain(ctx, r, id, p, rt, rc)
	}
	var found search
	if r.OnMiss != Refresh && r.OnMiss != Bypass {
		if found, err = c.lookUp(ctx, r, p, rt, rc, phase); found.answer != nil || err != nil {
			return c.finish(found.answer, r, id, p, rt), err
		}
		if a, err := c.lookUpMember(ctx, r, id, p, rt, rc, phase); a != nil || err != nil {
			return a, err
		}
		if found.doubted == 0 {
			if a, err := c.otherForm(ctx, r, id, p, rt, rc, phase); a != nil || err != nil {
				return c.finish(a, r, id, p, rt), err
			}
		}
		c.index.Counters.Add("misses", 1)
	}
	if r.OnMiss == Fail && !found.stale {
		if f := c.failedBefore(r, id, p, rc); f != nil {
			return nil, f.Missing(r.Name)
		}
	}
	if r.OnMiss == Fail {
		if found.flight = c.underWay(r, id, p); found.flight != nil && found.stale {
			found.why += "; it is being compiled now"
		}
	}
	if err := c.mayCompile(r, p, rc, &found); err != nil {
		return nil, err
	}
	if found.doubted > 0 {
		r = r.apart()
	}
	if err := c.mayReplace(r, id, p); err != nil {
		return nil, err
	}
	if r.OnMiss == ForClaim {
		a, err := c.claimOrWait(ctx, r, id, p, rc, found.why, t, phase)
		return c.finish(a, r, id, p, rt), err
	}
	if r.OnMiss == Background {
		return c.compileLater(ctx, r, id, p, rt, rc, found.why)
	}
	a, err := c.compileOnce(ctx, r, id, p, rc, found.why, t, phase)
	if a != nil && a.Compatibility.Source == "" {
		a.Compatibility = Judgement{Verdict: compilers.Optimal, Source: sourceLibrary, Reason: "made now", At: c.now(), Runtime: rt.name}
	}
	return c.finish(a, r, id, p, rt), err
}

// mayCompile says why a miss is not made good by compiling, if it is not.
func (c *Cache) mayCompile(r *Request, p *plan, rc *runtimeContent, found *search) error {
	switch {
	case found.doubted >= maxRounds:
		return errDoubted(r, p)
	case found.stale && (r.OnMiss == Fail || c.policyOf(p.eps).Unsupported == PolicyFail && r.OnMiss != Refresh):
		return apierr.New(apierr.Stale, nil, "model %q: %s", r.Name, found.why).WithFact("request_key", p.requestKey.String()).
			WithHint("compile it for what is here now: ask with on_miss refresh")
	case r.OnMiss == Fail && found.flight != nil:
		return c.notYet(r, p, found)
	case r.OnMiss == Fail:
		return apierr.New(apierr.NotFound, nil, "no build for model %q: %s", r.Name, found.why).WithFact("request_key", p.requestKey.String()).
			WithHint("compile it: ask again with on_miss wait")
	}
	return nil
}

// apart is the request of a user who says that the build which all share does not load: what is compiled now is that
// user's own, and the others keep theirs.
func (r *Request) apart() *Request {
	own := *r
	if own.Store != "none" {
		own.Store = "user"
	}
	return &own
}

// mayReplace: a refresh takes the place of the build that there is, and a shared one is not every user's to replace.
func (c *Cache) mayReplace(r *Request, id modelIdentity, p *plan) error {
	scope, _ := c.scopes(r, id)
	if r.OnMiss != Refresh || scope != "shared" || c.rights.Administrator(r.Peer) {
		return nil
	}
	for b, err := range c.stored(p, []string{scope}) {
		if err != nil {
			return err
		}
		if b.BuildKey == p.buildKey && c.index.Journal.StateOf(b.ID).Name != index.Damaged {
			return apierr.New(apierr.NotAllowed, nil, "build %s is shared: replacing it is for administrators", p.buildKey).
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

// check refuses what no request may have, and brings the rest into its one spelling.
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
	return r.fold()
}

// scopes gives the scope that a build of the request is stored in, "" for none, and those that it is looked for in.
// A model that every local user can read may be shared; what is private stays its user's.
func (c *Cache) scopes(r *Request, id modelIdentity) (store string, look []string) {
	own := rights.OwnScope(r.Peer)
	store = "shared"
	for _, f := range r.files() {
		if info, err := f.Stat(); err != nil || info.Mode().Perm()&0o004 == 0 {
			store = own
		}
	}
	for _, wish := range []string{id.Store, r.Store} {
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
func (c *Cache) finish(a *Answer, r *Request, id modelIdentity, p *plan, rt *runtime) *Answer {
	if a == nil {
		return nil
	}
	a.RequestKey, a.ModelDigest, a.Record = p.requestKey, p.canonical.Model, p.recordJSON
	a.Runtime = rt.name
	a.SessionOptions, a.GraphOptimizationLevel = r.SessionOptions, p.canonical.GraphOptimizationLevel // of a claim: to compile with
	if a.Build != nil {
		a.SessionOptions, a.GraphOptimizationLevel = a.Build.SessionOptions, cmp.Or(a.Compatibility.level, a.Build.GraphOptimizationLevel)
		a.Warnings = append(a.Warnings, a.Build.Warnings...)
		if !c.readOnly {
			a.Warnings = append(a.Warnings, c.gains.warnings(a.Build.ID)...)
		}
		a.tellMembers(r, p.canonical.Model)
		c.rights.Saw(r.Peer, a.Build)
	}
	for _, name := range sortedKeys(r.FreeDimensions) {
		if !slices.Contains(id.FreeDims, name) {
			a.Warnings = append(a.Warnings, fmt.Sprintf("no input of the model has a free dimension %q; %s", name, namedDimensions(id.FreeDims)))
		}
	}
	a.ProviderOptions = make(map[string]map[string]string, len(r.EPs))
	for _, ep := range p.eps {
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
func contextError(ctx context.Context, r *Request) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return apierr.New(apierr.Deadline, ctx.Err(), "model %q", r.Name)
	}
	return apierr.New(apierr.Cancelled, ctx.Err(), "model %q", r.Name)
}
