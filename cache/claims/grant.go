package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
)

// claimer is a request that wants a claim.
type claimer struct {
	*request.Attempt
	owner   uint32
	source  *epmodel.Interface
	why     string // why the look-up found no build
	granted *claim // guarded by Claims.mu
	wake    context.CancelFunc
}

// newClaimer returns a claimer with the parts of the request that its claim needs later. It reads
// the model's files now, and duplicates the descriptors of the libraries, so that a later change of
// them is noticed.
func (cs *Claims) newClaimer(ctx context.Context, at *request.Attempt, why string) (
	a *claimer, err error) {
	a = &claimer{owner: cs.Owner(at.Peer.UID), why: why}
	if a.source, err = readInterface(ctx, at.Request); err != nil {
		return nil, err
	}
	own := *at.Request
	own.Graph, own.External = nil, nil
	own.EPs = slices.Clone(at.EPs)
	for i := range own.EPs {
		own.EPs[i].Files = nil
	}
	if own.Runtime, err = keepLibraries(&at.Runtime, at.Plan.Outside); err != nil {
		return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
	}
	a.Attempt = at.WithRequest(&own)
	return a, nil
}

// ClaimOrWait grants the caller the claim, or waits for the job that is compiling already.
func (cs *Claims) ClaimOrWait(ctx context.Context, at *request.Attempt, why string) (
	*request.Answer, error) {
	if compilers.IsWeightless(at.SessionOptions) {
		return nil, apierr.New(apierr.NotAllowed, nil,
			"model %q: a weightless build needs its source model, which a submitted build does "+
				"not contain", at.Name).
			WithHint("omit ep.enable_weightless, or let the daemon compile it")
	}
	if at.Content != nil { // otherwise the remembered failures are those of other libraries
		if f := cs.FailedBefore(at); f != nil && f.Reason.BlamesProvider() {
			return nil, f.RememberedError(at.Name)
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
	if err := cs.addClaimer(key, a); err != nil {
		closeLibraries(&a.Runtime)
		return nil, err
	}
	var result *jobs.Result
	for range request.MaxHandOvers {
		result, _, err = cs.Jobs.Join(waiting, key, at.Caller(cs.Owner), func() (jobs.Work, error) {
			if m := cs.WorkIfMade(at, key.Scope); m != nil {
				return m, nil
			}
			return cs.externalWork(key, a), nil
		})
		if err == nil && at.Content != nil && at.RefusesORT(result.Build) {
			cs.Store.TakerDone(result.Build.ID) // not taken, so that the collector may remove it
			err = request.OtherORTError(at, result.Build)
			continue // waits for the next claim, which this request may be granted
		}
		if !errors.As(err, new(*request.ClaimEnd)) {
			break // not found if the last claim ended just before this request joined its job
		}
	}
	if cl := cs.removeClaimer(key, a); cl != nil {
		return a.answerGranted(ctx, cl, err)
	}
	closeLibraries(&a.Runtime)
	if err != nil {
		return nil, request.JobError(ctx, at.Name, err)
	}
	return cs.AnswerWaiter(ctx, at, result)
}

// key returns the key of the claim's job. Artefacts of ordinary users are private, so their claims
// delay no other user. If a shared compile is under way, the claim waits for that instead.
func (cs *Claims) key(at *request.Attempt) (jobs.Key, error) {
	if at.Scope == "" {
		return jobs.Key{}, apierr.New(apierr.NotAllowed, nil,
			"model %q: the request asks to store nothing, so there is nothing to claim", at.Name).
			WithHint("compile it without epcached")
	}
	key := jobs.Key{Build: at.Plan.BuildKey, Scope: at.Scope}
	if at.Scope != "shared" || !cs.Rights.IsPublisher(at.Peer) && cs.Jobs.Joinable(key) == nil {
		key.Scope = rights.OwnScope(at.Peer)
	}
	return key, nil
}

// externalWork returns the work of a job in which the claimants compile, one after the other.
// Requests wait for it as for any job.
func (cs *Claims) externalWork(key jobs.Key, first *claimer) jobs.Work {
	about := first.JobAbout(key.Scope, "claimed by an application that compiles it")
	about.Claim = true
	return jobs.Func{Work: about, Do: func(ctx context.Context, j *jobs.Job) (*jobs.Result, error) {
		return cs.grantInTurn(ctx, j, key)
	}}
}

// grantInTurn grants the claim to one request after the other, until one of them puts a result or
// no request waits for the claim.
func (cs *Claims) grantInTurn(ctx context.Context, j *jobs.Job,
	key jobs.Key) (*jobs.Result, error) {
	about := j.Description()
	var last *request.ClaimEnd
	for {
		cl := cs.grant(key, j, last)
		if cl == nil {
			switch {
			case ctx.Err() != nil:
				last = &request.ClaimEnd{UID: about.UID, Text: jobCancelled}
			case last == nil:
				last = &request.ClaimEnd{UID: about.UID, Text: "the claimant disconnected"}
			}
			return nil, request.ClaimFailed(about.ModelName, last)
		}
		of := event.About{Peer: cl.Peer, Key: cl.Plan.RequestKey, Model: cl.Name}
		cs.Store.RecordEvent(event.For(of, event.Claimed, "by uid %d, until %s", cl.Peer.UID,
			cl.Deadline.UTC().Format(time.RFC3339)))
		j.SetPhase("claimed")
		result, end := cs.awaitClaimEnd(ctx, cl)
		if end != nil {
			cs.Store.Index().Counters.Add("claims_without_result", 1)
			cs.Store.RecordEvent(event.For(of, event.ClaimEnded, "%s", end.Error()))
		}
		j.Release(cl.Peer.UID)
		if end == nil {
			return result, nil
		}
		if last = end; ctx.Err() != nil {
			return nil, request.ClaimFailed(about.ModelName, last)
		}
	}
}

// jobCancelled is the end reason of a claim if a user cancelled its job.
const jobCancelled = "its job was cancelled"

// grant grants the claim to the first request in the queue. It returns nil if the queue is empty,
// or if the job is cancelled; the request then waits for another job. last is the end of the
// previous claim.
func (cs *Claims) grant(key jobs.Key, j *jobs.Job, last *request.ClaimEnd) *claim {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if len(cs.claimers[key]) == 0 {
		return nil
	}
	a, most, now := cs.claimers[key][0], cs.limits().Deadline, time.Now()
	cl := &claim{claims: cs, scope: key.Scope, job: j, Attempt: a.Attempt, owner: a.owner,
		source: a.source,
		began:  now, Claim: request.Claim{ID: jobs.NewID(), Output: a.Plan.OutputName(),
			Route: a.Plan.Canonical.Route, Deadline: now.Add(most)}}
	cl.duration, cl.deadline = context.WithCancel(context.Background())
	if last != nil {
		a.why = last.Error()
	}
	cl.mu.Lock()
	defer cl.mu.Unlock()
	if !j.KeepFor(cl.Peer.UID, cl.owner, func() { cl.endWithoutResult(jobCancelled, 0) }) {
		return nil
	}
	late := fmt.Sprintf("its deadline of %s passed", most)
	cl.timer = time.AfterFunc(most, func() { cl.endWithoutResult(late, 0) })
	if a.Connection != nil {
		cl.release = context.AfterFunc(a.Connection, func() {
			cl.endWithoutResult("its connection ended", 0)
		})
	}
	cs.removeClaimerLocked(key, a)
	cs.open[cl.ID], a.granted = cl, cl
	a.wake()
	return cl
}

// awaitClaimEnd waits for the end of the claim.
func (cs *Claims) awaitClaimEnd(ctx context.Context, cl *claim) (*jobs.Result, *request.ClaimEnd) {
	select {
	case <-cl.duration.Done():
	case <-ctx.Done():
		cl.endWithoutResult(jobCancelled, 0)
		<-cl.duration.Done() // an artefact that is being stored is not interrupted
	}
	closeLibraries(&cl.Runtime)
	cs.forgetClaim(cl)
	cl.mu.Lock()
	defer cl.mu.Unlock()
	return cl.result, cl.end
}

// answerGranted answers a request that was granted the claim. err is the error of its wait: if the
// user cancelled at that moment, the claim is given up and granted to the next request.
func (a *claimer) answerGranted(ctx context.Context, cl *claim,
	err error) (*request.Answer, error) {
	switch {
	case ctx.Err() != nil:
		cl.endWithoutResult("the claimant disconnected", 0)
		return nil, request.ContextError(ctx, a.Name)
	case errors.Is(err, runtimes.ErrGivenUp):
		cl.endWithoutResult(jobCancelled, 0)
		return nil, request.JobError(ctx, a.Name, err)
	}
	if why := cl.endReason(); why != "" {
		return nil, apierr.New(apierr.Cancelled, runtimes.ErrGivenUp,
			"model %q: the claim ended while it was granted: %s", a.Name, why)
	}
	given := cl.Claim
	return &request.Answer{Outcome: request.Claimed, Claim: &given, Why: a.why}, nil
}

// Await waits for the request that holds the claim. It fails with missing if no request holds one.
func (cs *Claims) Await(ctx context.Context, at *request.Attempt, missing error) (
	*request.Answer, error) {
	key, err := cs.key(at)
	if err != nil {
		return nil, missing
	}
	result, _, err := cs.Jobs.Join(ctx, key, at.Caller(cs.Owner),
		func() (jobs.Work, error) { return nil, missing })
	if err != nil {
		return nil, request.JobError(ctx, at.Name, err)
	}
	return cs.AnswerWaiter(ctx, at, result)
}

// keepLibraries returns the reference with duplicates of the descriptors of the execution
// providers' libraries only, because a claim may last long and would keep every other file open
// too.
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
			_ = l.File.Close() // opened for reading, so no write can fail here
		}
	}
}

// checkLibrariesUnchanged fails if the libraries that the claim was granted for were replaced.
func (cl *claim) checkLibrariesUnchanged() error {
	for _, l := range cl.Runtime.EPLibraries {
		if l.File == nil {
			continue
		}
		gone, err := runtimes.Unlinked(l.File)
		now, err2 := cas.StampOf(l.File)
		if err = cmp.Or(err, err2); err != nil {
			return &os.PathError{Op: "stat", Path: l.Path, Err: err}
		}
		if was := cl.Plan.Libraries[l.EP]; gone || now.Size != was.Size || now.Mtime != was.Mtime {
			return fmt.Errorf("library %q was replaced during the request", l.Path)
		}
	}
	return nil
}
