package remotes

import (
	"cmp"
	"context"
	"crypto/rand"
	"time"

	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// Leases of a fleet. A machine that waits for another one polls for its card. The intervals grow
// with the wait, so that polling adds at most a fifth to it.
const (
	shortestTTL   = time.Second // lease time to live, unless renewed
	longestTTL    = 15 * time.Second
	firstPoll     = 250 * time.Millisecond
	longestPoll   = 5 * time.Second
	unknownLength = 20 * time.Second // assumed time of a compile without an estimate
	maxHolders    = 3                // successive holders of a lease that a request waits for
	leaseBudget   = 2 * time.Second  // time of one call in the background
	publishBudget = 30 * time.Second
	// A lease ends this long after the compile even if the build was not published.
	publishWithin = 5 * time.Minute
)

// heldLease is the lease of a build that this machine compiles for the fleet.
type heldLease struct{ stop func() } // stops the renewal and releases the lease

// Begin fetches the build, or waits for another machine of the fleet that compiles it. If it
// returns no build, the caller compiles and then calls end, unless it is nil, because other
// machines wait for that. stored says whether there is a build.
func (rs *Remotes) Begin(ctx context.Context, a *Ask) (b *index.Build, end func(stored bool)) {
	if b = rs.Fetch(ctx, a); b != nil {
		return b, nil
	}
	end = func(bool) {}
	all := rs.all()
	for i := range all {
		r := &all[i]
		if !r.Lease || !r.Ask || a.whyNot() != "" || !rs.knownMissing(r, a.Plan.BuildKey) ||
			rs.aside(r) > 0 {
			continue // no lease, or the remote does not answer
		}
		b, ours := rs.acquireLease(ctx, r, a)
		if b != nil {
			return b, nil
		}
		if ours != nil {
			return nil, ours
		}
	}
	return nil, end
}

// leaseWait decides how long a machine waits for the holders of a lease: for each until its compile
// is expected to end, and half of this machine's own estimate longer, because a holder may have
// died.
type leaseWait struct {
	own     time.Duration // this machine's own estimate
	until   time.Time
	taken   time.Time // when the current holder took the lease
	holders int
}

// held records the current holder of the lease.
func (t *leaseWait) held(now time.Time, l *remote.Lease) {
	if taken := now.Add(-l.Age); t.holders == 0 ||
		t.holders < maxHolders && taken.Sub(t.taken) > shortestTTL {
		t.holders, t.taken = t.holders+1, taken
		rest := cmp.Or(l.Estimate, t.own) - l.Age
		t.until = now.Add(min(max(rest, 0), t.own) + max(t.own/2, 3*shortestTTL))
	}
}

// acquireLease takes the lease, or waits and returns the build that its holder published. If it
// returns neither, the caller compiles without a lease. A machine that does not publish, or
// has no valid key, takes no lease, and only waits for those that do.
func (rs *Remotes) acquireLease(ctx context.Context, r *Remote, a *Ask) (*index.Build, func(bool)) {
	t := &leaseWait{own: cmp.Or(a.Estimate, unknownLength)}
	_, cannot := rs.signer(r, a.Plan.BuildKey)
	ask := remote.LeaseRequest{Key: portable.Hash(a.Plan.BuildKey), Holder: rand.Text(),
		Look: !r.Publish || cannot != nil, Estimate: a.Estimate,
		// short enough that a dead holder's lease expires before the others stop waiting
		TTL: min(max(t.own/8, shortestTTL), longestTTL)}
	for wait := firstPoll; ; wait = min(wait*6/5, longestPoll) {
		l, err := rs.lease(ctx, r, ask)
		switch {
		case err != nil && t.holders == 0, l.State == remote.NotOffered:
			return nil, nil
		case l.State == remote.Granted:
			end := rs.renewLease(r, ask, a.Plan.BuildKey)
			// The previous holder may have published between the look-up and the lease.
			if b := rs.lookUpAgain(ctx, r, a); b != nil {
				end(false)
				return b, nil
			}
			rs.figuresOf(r.Name).won.Add(1)
			return nil, end
		}
		if t.holders == 0 {
			rs.figuresOf(r.Name).waited.Add(1)
		}
		if err == nil { // on an error the wait continues as before
			t.held(rs.Now(), &l)
		}
		left := t.until.Sub(rs.Now())
		if left <= 0 {
			return nil, nil
		}
		select {
		case <-ctx.Done():
			return nil, nil
		case <-time.After(min(wait, left)):
		}
		if b := rs.lookUpAgain(ctx, r, a); b != nil {
			return b, nil
		}
	}
}

func (rs *Remotes) lease(ctx context.Context, r *Remote,
	l remote.LeaseRequest) (remote.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx,
		min(leaseBudget, cmp.Or(r.Connect, remote.DefaultConnect)*2))
	defer cancel()
	return rs.Client.Lease(ctx, r.Name, l)
}

// lookUpAgain repeats the look-up. For a transfer that follows, mayLose is counted from its own
// start.
func (rs *Remotes) lookUpAgain(ctx context.Context, r *Remote, a *Ask) *index.Build {
	unlock, err := rs.fetching.Lock(ctx, a.Plan.BuildKey)
	if err != nil {
		return nil
	}
	defer unlock()
	once := *a
	once.began = rs.Now()
	return rs.fetchFrom(ctx, r, &once)
}

// renewLease renews the lease until the build is published or known not to be.
func (rs *Remotes) renewLease(r *Remote, ask remote.LeaseRequest,
	build index.BuildKey) (end func(stored bool)) {
	ctx, stop := context.WithCancel(context.Background())
	h, to := &heldLease{stop}, *r
	rs.mu.Lock()
	rs.leases[build] = h
	rs.mu.Unlock()
	rs.renewing.Go(func() {
		tick := time.NewTicker(ask.TTL / 3)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				ask.Release = true
				if _, err := rs.lease(context.Background(), &to, ask); err != nil {
					rs.Log.Debug("lease not released", "remote", to.Name, "error", err)
				}
				return
			case <-tick.C:
				// best effort: if it fails, other machines compile too
				_, _ = rs.lease(ctx, &to, ask)
			}
		}
	})
	return func(stored bool) {
		if !stored {
			rs.endLease(build, h)
			return
		}
		time.AfterFunc(publishWithin, func() { rs.endLease(build, h) })
	}
}

// endLease releases the lease on the build, so that other machines may compile it. With only it
// does so only if that is the current lease.
func (rs *Remotes) endLease(build index.BuildKey, only *heldLease) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	h := rs.leases[build]
	if h == nil || only != nil && h != only {
		return
	}
	delete(rs.leases, build)
	h.stop()
}

const private = "it is private"

// mayLeave returns why a build must not leave the machine, "" if it may.
func (rs *Remotes) mayLeave(b *index.Build) string {
	switch {
	case b.Scope != rights.Shared:
		return private
	case b.Imported.Key != "":
		return "it came from another machine"
	case b.Put && !rs.MayPublish(b.UID):
		return "the application that compiled it is not of a publisher"
	}
	return ""
}
