// Package joblist shows users their jobs: those in the queue, and rebuilds that the daemon has not
// begun. Users list, follow and cancel their own jobs, and administrators all jobs.
package joblist

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// List shows users their jobs, lets them wait for the end of one, and cancels jobs.
type List struct {
	Jobs     *jobs.Jobs
	Rebuilds *upkeep.Rebuilds
	Failed   *failure.Remembered
	Rights   *rights.Rights
	Store    *store.Store
	Now      func() time.Time
}

// mayFollow reports whether the peer requested the job, or may see the build that it replaces.
// Administrators may follow all.
func (l *List) mayFollow(p request.Peer, j *jobs.Job) bool {
	a := j.Description()
	return j.IsRequestedBy(p.UID) || l.Rights.IsAdministrator(p) ||
		// or the job replaces a build that the peer may see
		!a.Replaces.IsZero() && l.Rights.MaySee(p, a.Replaces, a.Scope)
}

// infoFor returns the part of a job's info that the peer may see.
func (l *List) infoFor(p request.Peer, i jobs.Info) jobs.Info {
	return i.AsSeenBy(p.UID, l.Rights.IsAdministrator(p))
}

// Visible returns the jobs that the peer may see, in the order in which they run: its own and
// rebuilds of builds that it had, or all for administrators. The number of listed rebuilds is
// bounded; those that have waited longest are listed, although the one of the most used build
// begins next.
func (l *List) Visible(ctx context.Context, p request.Peer) ([]jobs.Info, error) {
	all := l.Jobs.InOrder(func(j *jobs.Job) bool { return l.mayFollow(p, j) })
	if ctx.Err() != nil {
		return nil, apierr.FromContext(ctx, "jobs")
	}
	for i := range all {
		all[i] = l.infoFor(p, all[i])
	}
	return append(all, l.rebuildsFor(p)...), nil
}

// JobOf returns the job that the request would wait for, nil if there is none.
func (l *List) JobOf(at *request.Attempt) *jobs.Job {
	// of a claim of this user
	claim := jobs.Key{Build: at.Plan.BuildKey, Scope: rights.OwnScope(at.Peer)}
	return l.Jobs.Joinable(at.JobKey(), claim)
}

// NotDoneError returns the error of a request that does not wait for the compile under way.
func (l *List) NotDoneError(at *request.Attempt, f *jobs.Job) *apierr.Error {
	j := f.Info()
	phase, of := cmp.Or(j.Phase, j.State), ""
	if j.Estimate > 0 {
		of = fmt.Sprintf(", of about %s", j.Estimate.Round(time.Second))
	}
	e := apierr.New(apierr.NotFound, nil,
		"no build yet for model %q: it is being compiled (%s, for %s%s)",
		at.Name, phase, j.Elapsed.Round(time.Second), of).
		WithFact("request_key", at.Plan.RequestKey.String()).WithFact("phase", phase).
		WithFact("elapsed_ms", fmt.Sprint(j.Elapsed.Milliseconds())).
		WithFact("estimate_ms", fmt.Sprint(j.Estimate.Milliseconds()))
	if !l.mayFollow(at.Peer, f) {
		return e.WithHint("wait for it: request it with on_miss wait")
	}
	return e.WithFact("job", j.ID).
		WithHint("wait for it: request it with on_miss wait, or epcachectl jobs follow %s", j.ID)
}

// Follow waits until the job ends, and returns its final state; for a job that ended recently it
// returns at once. It calls progress at each change of phase, but not after it has returned.
// Following does not keep the job alive.
func (l *List) Follow(ctx context.Context, p request.Peer, id string,
	progress func(request.Progress)) (jobs.Info, error) {
	f, rebuild, err := l.Find(p, id)
	if err == nil && f == nil {
		f, rebuild, err = l.AwaitBegin(ctx, p, *rebuild)
	}
	if err != nil {
		return jobs.Info{}, err
	}
	if f == nil {
		return l.infoFor(p, *rebuild), nil
	}
	since := l.Now()
	reporter := jobs.NewProgressReporter(progress, since)
	defer reporter.End()
	if !f.Follow(ctx, p.UID, since, reporter.Report) {
		return jobs.Info{}, request.ContextError(ctx, f.Description().ModelName)
	}
	return l.infoFor(p, f.Info()), nil
}

