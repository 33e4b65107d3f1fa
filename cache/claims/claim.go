package claims

import (
	"context"
	"sync"
	"time"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
)

// claim is a Claim as long as it lasts. It ends when its artefact is put, when it is given up, with
// the connection that it was given on, or at its deadline, whichever is first. A put that is begun
// in time may be finished.
type claim struct {
	request.Claim
	of               *Claims
	scope            string // of what is put
	job              *jobs.Job
	*request.Attempt // of the claimant; its files are those of libraries only, and the claim's own
	owner            uint32
	began            time.Time
	takes            signature
	adopts           bool // what is put is the request's own model

	lasts context.Context    // ends when it is over
	ends  context.CancelFunc // ends lasts
	timer *time.Timer
	leave func() bool // stops the wait for the connection's end

	mu     sync.Mutex // guards the rest
	state  claimState
	result *jobs.Result      // of a claim whose artefact was put
	end    *request.ClaimEnd // of any other that is over
	due    *request.ClaimEnd // ends it if its artefact, which is being stored, cannot be
}

// claimState is how far a claim has come.
type claimState int

const (
	claimHeld    claimState = iota
	claimPutting            // its artefact is being copied and checked
	claimStoring            // the artefact is sound, and is being stored
	claimOver
)

// putTime is how long a put may take that was begun in time.
const putTime = 10 * time.Minute

// finish ends the claim without a result, unless it is over or being stored, and reports whether it
// did.
func (cl *claim) finish(text string, code int32) bool {
	return cl.finishUpTo(claimPutting, text, code)
}

// finishUpTo is finish for a claim that has come so far at most.
func (cl *claim) finishUpTo(latest claimState, text string, code int32) bool {
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
	cl.over()
	return true
}

// deliver ends the claim with a result.
func (cl *claim) deliver(result *jobs.Result) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	cl.result = result
	cl.over()
}

// overWhy returns why the claim is over; "": it is not.
func (cl *claim) overWhy() string {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	switch {
	case cl.state != claimOver:
		return ""
	case cl.end != nil:
		return cl.end.Text
	}
	return "it was put already"
}

// over ends the claim. The caller holds mu.
func (cl *claim) over() {
	cl.state = claimOver
	cl.timer.Stop()
	if cl.leave != nil {
		cl.leave()
	}
	cl.ends()
}

// move takes the claim from one state to another, and reports whether it was in the first.
func (cl *claim) move(from, to claimState) bool {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	if cl.state != from {
		return false
	}
	if to == claimHeld && cl.due != nil {
		cl.end = cl.due
		cl.over()
		return true
	}
	cl.state = to
	switch to {
	case claimPutting:
		cl.timer.Reset(putTime)
	case claimHeld:
		cl.timer.Reset(max(0, time.Until(cl.Deadline)))
	}
	return true
}

// during returns the context of work that ends with the claim.
func (cl *claim) during(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(cl.lasts, cancel)
	return ctx, func() { stop(); cancel() }
}
