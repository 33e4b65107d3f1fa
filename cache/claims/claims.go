// Package claims lets an application compile a missing build for all waiting requests, with
// libraries of its own, and stores the result.
//
// A request for a claim waits for a job that is done outside the daemon. The job grants the claim
// to one request after the other, in order of arrival, until an artefact is put. The artefact is
// copied, checked as untrusted, and published. An adoption stores a model that a user compiled
// earlier, in the same way and without a grant. Start reading at Claims.ClaimOrWait and Claims.Put.
package claims

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/trust"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/memo"
)

// Limits bound the artefacts that applications compile themselves.
type Limits struct {
	Deadline  time.Duration // how long a claim lasts at most; 0: 30 min
	Bytes     int64         // of one submitted artefact; 0: 64 GiB
	UserBytes int64         // of all stored builds that a user submitted; 0: 256 GiB
	Trust     []string      // files with the public keys that sign trusted imports
	Open      int           // claims of one user at the same time; 0: 16
}

// OrDefault replaces limits that are 0 by the defaults.
func (o Limits) OrDefault() Limits {
	o.Deadline = cmp.Or(o.Deadline, 30*time.Minute)
	o.Bytes = cmp.Or(o.Bytes, 64<<30)
	o.UserBytes = cmp.Or(o.UserBytes, 256<<30)
	o.Open = cmp.Or(o.Open, 16)
	return o
}

// Claims has the open claims, and the requests that wait for one.
type Claims struct {
	*build.Builder
	limits  func() Limits // returns the limits in effect
	trust   *trust.Documents
	Limiter rights.Limiter
	// Puts lets each user put one artefact at a time, because reading its files may block.
	Puts       keyed.Locks[uint32]
	pastClaims memo.Table[string, endedClaim] // recently ended claims, by id

	mu       sync.Mutex
	open     map[string]*claim       // by id; guarded by mu
	claimers map[jobs.Key][]*claimer // in order of arrival; guarded by mu
}

// endedClaim has the reason with which a put is refused that comes after the claim's end.
type endedClaim struct {
	why string
	uid uint32
}

const (
	maxEndedClaims = 1024
	// The rate limit of a user: a burst, because an application may load many models at its start,
	// and then one claim in each interval.
	claimBurst    = 64
	claimInterval = time.Second
)

// New returns Claims without any claim. limits returns the limits in effect.
func New(bd *build.Builder, limits func() Limits, documents *trust.Documents) *Claims {
	return &Claims{Builder: bd, limits: limits, trust: documents,
		Limiter: rights.Limiter{Burst: claimBurst, Interval: claimInterval, Now: bd.Now},
		open:    make(map[string]*claim), claimers: make(map[jobs.Key][]*claimer)}
}

// addClaimer queues a request for the claim, unless its user has too many.
func (cs *Claims) addClaimer(key jobs.Key, a *claimer) error {
	if wait, ok := cs.Limiter.Allow(a.owner); !ok {
		return apierr.New(apierr.Busy, nil, "too many claims").
			WithHint("the next one is granted in %s", wait.Round(time.Second)+time.Second)
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	n := 0
	for _, cl := range cs.open {
		if cl.owner == a.owner {
			n++
		}
	}
	if n >= cs.limits().Open {
		return apierr.New(apierr.Busy, nil, "this user holds %d claims already", n).
			WithHint("submit their builds, or release them")
	}
	cs.claimers[key] = append(cs.claimers[key], a)
	return nil
}

// removeClaimer removes a request from the queue, and returns the claim that it was granted, nil if
// it was not.
func (cs *Claims) removeClaimer(key jobs.Key, a *claimer) *claim {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.removeClaimerLocked(key, a)
	return a.granted
}

// removeClaimerLocked removes a request from the queue. The caller holds mu.
func (cs *Claims) removeClaimerLocked(key jobs.Key, a *claimer) {
	cs.claimers[key] = slices.DeleteFunc(cs.claimers[key], func(other *claimer) bool {
		return other == a
	})
	if len(cs.claimers[key]) == 0 {
		delete(cs.claimers, key)
	}
}

// forgetClaim removes a claim that is over, and remembers only the reason.
func (cs *Claims) forgetClaim(cl *claim) {
	why := cl.endReason()
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.open, cl.ID)
	cs.pastClaims.Save(cl.ID, endedClaim{why, cl.Peer.UID}, maxEndedClaims)
}

// Counts returns how many claims are held, and how many requests wait for one.
func (cs *Claims) Counts() (held, wanted int) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, some := range cs.claimers {
		wanted += len(some)
	}
	return len(cs.open), wanted
}

