// Package claims lets an application compile a missing build for all waiting requests, with
// libraries of its own, and stores the result.
//
// A request for a claim waits for a job that works outside of the daemon. The job grants the claim
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
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/memo"
)

// Limits bound what applications compile themselves, with libraries of their own.
type Limits struct {
	Deadline  time.Duration // how long a claim may take; 0: 30 min
	Bytes     int64         // of one artefact that is put; 0: 64 GiB
	UserBytes int64         // of all that a user has put, and is kept; 0: 256 GiB
	Trust     []string      // files with the public keys that sign trusted imports
	Threshold int           // different keys that have to have signed an import; 0: one
	Open      int           // claims of one user at the same time; 0: 16
}

// OrDefault returns the limits with the defaults for those that are 0.
func (o Limits) OrDefault() Limits {
	o.Deadline = cmp.Or(o.Deadline, 30*time.Minute)
	o.Bytes = cmp.Or(o.Bytes, 64<<30)
	o.UserBytes = cmp.Or(o.UserBytes, 256<<30)
	o.Open = cmp.Or(o.Open, 16)
	return o
}

// Claims are those that are held, and the requests that want one.
type Claims struct {
	*build.Builder
	limits  func() Limits // those in effect
	trust   *trust.Documents
	Limiter rights.Limiter
	// an owner puts one at a time, because files may block
	Puts       keyed.Locks[uint32]
	pastClaims memo.Table[string, endedClaim] // that ended, by id

	mu       sync.Mutex
	open     map[string]*claim       // by id; guarded by mu
	claimers map[jobs.Key][]*claimer // in order; guarded by mu
}

// endedClaim has the reason for refusing a put that comes too late.
type endedClaim struct {
	why string
	uid uint32
}

const (
	maxEndedClaims = 1024
	// A user may be given so many claims at once, and then one in each interval, because an
	// application may load many models.
	claimBurst    = 64
	claimInterval = time.Second
)

// New returns Claims without any claim. It calls limits for those that are in effect.
func New(bd *build.Builder, limits func() Limits, documents *trust.Documents) *Claims {
	return &Claims{Builder: bd, limits: limits, trust: documents,
		Limiter: rights.Limiter{Burst: claimBurst, Interval: claimInterval, Now: bd.Now},
		open:    make(map[string]*claim), claimers: make(map[jobs.Key][]*claimer)}
}

// addClaimer puts a request among those that want the claim, unless its user has too many.
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

// removeClaimer takes a request out again, and returns the claim that it was given.
func (cs *Claims) removeClaimer(key jobs.Key, a *claimer) *claim {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.removeClaimerLocked(key, a)
	return a.granted
}

// removeClaimerLocked is withdraw for a caller that holds mu.
func (cs *Claims) removeClaimerLocked(key jobs.Key, a *claimer) {
	cs.claimers[key] = slices.DeleteFunc(cs.claimers[key], func(other *claimer) bool {
		return other == a
	})
	if len(cs.claimers[key]) == 0 {
		delete(cs.claimers, key)
	}
}

// forgetClaim forgets a claim that is over, but for the reason.
func (cs *Claims) forgetClaim(cl *claim) {
	why := cl.endReason()
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.open, cl.ID)
	cs.pastClaims.Save(cl.ID, endedClaim{why, cl.Peer.UID}, maxEndedClaims)
}

// Counts returns how many claims are held, and how many requests want one.
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

// GiveUp ends a claim without a result. Waiting requests get text and code; the next one
// that asked for a claim gets it.
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

// maxClaimText bounds a client's text that is passed on.
const maxClaimText = 4096

// shownText makes what a client said fit to be shown.
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

// claim is a Claim as long as it lasts. It ends when its artefact is put, when it is given up, with
// the connection that it was given on, or at its deadline, whichever is first. A put that is begun
// in time may be finished.
type claim struct {
	request.Claim
	claims           *Claims
	scope            string // of what is put
	job              *jobs.Job
	*request.Attempt // of the claimant; its files are those of libraries only, and the claim's own
	owner            uint32
	began            time.Time
	acceptsPut       signature
	adopts           bool // what is put is the request's own model

	duration context.Context    // ends when it is over
	deadline context.CancelFunc // ends lasts
	timer    *time.Timer
	release  func() bool // stops the wait for the connection's end

	mu     sync.Mutex // guards the rest
	state  claimState
	result *jobs.Result      // of a claim with an artefact
	end    *request.ClaimEnd // of any other that is over
	due    *request.ClaimEnd // ends it if its artefact, which is being stored, cannot be
}

// claimState is how far a claim has come.
type claimState int

const (
	claimGranted claimState = iota
	claimPutting            // its artefact is being copied and checked
	claimStoring            // the artefact is sound, and is being stored
	claimEnded
)

// putTime is how long a put may take that was begun in time.
const putTime = 10 * time.Minute

// endWithoutResult ends the claim, unless it is over or being stored, and reports whether it did.
func (cl *claim) endWithoutResult(text string, code int32) bool {
	return cl.endIfStateAtMost(claimPutting, text, code)
}

// endIfStateAtMost is finish for a claim that has come so far at most.
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

// endReason returns why the claim is over; "": it is not.
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

// changeState takes the claim from one state to another, and reports whether it was in the first.
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

// contextOf returns the context of work that ends with the claim.
func (cl *claim) contextOf(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(cl.duration, cancel)
	return ctx, func() { stop(); cancel() }
}