// Cancel cancels the named jobs, or with all those that the peer requested (for administrators
// every job), and returns their new states. For a user that is no administrator it only withdraws
// the user's own requests, and the job continues for other waiters.
func (l *List) Cancel(ctx context.Context, p request.Peer, ids []string, all bool) (
	[]jobs.Info, error) {
	if all == (len(ids) > 0) {
		return nil, apierr.New(apierr.BadRequest, nil, "cancel: name jobs, or set all")
	}
	named, past, err := l.jobsNamed(p, ids, all)
	if err != nil {
		return nil, err
	}
	for _, f := range named {
		ends, held := f.GiveUp(p.UID, l.Rights.IsAdministrator(p))
		if held != nil {
			held() // the next waiting request is granted the claim
		}
		if about := f.Description(); ends && about.Compiles() {
			l.Store.RecordEvent(event.For(event.About{Peer: request.Peer{UID: about.UID},
				Key: about.RequestKey, Model: about.ModelName}, event.Cancelled,
				"by uid %d", p.UID))
		}
	}
	for _, f := range named {
		if f.IsCancelled() {
			select { // the worker is being killed
			case <-f.Done():
			case <-ctx.Done():
				return past, request.ContextError(ctx, f.Description().ModelName)
			}
		}
		past = append(past, l.infoFor(p, f.Info()))
	}
	return past, nil
}

// jobsNamed returns the jobs that the ids name. past has those that have ended, and rebuilds that
// have not begun.
func (l *List) jobsNamed(p request.Peer, ids []string, all bool) (
	named []*jobs.Job, past []jobs.Info, err error) {
	if all {
		for _, f := range l.Jobs.List() {
			if f.IsRequestedBy(p.UID) || l.Rights.IsAdministrator(p) {
				named = append(named, f)
			}
		}
		return named, l.cancelRebuilds(p), nil
	}
	for _, id := range ids {
		f, rebuild, err := l.Find(p, id)
		switch {
		case err != nil:
			return nil, nil, err
		case f != nil && f.HasEnded():
			past = append(past, l.infoFor(p, f.Info()))
		case !l.Rights.IsAdministrator(p) && (f == nil || !f.IsRequestedBy(p.UID)):
			return nil, nil, apierr.New(apierr.NotAllowed, nil, "job %.80q: none of its "+
				"requests is yours", id)
		case f == nil:
			if l.Rebuilds.Drop(id) {
				rebuild.State = jobs.Cancelled
			}
			past = append(past, l.infoFor(p, *rebuild))
		default:
			named = append(named, f)
		}
	}
	return named, past, nil
}

// Failures lists the remembered failures that the peer may see, the newest first.
func (l *List) Failures(ctx context.Context, p request.Peer) ([]failure.Failure, error) {
	if ctx.Err() != nil {
		return nil, apierr.FromContext(ctx, "failures")
	}
	return l.Remembered(p), nil
}

// Retry removes remembered failures, so that the next request compiles again. It removes those that
// entries name, or with all those of the peer (for administrators every one), and returns them. It
// fails if an entry matches no failure.
func (l *List) Retry(ctx context.Context, p request.Peer, entries []string, all bool) (
	[]failure.Failure, error) {
	if ctx.Err() != nil {
		return nil, apierr.FromContext(ctx, "retry")
	}
	if all == (len(entries) > 0) {
		return nil, apierr.New(apierr.BadRequest, nil, "retry: name entries, or set all")
	}
	known := l.Remembered(p)
	for _, name := range entries {
		if !slices.ContainsFunc(known, func(f failure.Failure) bool { return f.Means(name) }) {
			return nil, apierr.New(apierr.NotFound, nil, "no remembered failure of %q", name).
				WithHint("epcachectl jobs lists the remembered failures")
		}
	}
	return l.Failed.List(l.audience(p), func(f *failure.Failure) bool {
		return all || slices.ContainsFunc(entries, f.Means)
	}), nil
}

