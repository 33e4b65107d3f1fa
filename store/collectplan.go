package store

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/views"
)

// Goal is the goal of a collection.
type Goal struct {
	// Bytes is a bound on the disk bytes of the peer's builds, if lower than the configuration's;
	// nil: only the configuration's bounds.
	Bytes *int64
	// Slack frees somewhat more than necessary, so that not each put has to evict.
	Slack bool
	Need  int64 // bytes on disk that must fit in addition
	// the part of Need that is written already, and so counts for the budget but not for the floor
	Written int64
	// Urgent: a reservation waits, so no build is packed, because packing takes longer than
	// eviction.
	Urgent bool

	Progress index.Progress // is told the progress of the survey; may be nil
}

// Owner selects the builds that a collection may evict.
type Owner struct {
	UID uint32
	All bool // builds of all users, for an administrator or the daemon itself
}

// The bounds that a collection frees space for. The reasons of tombstones name them in parentheses.
const (
	forBudget = "budget"
	forFloor  = "free_floor"
	forGoal   = "gc"
)

// maxRecords bounds the steps with records in the reply, because each takes 2 KiB of a frame's 1
// MiB.
const maxRecords = 256

// Plan plans to bring the owner's builds within the configured bounds, or within the goal.
// evict.Snapshot.Plan decides the order of evictions.
func (c *Collector) Plan(ctx context.Context, of Owner, goal Goal) (*Collection, error) {
	began := time.Now()
	c.st.packing.Recipes.RetryUnread() // because unread recipes prevent eviction
	b, err := c.st.Bounds()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "collect")
	}
	survey, inv, err := c.Inventory(ctx, goal.Progress)
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "collect")
	}
	to := evict.Limits{Bytes: -1, Unused: b.unused, User: b.User,
		Packs: !goal.Urgent && c.st.settings.Load().Pack.When != PackOff}
	if of.All {
		to.Share = b.Share
		if to.Bytes, to.Missing, err = c.AllowedBytes(b, goal); err != nil {
			return nil, apierr.New(apierr.Internal, err, "collect")
		}
	}
	if goal.Slack {
		to.UserSlack = b.User / SlackPart
	}
	bound := forBudget
	if goal.Bytes != nil && (to.Bytes < 0 || *goal.Bytes < to.Bytes) {
		to.Bytes, bound = *goal.Bytes, forGoal
	}
	s := c.snapshot(survey, inv, !goal.Slack)
	s.AgesFrom = c.agesFrom(s.At, to.Unused)
	if s.Whole = of.All; !of.All {
		own := ownScope(of.UID)
		s.Builds = slices.DeleteFunc(s.Builds, func(b index.Brief) bool {
			if b.UID == of.UID && b.Scope != own {
				s.Others = append(s.Others, b)
			}
			return b.Scope != own
		})
	}
	plan := &Collection{Plan: *s.Plan(to), urgent: goal.Urgent, bound: bound}
	if plan.Goal != to.Bytes {
		plan.bound = forFloor // it requires more
	}
	for _, step := range plan.Steps[:min(len(plan.Steps), maxRecords)] {
		b, _ := c.st.index.Get(step.ID) // zero if it was just removed
		plan.Records = append(plan.Records, &b)
	}
	plan.Took = time.Since(began)
	return plan, nil
}

// snapshot returns the input of a plan. waits says that the collection waits for the daemon's
// reads, so that builds which it is reading may be evicted.
func (c *Collector) snapshot(survey *index.Survey, inv *evict.Inventory,
	waits bool) *evict.Snapshot {
	s := &evict.Snapshot{At: c.st.now(), Bound: c.st.options.Bound, Builds: survey.Builds,
		Inventory: inv, NotServed: make(map[index.BuildID]string),
		Pinned: make(map[index.BuildID]bool)}
	for _, id := range c.st.index.Journal.NotServed() {
		s.NotServed[id] = c.st.index.Journal.StateOf(id).Name
	}
	for _, id := range c.st.index.Journal.PinnedBuilds() {
		s.Pinned[id] = true
	}
	s.Storing = c.st.ledger.Reserved().ByUser
	var own views.OwnFiles // at the time of this plan
	none := c.whyNoEviction()
	s.WhySpared = func(b *index.Brief) string {
		why := cmp.Or(none, c.pinnedOrInUse(b.ID))
		// skipped without a view, because most builds of a large store have none
		if why == "" && (b.Viewed || c.st.views.CurrentView(b.ID) != nil) {
			if why = c.WhyProtected(b.ID, &own); why == KeptReading && waits {
				return ""
			}
		}
		return why
	}
	return s
}

// clock records the observed time of day, in the index, to notice when the clock jumps.
type clock struct {
	Seen     time.Time // time of the latest plan
	AgesFrom time.Time // since when the clock has not jumped
}

var clockKey = []byte("clock")

// agesFrom returns since when the clock has not jumped, so that a jump makes no build too old. A
// step of more than half of max_unused between two plans counts as a jump. A machine that was off
// for longer looks the same, so all ages begin again after it.
func (c *Collector) agesFrom(now time.Time, unused time.Duration) time.Time {
	if unused == 0 {
		return time.Time{}
	}
	var was clock
	row, known := c.st.index.Memos.Get(clockKey)
	if known = known && json.Unmarshal(row, &was) == nil; known &&
		now.Sub(was.Seen).Abs() < time.Second {
		return was.AgesFrom
	}
	now = now.Round(0)
	if !known || now.Sub(was.Seen) > unused/2 || now.Before(was.AgesFrom) {
		was.AgesFrom = now
	}
	was.Seen = now
	row, err := json.Marshal(was)
	if err == nil {
		err = c.st.index.Memos.Save(clockKey, row)
	}
	if err != nil {
		// best effort: the next plan tries again
		c.st.log.Warn("cannot record the time of this plan", "error", err)
	}
	return was.AgesFrom
}

// SlackPart is the divisor of each bound for the space that a collection with Slack frees in
// addition.
const SlackPart = 20

// AllowedBytes returns how many bytes blobs may take within the budget, negative for no bound, and
// how many bytes are missing to the floor.
func (c *Collector) AllowedBytes(b Bounds, goal Goal) (bytes, missing int64, err error) {
	now, err := c.st.Account()
	if err != nil {
		return -1, 0, err
	}
	aside := c.st.ledger.Reserved()
	reserved, written := aside.Disk, aside.Written+goal.Written
	if !goal.Urgent {
		reserved -= aside.Transient
	}
	bytes = -1
	if budget := b.Budget; budget > 0 {
		if goal.Slack {
			budget -= budget / SlackPart
		}
		bytes = max(budget-now.Manifests-now.UnlinkedOpen-reserved-goal.Need, 0)
	}
	if missing = b.Floor - (b.Free - (reserved + goal.Need - written)); b.Floor > 0 && missing > 0 {
		if goal.Slack {
			missing += b.Floor / SlackPart
		}
		return bytes, missing, nil
	}
	return bytes, 0, nil
}
