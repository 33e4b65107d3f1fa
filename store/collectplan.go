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

// Goal says what a collection has to reach.
type Goal struct {
	// on disk, of what the peer may collect, if that is less than the configuration wants; nil: as
	// it wants
	Bytes *int64
	// somewhat less than the configuration wants, so that not each put has to evict
	Slack   bool
	Need    int64 // bytes on disk that are to fit in besides
	Written int64 // of these are there already: for the floor nothing has to go for them
	// a reservation waits: nothing is packed, because that takes longer than to evict
	Urgent bool

	Progress index.Progress // receives how far the survey of the store is; may be nil
}

// Owner says which builds a collection may remove.
type Owner struct {
	UID uint32
	All bool // of all users: an administrator asks, or the daemon itself
}

// maxRecords bounds the steps with records for the reply: 2 KiB each, of a frame's 1 MiB.
const maxRecords = 256

// Plan plans to bring the owner's builds within the configured bounds, or within the goal.
// evict.Snapshot.Plan decides what is removed in which order.
func (c *Collector) Plan(ctx context.Context, of Owner, goal Goal) (*Collection, error) {
	began := time.Now()
	c.st.forms.Recipes.RetryUnread() // else nothing is evicted
	b, err := c.st.Bounds()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "collect")
	}
	survey, inv, err := c.Inventory(ctx, goal.Progress)
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "collect")
	}
	to := evict.Limits{Bytes: -1, Unused: b.unused, User: b.User, Entries: b.Entries,
		Packs: !goal.Urgent && c.st.settings.Load().Pack.When != PackOff}
	if of.All {
		to.Share = b.Share
		if to.Bytes, to.Missing, err = c.AllowedBytes(b, goal); err != nil {
			return nil, apierr.New(apierr.Internal, err, "collect")
		}
	}
	if goal.Slack {
		to.UserSlack, to.EntriesSlack = b.User/SlackPart, b.Entries/SlackPart
	}
	budgeted := to.Bytes >= 0
	if goal.Bytes != nil && (to.Bytes < 0 || *goal.Bytes < to.Bytes) {
		to.Bytes, budgeted = *goal.Bytes, false
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
	plan := &Collection{Plan: *s.Plan(to), urgent: goal.Urgent}
	plan.forBudget = budgeted && plan.Goal == to.Bytes // else the floor requires more
	for _, step := range plan.Steps[:min(len(plan.Steps), maxRecords)] {
		b, _ := c.st.index.Get(step.ID) // zero if it has just been removed
		plan.Records = append(plan.Records, &b)
	}
	plan.Took = time.Since(began)
	return plan, nil
}

// snapshot is the input of plans. waits: builds that the daemon is reading may go when it is done.
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
	var own views.OwnFiles // as of this plan
	none := c.whyNoEviction()
	s.WhySpared = func(b *index.Brief) string {
		why := cmp.Or(none, c.pinnedOrInUse(b.ID))
		// else no file is looked at: most builds of a large store have no view
		if why == "" && (b.Viewed || c.st.views.CurrentView(b.ID) != nil) {
			if why = c.WhyProtected(b.ID, &own); why == KeptReading && waits {
				return ""
			}
		}
		return why
	}
	return s
}

// clock is what a store has seen of the clock. The index remembers it.
type clock struct {
	Seen     time.Time // at the latest plan
	AgesFrom time.Time // it was believable since then
}

var clockKey = []byte("clock")

// agesFrom returns the time since which the clock has been believable: it did not go on by more
// than half of max_unused between two plans, so that a clock that jumps makes no build too old. A
// machine that was off for longer has all ages begin again, because the two look the same.
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
		c.st.log.Warn("cannot record the time of this plan", "error", err) // ages begin again later
	}
	return was.AgesFrom
}

// SlackPart is the part of each bound that a collection leaves free beyond what it has to.
const SlackPart = 20

// AllowedBytes returns how many bytes blobs may take within the budget, below 0 for any number, and
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
