package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/config"
	"github.com/epcached/epcached/failure"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// RetryJobs forgets failures.
func (b *backend) RetryJobs(ctx context.Context, p unixsock.Peer, w *wire.RetryJobs) (*wire.JobsReply, error) {
	gone, err := b.cache.Retry(ctx, peer(p), w.Entries, w.All)
	if err != nil {
		return nil, err
	}
	return &wire.JobsReply{Failures: failuresReply(gone, maxReply)}, nil
}

// failuresReply takes at most so many bytes: of the older ones the compiler's words are left out, then they themselves.
func failuresReply(list []failure.Failure, limit int) []*wire.Failure {
	var out []*wire.Failure
	used := 0
	for i := range list {
		f := failureReply(&list[i])
		if used > limit/2 {
			delete(f.Facts, "stderr")
			f.Text = valid(f.Text[:min(len(f.Text), 256)])
		}
		if used += proto.Size(f) + 8; used > limit {
			break
		}
		out = append(out, f)
	}
	return out
}

func failureReply(f *failure.Failure) *wire.Failure {
	out := &wire.Failure{
		RequestKey: f.RequestKey.String(), Build: f.BuildKey.String(), ModelName: valid(f.ModelName), ModelDigest: f.ModelDigest.String(),
		Ep: f.EP, Reason: string(f.Reason), Text: valid(f.Text), Facts: make(map[string]string, len(f.Facts)),
		Count: uint32(f.Count), FirstMs: milliseconds(f.First), LastMs: milliseconds(f.Last), RetryMs: milliseconds(f.Retry), Scope: f.Scope,
	}
	for key, value := range f.Facts {
		out.Facts[key] = valid(value)
	}
	return out
}

// failureOptions says in the cache's terms how long failures are remembered.
func failureOptions(f config.Failures) failure.Options {
	return failure.Options{Off: !f.Remember, Crash: pause(f.Crash), Limit: pause(f.Limit), Longest: pause(f.Longest), Refused: pause(f.Refused)}
}

// pause reads what was found right when the configuration was read.
func pause(text string) time.Duration {
	d, err := config.ParseDuration(text)
	if err != nil {
		return 0 // the cache's default
	}
	return d
}

// conditions are what of the daemon a compile's outcome depends on: what failed under others is tried again.
func conditions(s *config.Settings) string {
	limits := limitsOf(s.Limits)
	limits.Nice = 0 // decides how long it takes, and not what comes of it
	return strings.Join([]string{version, fmt.Sprintf("%+v %+v", limits, sandboxOf(s.Sandbox)), s.Worker, s.WorkerUser}, "\n")
}
