package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// outsider is the job that applications do which hold the claim, one after the other. Who waits for it waits as for any
// job.
type outsider struct {
	of    *Claims
	key   jobs.Key
	first jobs.About
}

func (o *outsider) About() jobs.About { return o.first }

// Run gives the claim to one after the other, until one of them puts a result or nobody wants it any more.
func (o *outsider) Run(ctx context.Context, f *jobs.Job) (*jobs.Result, error) {
	var last *request.ClaimEnd
	for {
		cl := o.of.grant(o.key, func(a *claimer) *claim { return o.give(a, f, last) })
		if cl == nil && ctx.Err() != nil {
			last = &request.ClaimEnd{UID: o.first.UID, Text: jobCancelled}
		}
		if cl == nil && last == nil {
			last = &request.ClaimEnd{UID: o.first.UID, Text: "who asked for it left"}
		}
		if cl == nil {
			return nil, request.ClaimFailed(o.first.ModelName, last)
		}
		o.of.Store.Happened(event.For(event.About{Peer: cl.Peer, Key: cl.Plan.RequestKey, Model: cl.Name},
			event.Claimed, "by uid %d, until %s", cl.Peer.UID, cl.Deadline.UTC().Format(time.RFC3339)))
		f.Tell("claimed")
		result, end := o.await(ctx, cl)
		f.Release(cl.Peer.UID)
		if end == nil {
			return result, nil
		}
		last = end
		if ctx.Err() != nil {
			return nil, request.ClaimFailed(o.first.ModelName, last)
		}
	}
}

// jobCancelled is why a claim ended that was part of a job which a user cancelled.
const jobCancelled = "its job was cancelled"

// give makes the claim; nil: the job is cancelled, and who asks now has another. It is called with claims.mu held.
func (o *outsider) give(a *claimer, f *jobs.Job, last *request.ClaimEnd) *claim {
	most := o.of.Limits().Deadline
	cl := &claim{Claim: request.Claim{ID: jobs.NewID(), Output: a.Plan.OutputName(), Route: a.Plan.Canonical.Route, Deadline: time.Now().Add(most)},
		of: o.of, scope: o.key.Scope, job: f, Attempt: a.Attempt, owner: a.owner, began: time.Now(), takes: a.takes}
	cl.lasts, cl.ends = context.WithCancel(context.Background())
	if last != nil {
		a.why = last.Error()
	}
	cl.mu.Lock()
	defer cl.mu.Unlock()
	if !f.Hold(cl.Peer.UID, cl.owner, func() { cl.finish(jobCancelled, 0) }) {
		return nil
	}
	cl.timer = time.AfterFunc(most, func() { cl.finish(fmt.Sprintf("its deadline of %s passed", most), 0) })
	if a.Connection != nil {
		cl.leave = context.AfterFunc(a.Connection, func() { cl.finish("its connection ended", 0) })
	}
	return cl
}

func (o *outsider) await(ctx context.Context, cl *claim) (*jobs.Result, *request.ClaimEnd) {
	select {
	case <-cl.lasts.Done():
	case <-ctx.Done():
		cl.finish(jobCancelled, 0)
		<-cl.lasts.Done() // what is being stored is stored first
	}
	cl.mu.Lock()
	result, end := cl.result, cl.end
	cl.mu.Unlock()
	closeLibraries(&cl.Runtime)
	o.of.remove(cl)
	if end == nil {
		return result, nil
	}
	o.of.Store.Index().Counters.Add("claims_without_result", 1)
	o.of.Store.Happened(event.For(event.About{Peer: cl.Peer, Key: cl.Plan.RequestKey, Model: cl.Name},
		event.ClaimEnded, "%s", end.Error()))
	return nil, end
}

// MaxHandOvers bounds how often a request waits for yet another claim.
const MaxHandOvers = 16

// ClaimOrWait gives the caller the claim, or has it wait for the job that compiles already.
func (cs *Claims) ClaimOrWait(ctx context.Context, at *request.Attempt, why string) (*request.Answer, error) {
	if compilers.Weightless(at.SessionOptions) {
		return nil, apierr.New(apierr.NotAllowed, nil, "model %q: a weightless build needs its source, which what is put does not bring", at.Name).
			WithHint("leave ep.enable_weightless out, or let the daemon compile it")
	}
	if at.Content != nil { // else what is known of failures is of other libraries
		if f := cs.Failed(at); f != nil && f.Reason.OfProvider() {
			return nil, f.FromMemory(at.Name)
		}
	}
	key, err := cs.key(at)
	if err != nil {
		return nil, err
	}
	a, err := cs.newClaimer(ctx, at, why)
	if err != nil {
		return nil, err
	}
	waiting, wake := context.WithCancel(ctx)
	defer wake()
	a.wake = wake
	if err := cs.enter(key, a, cs.Limits().Open); err != nil {
		closeLibraries(&a.Runtime)
		return nil, err
	}
	var result *jobs.Result
	for range MaxHandOvers {
		result, _, err = cs.Jobs.Join(waiting, key, at.Caller(cs.Owner), func() (jobs.Work, error) {
			if m := cs.Made(at, key.Scope); m != nil {
				return m, nil
			}
			return cs.newOutsider(key, a), nil
		})
		if err == nil && at.Content != nil && at.OtherORT(result.Build.ORTVersion) {
			cs.Store.Taken(result.Build.ID) // or rather, not taken
			err = request.OtherORTError(at, result.Build)
			continue // for the next claim, which may be its own
		}
		if !errors.As(err, new(*request.ClaimEnd)) {
			break // else the last claim ended while this one was about to wait for it
		}
	}
	if cl := cs.withdraw(key, a); cl != nil {
		return a.handed(ctx, cl, err)
	}
	closeLibraries(&a.Runtime)
	if err != nil {
		return nil, request.JobError(ctx, at.Name, err)
	}
	return cs.Waited(ctx, at, result)
}

