package joblist

import (
	"errors"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// Reply fills the message that clients receive with the first jobs and failures, as many as fit.
// The compiler's words are left out of the older failures.
func Reply(listed []jobs.Info, failed []failure.Failure) *wire.JobsReply {
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
