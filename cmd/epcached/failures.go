package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/internal/config"
)

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