// handed answers a request that was given the claim. err is how its wait ended: who gave the job up at that moment has given the claim
// up as well, and the next who asked for it gets it.
func (a *claimer) handed(ctx context.Context, cl *claim, err error) (*request.Answer, error) {
	switch {
	case ctx.Err() != nil:
		cl.finish("who asked for it left", 0)
		return nil, request.ContextError(ctx, a.Name)
	case errors.Is(err, runtimes.ErrGivenUp):
		cl.finish(jobCancelled, 0)
		return nil, request.JobError(ctx, a.Name, err)
	}
	if why := cl.overWhy(); why != "" {
		return nil, apierr.New(apierr.Cancelled, runtimes.ErrGivenUp, "model %q: the claim ended as it was given: %s", a.Name, why)
	}
	given := cl.Claim
	return &request.Answer{Outcome: request.Claimed, Claim: &given, Why: a.why}, nil
}

// key says which job the claim is for. What ordinary users put is their own, so their claims hold up nobody else;
// but where the daemon compiles for all already they wait for that.
func (cs *Claims) key(at *request.Attempt) (jobs.Key, error) {
	if at.Scope == "" {
		return jobs.Key{}, apierr.New(apierr.NotAllowed, nil, "model %q: nothing is to be kept of it, so there is nothing to claim", at.Name).
			WithHint("compile it without epcached")
	}
	if shared := (jobs.Key{Build: at.Plan.BuildKey, Scope: at.Scope}); at.Scope == "shared" && (cs.Rights.Publisher(at.Peer) || cs.Jobs.Open(shared) != nil) {
		return shared, nil
	}
	return jobs.Key{Build: at.Plan.BuildKey, Scope: rights.OwnScope(at.Peer)}, nil
}

// newClaimer keeps of a request what its claim will need. Of its files these are the libraries, to see that they stay
// what they are; the model's own are read now.
func (cs *Claims) newClaimer(ctx context.Context, at *request.Attempt, why string) (*claimer, error) {
	takes, err := readSignature(ctx, at.Request)
	if err != nil {
		return nil, err
	}
	own := *at.Request
	own.Graph, own.External = nil, nil
	own.EPs = make([]identity.EP, len(at.EPs))
	for i := range at.EPs {
		own.EPs[i] = at.EPs[i]
		own.EPs[i].Files = nil
	}
	if own.Runtime, err = keepLibraries(&at.Runtime, at.Plan.Outside); err != nil {
		return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
	}
	return &claimer{Attempt: at.WithRequest(&own), owner: cs.Owner(at.Peer.UID), takes: takes, why: why}, nil
}

// keepLibraries gives the reference with descriptors of its own: of each execution provider's library, and of nothing
// beside them, for a claim may last.
func keepLibraries(ref *runtimes.Ref, open bool) (runtimes.Ref, error) {
	out := *ref
	out.EPLibraries = nil
	for _, l := range ref.EPLibraries {
		one := runtimes.LibraryRef{EP: l.EP, Path: l.Path}
		if open && l.File != nil {
			var err error
			if one.File, err = identity.Duplicate(l.File); err != nil {
				closeLibraries(&out)
				return runtimes.Ref{}, err
			}
		}
		out.EPLibraries = append(out.EPLibraries, one)
	}
	return out, nil
}

// closeLibraries closes what keepLibraries opened.
func closeLibraries(ref *runtimes.Ref) {
	for _, l := range ref.EPLibraries {
		if l.File != nil {
			_ = l.File.Close() // opened for reading only: nothing can be lost
		}
	}
}

func (cs *Claims) newOutsider(key jobs.Key, a *claimer) *outsider {
	o := &outsider{of: cs, key: key, first: a.JobAbout(key.Scope, "claimed by an application that compiles it itself")}
	o.first.Claim = true
	return o
}

// awaitClaim waits for whoever holds the claim. Where nobody does there is nothing to wait for, and missing is the error.
func (cs *Claims) Await(ctx context.Context, at *request.Attempt, missing error) (*request.Answer, error) {
	key, err := cs.key(at)
	if err != nil {
		return nil, missing
	}
	nobody := func() (jobs.Work, error) { return nil, missing }
	result, _, err := cs.Jobs.Join(ctx, key, at.Caller(cs.Owner), nobody)
	if err != nil {
		return nil, request.JobError(ctx, at.Name, err)
	}
	return cs.Waited(ctx, at, result)
}

// cleanText drops what is no text.
func cleanText(text string) string {
	text = strings.ToValidUTF8(text, "?")
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return -1
		}
		return r
	}, text))
}

// stillOpen tells whether the libraries that the claim was given for are in their places.
func (cl *claim) stillOpen() error {
	for _, l := range cl.Runtime.EPLibraries {
		if l.File == nil {
			continue
		}
		gone, err := runtimes.Unlinked(l.File)
		now, err2 := cas.StampOf(l.File)
		if err = cmp.Or(err, err2); err != nil {
			return &os.PathError{Op: "stat", Path: l.Path, Err: err}
		}
		if gone || now.Size != cl.Plan.Libraries[l.EP].Size || now.Mtime != cl.Plan.Libraries[l.EP].Mtime {
			return fmt.Errorf("library %q was replaced meanwhile", l.Path)
		}
	}
	return nil
}