// Remembered lists the remembered failures that the peer may see.
func (l *List) Remembered(p request.Peer) []failure.Failure {
	return l.Failed.List(l.audience(p), nil)
}

// audience returns which failures the peer may see.
func (l *List) audience(p request.Peer) failure.Audience {
	return failure.Audience{UID: p.UID, Scope: rights.OwnScope(p), All: l.Rights.IsAdministrator(p)}
}

// Reply fills the message that clients receive with the first jobs and failures, as many as fit. It
// omits the compiler's output from older failures.
func Reply(listed []jobs.Info, failed []failure.Failure) *wire.JobsReply {
	reply, left := &wire.JobsReply{}, wire.SpaceLeft(wire.MaxReply/2) // the rest is for failures
	for i := range listed {
		one := jobReply(&listed[i])
		if !left.Reserve(one) {
			break
		}
		reply.Jobs = append(reply.Jobs, one)
	}
	left = wire.SpaceLeft(wire.MaxReply - proto.Size(reply))
	brief := left / 2
	for i := range failed {
		one := failureReply(&failed[i])
		if left < brief {
			delete(one.Facts, "stderr")
			one.Text = wire.Valid(one.Text[:min(len(one.Text), 256)])
		}
		if !left.Reserve(one) {
			break
		}
		reply.Failures = append(reply.Failures, one)
	}
	return reply
}

func jobReply(j *jobs.Info) *wire.Job {
	out := &wire.Job{Id: j.ID, State: j.State, Phase: j.Phase, ModelName: wire.Clip(j.ModelName),
		ModelDigest: wire.KeyText(j.ModelDigest), RequestKey: wire.KeyText(j.RequestKey),
		Build: wire.KeyText(j.Build), Ep: j.EP, Uid: j.UID, Background: j.Background,
		Waiting: uint32(j.Waiting), QueuedMs: wire.Milliseconds(j.Queued),
		StartedMs: wire.Milliseconds(j.Started), ElapsedMs: j.Elapsed.Milliseconds(),
		EstimateMs: j.Estimate.Milliseconds(), Why: wire.Valid(j.Why), Models: uint32(j.Models)}
	var e *apierr.Error
	if errors.As(j.Err, &e) {
		out.Error = &wire.Error{Class: wire.ErrorClass(e.Class), Text: wire.Valid(e.Text),
			Hint: wire.Valid(e.Hint), Facts: validFacts(e.Facts)}
	} else if j.Err != nil {
		// the log has the reason
		out.Error = &wire.Error{Class: wire.ErrorClass_INTERNAL, Text: "internal error"}
	}
	return out
}

func failureReply(f *failure.Failure) *wire.Failure {
	return &wire.Failure{
		RequestKey: f.RequestKey.String(), Build: f.BuildKey.String(),
		ModelName: wire.Clip(f.ModelName), ModelDigest: f.ModelDigest.String(), Ep: f.EP,
		Reason: string(f.Reason), Text: wire.Valid(f.Text), Facts: validFacts(f.Facts),
		Count: uint32(f.Count), FirstMs: wire.Milliseconds(f.First),
		LastMs: wire.Milliseconds(f.Last), RetryMs: wire.Milliseconds(f.Retry), Scope: f.Scope,
	}
}

func validFacts(facts map[string]string) map[string]string {
	out := make(map[string]string, len(facts))
	for name, value := range facts {
		out[name] = wire.Valid(value)
	}
	return out
}