// find returns the user's own claim. It reports no other user's claim.
func (cs *Claims) find(p request.Peer, id string) (*claim, error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cl, why := cs.open[id], ""
	if cl != nil && cl.Peer.UID == p.UID {
		if why = cl.endReason(); why == "" {
			return cl, nil
		}
	}
	if past, ok := cs.pastClaims.Load(id); ok && past.uid == p.UID {
		why = past.why
	}
	e := apierr.New(apierr.NotFound, nil, "this user has no claim %.80q", id).
		WithHint("request the model again with on_miss claim: " +
			"claims end with their connection, and with the daemon")
	if why != "" {
		e.Text += ": " + why
	}
	return nil, e
}

// GiveUp ends a claim without a result. Waiting requests get text and code; the next one that waits
// for the claim gets it.
func (cs *Claims) GiveUp(p request.Peer, id, text string, code int32) error {
	cl, err := cs.find(p, id)
	if err != nil {
		return err
	}
	if !cl.endWithoutResult(cmp.Or(shownText(text), "it was released"), code) {
		return apierr.New(apierr.NotFound, nil, "claim %.80q is over", id)
	}
	return nil
}

// maxClaimText bounds the text of a client that other clients are shown.
const maxClaimText = 4096

// shownText shortens and cleans a client's text, so that it can be shown on terminals.
func shownText(text string) string { return cleanText(text[:min(len(text), maxClaimText)]) }

// cleanText drops control characters, and replaces invalid UTF-8.
func cleanText(text string) string {
	text = strings.ToValidUTF8(text, "?")
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return -1
		}
		return r
	}, text))
}

// claim is the state of an open request.Claim. It ends when its artefact is put, when the claimant
// gives it up, when the connection it was granted on closes, or at its deadline, whichever is
// first. A put that began before the deadline may finish.
type claim struct {
	request.Claim
	claims *Claims
	scope  string // of the submitted build
	job    *jobs.Job
	// of the claimant; has duplicates of the libraries' descriptors, which the claim closes
	*request.Attempt
	owner  uint32
	began  time.Time
	source *epmodel.Interface // of the model that is compiled
	adopts bool               // the request's own model is stored as the build

	duration context.Context    // is done when the claim is over
	deadline context.CancelFunc // cancels duration
	timer    *time.Timer
	release  func() bool // stops watching for the end of the connection

	mu     sync.Mutex // guards the fields below
	state  claimState
	result *jobs.Result      // of a claim that ended with a build
	end    *request.ClaimEnd // why the claim ended without a build
	due    *request.ClaimEnd // becomes end if storing the artefact, which is under way, fails
}

// claimState is the progress of a claim.
type claimState int

const (
	claimGranted claimState = iota
	claimPutting            // the artefact is being copied and checked
	claimStoring            // the artefact is sound, and is being stored
	claimEnded
)

// putTime is how long a put may last that began before the deadline.
const putTime = 10 * time.Minute

// endWithoutResult ends the claim, unless it is over or being stored, and reports whether it did.
func (cl *claim) endWithoutResult(text string, code int32) bool {
	return cl.endIfStateAtMost(claimPutting, text, code)
}

// endIfStateAtMost ends the claim without a result if it has not passed the state latest, and
// reports whether it did.
func (cl *claim) endIfStateAtMost(latest claimState, text string, code int32) bool {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	end := &request.ClaimEnd{UID: cl.Peer.UID, Text: text, Code: code}
	if cl.state > latest {
		if cl.due == nil {
			cl.due = end
		}
		return false
	}
	cl.end = end
	cl.endLocked()
	return true
}

// deliver ends the claim with a result.
func (cl *claim) deliver(result *jobs.Result) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	cl.result = result
	cl.endLocked()
}

// endReason returns why the claim is over, "" if it is not.
func (cl *claim) endReason() string {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	switch {
	case cl.state != claimEnded:
		return ""
	case cl.end != nil:
		return cl.end.Text
	}
	return "its build was submitted already"
}

// endLocked ends the claim. The caller holds mu.
func (cl *claim) endLocked() {
	cl.state = claimEnded
	cl.timer.Stop()
	if cl.release != nil {
		cl.release()
	}
	cl.deadline()
}

// changeState moves the claim to the state to, and reports false if its state is no longer from.
func (cl *claim) changeState(from, to claimState) bool {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	if cl.state != from {
		return false
	}
	if to == claimGranted && cl.due != nil {
		cl.end = cl.due
		cl.endLocked()
		return true
	}
	cl.state = to
	switch to {
	case claimPutting:
		cl.timer.Reset(putTime)
	case claimGranted:
		cl.timer.Reset(max(0, time.Until(cl.Deadline)))
	}
	return true
}

// contextOf returns a context that is cancelled when the claim ends.
func (cl *claim) contextOf(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(cl.duration, cancel)
	return ctx, func() { stop(); cancel() }
}
