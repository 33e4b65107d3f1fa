package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/epcached/epcached/cache"
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
	return cache.JobsReply(nil, gone), nil
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
