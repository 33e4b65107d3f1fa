package cache

import (
	"errors"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// Read-only answers are messages of package unixsock/wire, filled in by this package. Here is how what the cache works with becomes a message.

// Reply is the answer as clients are told of it, without the time that it took.
func (a *Answer) Reply() *wire.AcquireReply {
	reply := &wire.AcquireReply{
		Outcome: a.Outcome, ModelDigest: a.ModelDigest.String(),
		Compatibility:       a.Compatibility.Verdict.String(),
		CompatibilitySource: a.Compatibility.Source,
		CompatibilityReason: wire.Valid(a.Compatibility.Reason), Why: wire.Valid(a.Why), Record: a.Record,
		Explanation: a.Explanation, Runtime: a.Runtime, Job: a.Job, Warnings: a.Warnings,
		View: a.Path, Graph: a.Graph, SessionOptions: a.SessionOptions,
		GraphOptimizationLevel: a.GraphOptimizationLevel,
	}
	reply.RequestKey = wire.KeyText(a.RequestKey)
	if a.Claim != nil {
		c := a.Claim
		reply.Claim = &wire.Claim{Id: c.ID, Output: c.Output, Outputs: []string{c.Output},
			DeadlineMs: time.Until(c.Deadline).Milliseconds(), Route: c.Route}
	}
	if a.ProviderOptions != nil {
		reply.ProviderOptions = make(map[string]*wire.StringMap, len(a.ProviderOptions))
		for ep, options := range a.ProviderOptions {
			reply.ProviderOptions[ep] = &wire.StringMap{Entries: options}
		}
	}
	reply.Member = uint32(a.Member)
	for _, m := range a.Members {
		reply.Members = append(reply.Members, &wire.Member{Name: m.Name,
			ModelDigest: m.ModelDigest.String(), Graph: m.Graph, SessionOptions: m.SessionOptions})
	}
	if b := a.Build; b != nil {
		reply.Build, reply.CompileSeconds = b.BuildKey.String(), b.CompileSeconds
		ep := b.Maker()
		reply.Ep, reply.SdkVersion, reply.HardwareArchitecture = ep.Name, ep.SDKVersion,
			ep.HardwareArchitecture
		id, _, inView := strings.Cut(a.Graph, "/")
		for _, f := range b.Files {
			one := &wire.File{Name: f.Name, Size: f.Size}
			if inView { // else the files are read from a store that has no view of them
				one.Name = id + "/" + f.Name
			}
			if !f.Digest.IsZero() { // else nobody made one
				one.Digest = f.Digest.String()
			}
			reply.Files = append(reply.Files, one)
		}
		reply.Unkept = a.Unkept
	}
	return reply
}

// JobsReply tells of the first jobs and failures, as many as fit. Of the older failures the compiler's
// words are left out.
func JobsReply(listed []jobs.Info, failed []failure.Failure) *wire.JobsReply {
	reply, left := &wire.JobsReply{}, wire.Left(wire.MaxReply/2) // the rest is for failures
	for i := range listed {
		one := jobReply(&listed[i])
		if !left.Takes(one) {
			break
		}
		reply.Jobs = append(reply.Jobs, one)
	}
	left = wire.Left(wire.MaxReply - proto.Size(reply))
	brief := left / 2
	for i := range failed {
		one := failureReply(&failed[i])
		if left < brief {
			delete(one.Facts, "stderr")
			one.Text = wire.Valid(one.Text[:min(len(one.Text), 256)])
		}
		if !left.Takes(one) {
			break
		}
		reply.Failures = append(reply.Failures, one)
	}
	return reply
}

func jobReply(j *jobs.Info) *wire.Job {
	out := &wire.Job{Id: j.ID, State: j.State, Phase: j.Phase, ModelName: wire.Valid(j.ModelName),
		ModelDigest: wire.KeyText(j.ModelDigest),
		RequestKey:  wire.KeyText(j.RequestKey), Build: wire.KeyText(j.Build), Ep: j.EP, Uid: j.UID,
		Background: j.Background,
		Waiting:    uint32(j.Waiting), QueuedMs: wire.Milliseconds(j.Queued),
		StartedMs: wire.Milliseconds(j.Started),
		ElapsedMs: j.Elapsed.Milliseconds(), EstimateMs: j.Estimate.Milliseconds(),
		Why: wire.Valid(j.Why), Models: uint32(j.Models)}
	var e *apierr.Error
	if errors.As(j.Err, &e) {
		out.Error = &wire.Error{Class: wire.ErrorClass(e.Class), Text: wire.Valid(e.Text),
			Hint: wire.Valid(e.Hint), Facts: validFacts(e.Facts)}
	} else if j.Err != nil {
		out.Error = &wire.Error{Class: wire.ErrorClass_INTERNAL, Text: "internal error"} // what it is stands in the log
	}
	return out
}

func failureReply(f *failure.Failure) *wire.Failure {
	return &wire.Failure{
		RequestKey: f.RequestKey.String(), Build: f.BuildKey.String(),
		ModelName: wire.Valid(f.ModelName), ModelDigest: f.ModelDigest.String(), Ep: f.EP,
		Reason: string(f.Reason), Text: wire.Valid(f.Text), Facts: validFacts(f.Facts),
		Count: uint32(f.Count), FirstMs: wire.Milliseconds(f.First), LastMs: wire.Milliseconds(f.Last),
		RetryMs: wire.Milliseconds(f.Retry), Scope: f.Scope,
	}
}

func validFacts(facts map[string]string) map[string]string {
	out := make(map[string]string, len(facts))
	for name, value := range facts {
		out[name] = wire.Valid(value)
	}
	return out
}

// setJudgement says what a build is good for.
func setJudgement(out *wire.Build, j judge.Judgement) {
	if j.Source != "" || j.Reason != "" { // else nobody judged it
		out.Compatibility, out.CompatibilitySource = j.Verdict.String(), j.Source
		out.CompatibilityReason = wire.Valid(j.Reason)
		out.CompatibilityRuntime, out.JudgedMs = j.Runtime, wire.Milliseconds(j.At)
	}
}
