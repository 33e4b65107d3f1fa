package remote

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// The circuit breaker opens after breakerFailures in a row. The time until the next probe doubles
// each time that a probe fails.
const (
	breakerFailures = 3
	breakerFirst    = 30 * time.Second
	breakerLongest  = 10 * time.Minute
)

// lastErrors bounds what is kept of a remote's errors.
const lastErrors = 8

// state has the breaker and the figures of a remote.
type state struct {
	config Config
	now    func() time.Time

	mu       sync.Mutex // guards the fields below
	failures int        // in a row
	opened   time.Duration
	until    time.Time // end of the time for which the breaker is open
	probing  bool
	status   Status
}

func newState(c Config) *state { return &state{config: c, now: time.Now} }

// Status has the figures of a remote since the start of the daemon or the configuration of the
// remote.
type Status struct {
	Name, URL   string
	Failing     bool          // the last call did not reach it
	Open        bool          // the breaker is open, so calls fail at once
	OpenFor     time.Duration // until the next probe
	Calls       int64
	Missing     int64
	Refused     int64 // 401 and 403: wrong credentials or bucket policy
	Unreachable int64
	Damaged     int64
	Skipped     int64 // because the breaker was open
	Wire        Wire
	Last        []Failure // the newest is the last
}

// Failure is an error of a remote; repeated ones are counted.
type Failure struct {
	Time  time.Time
	Text  string
	Count int
}

// Status returns what is known of each remote, in the order of the configuration. It asks neither
// the helper nor the remotes.
func (c *Client) Status() (all []Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.order {
		all = append(all, c.remotes[name].report())
	}
	return all
}

func (s *state) report() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.status
	out.Name, out.URL, out.Last = s.config.Name, s.config.URL, slices.Clone(s.status.Last)
	out.Failing = s.failures > 0
	if out.Open = s.failures >= breakerFailures; out.Open {
		out.OpenFor = max(0, s.until.Sub(s.now()))
	}
	return out
}

// enter fails while the breaker is open. probe reports that this call decides whether it closes.
func (s *state) enter(always bool) (probe bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	open := s.failures >= breakerFailures
	if open && !always && (s.probing || s.now().Before(s.until)) {
		s.status.Skipped++
		return false, unreachable(s.config.Name,
			fmt.Sprintf("not asked for %v more, after %d failures",
				max(0, s.until.Sub(s.now())).Round(time.Second), s.failures))
	}
	s.status.Calls++
	if open && !s.probing {
		s.probing = true
		return true, nil
	}
	return false, nil
}

// leave counts the outcome of a call. Only a remote that does not answer, or answers with a server
// error, opens the breaker, and not the end of the caller's context.
func (s *state) leave(probe bool, a *Answer, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if probe {
		s.probing = false
	}
	if a != nil {
		s.status.Wire.In += a.Wire.In
		s.status.Wire.Out += a.Wire.Out
		s.status.Wire.Requests += a.Wire.Requests
	}
	switch {
	case errors.Is(err, ErrUnreachable):
		s.status.Unreachable++
		if s.failures++; probe || s.failures == breakerFailures {
			s.opened = min(max(2*s.opened, breakerFirst), breakerLongest)
			s.until = s.now().Add(s.opened)
		}
	case errors.Is(err, ErrRefused):
		s.status.Refused++
	case errors.Is(err, ErrMissing):
		s.status.Missing++
		s.failures, s.opened = 0, 0
		return
	case errors.Is(err, ErrDamaged):
		s.status.Damaged++
	case err == nil:
		s.failures, s.opened = 0, 0
		return
	default:
		return
	}
	s.keep(err.Error())
}

func (s *state) keep(text string) {
	if n := len(s.status.Last); n > 0 && s.status.Last[n-1].Text == text {
		s.status.Last[n-1].Count++
		s.status.Last[n-1].Time = s.now()
		return
	}
	if len(s.status.Last) == lastErrors {
		s.status.Last = slices.Delete(s.status.Last, 0, 1)
	}
	s.status.Last = append(s.status.Last, Failure{s.now(), text, 1})
}
