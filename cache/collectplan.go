package cache

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/views"
)

// Goal says what a collection is to come to.
type Goal struct {
	Bytes   *int64 // on disk, of what the peer may collect, if that is less than the configuration wants; nil: as it wants
	slack   bool   // somewhat less than the configuration wants, so that not each put has to make room
	need    int64  // bytes on disk that are to fit in besides
	written int64  // of these are there already: for the floor nothing has to go for them
	hurry   bool   // a reservation waits: nothing is packed, because that takes longer than to evict

	Progress func(Progress) // is told how far the survey of the store is; may be nil
}

// mostTold bounds the steps of a plan whose builds' records are kept: what is told. A told step takes
// less than 2 KiB, and a frame 1 MiB.
const mostTold = 256

// PlanCollection plans to bring what the peer may collect within the configured bounds, or within the goal: everything for
// administrators, else the peer's own builds. What goes in which order, space.Snapshot.Plan says.
func (c *Cache) PlanCollection(ctx context.Context, p Peer, goal Goal) (*Collection, error) {
	began := time.Now()
	c.forms.Recipes.ReadAgain() // else nothing goes
	b, err := c.bounds()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "collect")
	}
	survey, inv, err := c.takeInventory(ctx, farThrough(goal.Progress, "reading"))
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "collect")
	}
	whole := c.rights.Administrator(p)
	to := evict.Limits{Bytes: -1, Unused: b.unused, User: b.user, Entries: b.entries, Packs: !goal.hurry && c.settings.Load().pack.when != PackOff}
	if whole {
		if to.Bytes, to.Missing, err = c.roomFor(b, goal); err != nil {
			return nil, apierr.New(apierr.Internal, err, "collect")
		}
	}
	budgeted := to.Bytes >= 0
	if goal.Bytes != nil && (to.Bytes < 0 || *goal.Bytes < to.Bytes) {
		to.Bytes, budgeted = *goal.Bytes, false
	}
	s := c.snapshot(survey, inv, !goal.slack)
	if s.Whole = whole; !whole {
		own := rights.OwnScope(p)
		s.Builds = slices.DeleteFunc(s.Builds, func(b index.Brief) bool {
			if b.UID == p.UID && b.Scope != own {
				s.Others = append(s.Others, b)
			}
			return b.Scope != own
		})
	}
	plan := &Collection{Plan: *s.Plan(to), hurry: goal.hurry}
	plan.forBudget = budgeted && plan.Goal == to.Bytes // else more has to go, to keep some of the disk free
	for _, step := range plan.Steps[:min(len(plan.Steps), mostTold)] {
		b, _ := c.index.Get(step.ID) // of one that has just gone, nothing
		plan.told = append(plan.told, &b)
	}
	plan.Took = time.Since(began)
	return plan, nil
}

// snapshot is what plans are made from. waits: what the daemon is just reading may go, when it is done; not where requests may need the room now.
func (c *Cache) snapshot(survey *index.Survey, inv *evict.Inventory, waits bool) *evict.Snapshot {
	s := &evict.Snapshot{At: c.now(), Builds: survey.Builds, Inventory: inv, NotServed: make(map[index.BuildID]string), Pinned: make(map[index.BuildID]bool)}
	for _, id := range c.index.Journal.NotServed() {
		s.NotServed[id] = c.index.Journal.StateOf(id).Name
	}
	for _, id := range c.index.Journal.PinnedBuilds() {
		s.Pinned[id] = true
	}
	c.places.mu.Lock()
	s.Storing = maps.Clone(c.places.byUser)
	c.places.mu.Unlock()
	var own views.OwnFiles // as of this plan
	none := c.nothingGoes()
	s.Spared = func(b *index.Brief) string {
		why := cmp.Or(none, c.wantedNow(b.ID))
		if why == "" && (b.Viewed || c.hasView(b.ID)) { // else no file is looked at: most builds of a large store have no view
			if why = c.spared(b.ID, &own); why == keptReading && waits {
				return ""
			}
		}
		return why
	}
	return s
}

// slackPart is the part of the budget that a collection leaves free beyond what it has to.
const slackPart = 20

// roomFor says how many bytes blobs may have within the budget, below 0 for any number, and how many are missing to the floor.
func (c *Cache) roomFor(b bounds, goal Goal) (bytes, missing int64, err error) {
	now, err := c.account()
	if err != nil {
		return -1, 0, err
	}
	c.places.mu.Lock()
	reserved, written := c.places.reserved, c.places.written+goal.written
	if !goal.hurry {
		reserved -= c.places.passing
	}
	c.places.mu.Unlock()
	bytes = -1
	if budget := b.budget; budget > 0 {
		if goal.slack {
			budget -= budget / slackPart
		}
		bytes = max(budget-now.manifests-now.held-reserved-goal.need, 0)
	}
	if missing = b.floor - (b.free - (reserved + goal.need - written)); b.floor > 0 && missing > 0 {
		if goal.slack {
			missing += b.floor / slackPart
		}
		return bytes, missing, nil
	}
	return bytes, 0, nil
}
