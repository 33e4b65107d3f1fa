package cache

import (
	"encoding/hex"
	"errors"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// Read-only answers are messages of package unixsock/wire, filled in by this package. Here is what they
// need in common, and how what the cache works with becomes a message.

// maxReply keeps an answer whose length is not known before well inside a frame.
const maxReply = wire.MaxFrame - 64<<10

// frame is the space left in an answer, which is cut where the frame is full. What comes first is
// always told.
type frame int

// takes tells whether a message still goes in, and counts it.
func (f *frame) takes(m proto.Message) bool { return f.takesBytes(proto.Size(m)) }

func (f *frame) takesBytes(n int) bool {
	if *f < frame(n+8) { // 8: its tag and length, at most
		*f = 0 // what follows is smaller perhaps, and would stand in another order
		return false
	}
	*f -= frame(n + 8)
	return true
}

// valid makes text that protobuf takes: compilers and drivers say anything.
func valid(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }

// clip keeps a name or reason short enough for many of them to fit into a frame.
func clip(text string) string { return valid(text[:min(len(text), 400)]) }

// keyText writes a key as people and clients know it; a zero key is that of nothing.
func keyText(key [32]byte) string {
	if key == [32]byte{} {
		return ""
	}
	return hex.EncodeToString(key[:])
}

// milliseconds is Unix time, 0 for no time.
func milliseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

// Reply is the answer as clients are told of it, without the time that it took.
func (a *Answer) Reply() *wire.AcquireReply {
	reply := &wire.AcquireReply{
		Outcome: a.Outcome, ModelDigest: a.ModelDigest.String(),
		Compatibility:       a.Compatibility.Verdict.String(),
		CompatibilitySource: a.Compatibility.Source,
		CompatibilityReason: valid(a.Compatibility.Reason), Why: valid(a.Why), Record: a.Record,
		Explanation: a.Explanation, Runtime: a.Runtime, Job: a.Job, Warnings: a.Warnings,
		View: a.Path, Graph: a.Graph, SessionOptions: a.SessionOptions,
		GraphOptimizationLevel: a.GraphOptimizationLevel,
	}
	reply.RequestKey = keyText(a.RequestKey)
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

// Reply is the progress as clients are told of it; the socket adds since when.
func (p *Progress) Reply() *wire.Progress {
	return &wire.Progress{Phase: p.Phase, Detail: valid(p.Detail), DoneBytes: p.Done,
		TotalBytes: p.Total,
		EstimateMs: p.Estimate.Milliseconds(), Job: p.Job, Waiting: uint32(p.Waiting),
		Done: p.Through, Total: p.Of}
}

// JobsReply tells of the first jobs and failures, as many as fit. Of the older failures the compiler's
// words are left out.
func JobsReply(jobs []Job, failed []failure.Failure) *wire.JobsReply {
	reply, left := &wire.JobsReply{}, frame(maxReply/2) // the rest is for failures
	for i := range jobs {
		one := jobReply(&jobs[i])
		if !left.takes(one) {
			break
		}
		reply.Jobs = append(reply.Jobs, one)
	}
	left = frame(maxReply - proto.Size(reply))
	brief := left / 2
	for i := range failed {
		one := failureReply(&failed[i])
		if left < brief {
			delete(one.Facts, "stderr")
			one.Text = valid(one.Text[:min(len(one.Text), 256)])
		}
		if !left.takes(one) {
			break
		}
		reply.Failures = append(reply.Failures, one)
	}
	return reply
}

func jobReply(j *Job) *wire.Job {
	out := &wire.Job{Id: j.ID, State: j.State, Phase: j.Phase, ModelName: valid(j.ModelName),
		ModelDigest: keyText(j.ModelDigest),
		RequestKey:  keyText(j.RequestKey), Build: keyText(j.Build), Ep: j.EP, Uid: j.UID,
		Background: j.Background,
		Waiting:    uint32(j.Waiting), QueuedMs: milliseconds(j.Queued),
		StartedMs: milliseconds(j.Started),
		ElapsedMs: j.Elapsed.Milliseconds(), EstimateMs: j.Estimate.Milliseconds(),
		Why: valid(j.Why), Models: uint32(j.Models)}
	var e *apierr.Error
	if errors.As(j.Err, &e) {
		out.Error = &wire.Error{Class: wire.ErrorClass(e.Class), Text: valid(e.Text),
			Hint: valid(e.Hint), Facts: validFacts(e.Facts)}
	} else if j.Err != nil {
		out.Error = &wire.Error{Class: wire.ErrorClass_INTERNAL, Text: "internal error"} // what it is stands in the log
	}
	return out
}

func failureReply(f *failure.Failure) *wire.Failure {
	return &wire.Failure{
		RequestKey: f.RequestKey.String(), Build: f.BuildKey.String(),
		ModelName: valid(f.ModelName), ModelDigest: f.ModelDigest.String(), Ep: f.EP,
		Reason: string(f.Reason), Text: valid(f.Text), Facts: validFacts(f.Facts),
		Count: uint32(f.Count), FirstMs: milliseconds(f.First), LastMs: milliseconds(f.Last),
		RetryMs: milliseconds(f.Retry), Scope: f.Scope,
	}
}

func validFacts(facts map[string]string) map[string]string {
	out := make(map[string]string, len(facts))
	for name, value := range facts {
		out[name] = valid(value)
	}
	return out
}
