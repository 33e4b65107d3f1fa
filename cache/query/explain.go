package query

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/modelname"
	"github.com/epcached/epcached/unixsock/wire"
)

// The decisions of explanations, besides the states of builds.
const (
	Hit     = "hit"
	Miss    = "miss"
	Stale   = "stale"  // there are builds, but none may be loaded
	Removed = "gone"   // all builds of the entry were removed
	Failed  = "failed" // its compile failed, and there is no build
)

const maxCandidates = 32

// explainSlots bounds the concurrent explanations, because each verifies its builds' files and may
// load them.
type explainSlots struct {
	users keyed.Locks[uint32] // one for each user
	slots keyed.Slots         // a fixed number in all
}

const maxExplaining = 4

// enter waits for a slot for an explanation of the owner. leave releases it.
func (e *explainSlots) enter(ctx context.Context, owner uint32, name string) (leave func(),
	err error) {
	unlock, err := e.users.Lock(ctx, owner)
	if err != nil {
		return nil, apierr.FromContext(ctx, "model %q", name)
	}
	done, err := e.slots.Take(ctx)
	if err != nil {
		unlock()
		return nil, apierr.FromContext(ctx, "model %q", name)
	}
	return func() { done(); unlock() }, nil
}

// ExplainRequest is a planned request to explain, with functions for the steps of its look-up.
type ExplainRequest struct {
	Peer    rights.Peer
	Name    string // the peer's name for the model
	Key     index.RequestKey
	Model   cas.Digest
	Record  string // the canonical record of the request
	Runtime string // its name
	Outside bool   // the daemon does not run the libraries, so it neither compiles nor converts

	// Order returns the builds that the look-up considers, in order.
	Order func(context.Context) ([]Candidate, error)
	// Failed returns the remembered failure of its compile, nil if none.
	Failed func() *failure.Failure
	// OtherForm says how a conversion would answer the request, "" if none would.
	OtherForm func(context.Context) (string, error)
}

// Candidate is a build that a look-up considers.
type Candidate struct {
	Build       *index.Build
	Refused     string // why it is not served; "": it may be
	Together    bool   // a group's build, refused only because the request is for one model
	Fits        string // text of how it suits the runtime
	Members     []index.Member
	Differences []identity.Difference
	Judge       func(*wire.Build) // sets the verdict for the runtime; nil: not judged
}

// Explain decides as Acquire would, but compiles, withholds, counts and leases nothing.
func (q *Queries) Explain(ctx context.Context, of *ExplainRequest) (*wire.Explanation, error) {
	leave, err := q.explaining.enter(ctx, q.options.Owner(of.Peer.UID), of.Name)
	if err != nil {
		return nil, err
	}
	defer leave()
	out := &wire.Explanation{Decision: Miss, Reason: "never compiled for this request",
		RequestKey: of.Key.String(), Record: of.Record, Runtime: of.Runtime}
	if err := q.consider(ctx, out, of); err != nil {
		return nil, err
	}
	if err := q.addNeighbours(ctx, out, of); err != nil {
		return nil, err
	}
	if len(out.Candidates) == 0 {
		if gone := q.WhyNone(of.Peer, of.Key); gone != "" {
			out.Reason = gone
		} else if len(out.Neighbours) > 0 {
			out.Reason = differenceText(out.Neighbours[0])
		}
	}
	if out.Decision != Hit && !of.Outside {
		if f := of.Failed(); f != nil {
			if out.Decision == Miss {
				out.Decision, out.Reason = Failed, f.Line()
			} else {
				out.Reason += "; " + f.Line()
			}
		}
		other, err := of.OtherForm(ctx)
		if err != nil {
			return nil, err
		}
		if other != "" {
			out.Reason = other
		}
	}
	return q.AddHistory(of.Peer, of.Key, out), nil
}

func (q *Queries) consider(ctx context.Context, out *wire.Explanation, of *ExplainRequest) error {
	order, err := of.Order(ctx)
	if err != nil {
		return err
	}
	for _, c := range order[:min(len(order), maxCandidates)] {
		one, err := q.candidate(of.Peer, c.Build, c.Refused)
		if err != nil {
			return err
		}
		one.Differences = differencesReply(c.Differences)
		if !q.rights.MaySee(of.Peer, c.Build.ID, c.Build.Scope) {
			// The peer has the model so it may see the build, but not other users' names for the
			// model.
			one.Build.ModelName, one.Build.Members = of.Name, MembersReply(c.Members)
		}
		if c.Judge != nil {
			c.Judge(one.Build)
		}
		if one.Reason == "" {
			one.Reason = wire.Valid(q.WhyDamaged(ctx, c.Build))
		}
		if ctx.Err() != nil {
			return apierr.FromContext(ctx, "model %q", of.Name)
		}
		switch {
		case one.Reason != "":
			if len(out.Candidates) == 0 && !c.Together {
				out.Decision, out.Reason = Stale, one.Reason
			}
		case out.Decision == Hit:
			one.Reason = "it fits too, but another build is preferred"
		default:
			one.Served, one.Reason = true, wire.Valid(c.Fits)
			out.Decision, out.Reason = Hit, one.Reason
		}
		out.Candidates = append(out.Candidates, one)
	}
	return nil
}

func (q *Queries) candidate(p rights.Peer, b *index.Build, reason string) (*wire.Candidate, error) {
	of, err := q.Listed(p, b)
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "build %s", b.BuildKey)
	}
	of.KeptText = wire.Valid(q.FormText(b))
	return &wire.Candidate{Build: of, Reason: wire.Valid(reason)}, nil
}

// WhyDamaged returns which of a build's files is damaged, and "" if none is.
func (q *Queries) WhyDamaged(ctx context.Context, b *index.Build) string {
	for _, f := range b.Files {
		if err := q.packing.Verify(ctx, f.Digest); err != nil {
			return fmt.Sprintf("the stored build is damaged: %s: %v", f.Name, err)
		}
	}
	return ""
}

func differencesReply(list []identity.Difference) []*wire.Difference {
	out := make([]*wire.Difference, 0, len(list))
	for _, d := range list {
		out = append(out, &wire.Difference{Field: d.Field, Asked: wire.Valid(d.Asked),
			Found: wire.Valid(d.Found)})
	}
	return out
}

func differenceText(n *wire.Neighbour) string {
	if len(n.Differences) > 0 && n.Differences[0].Field == "model" {
		return "never compiled for this request; a model of the same name with other content " +
			"was compiled: the file has changed, or it is another model"
	}
	var names []string
	for _, d := range n.Differences {
		names = append(names, d.Field)
	}
	if len(names) > 3 {
		names = append(names[:3], fmt.Sprintf("%d more", len(names)-3))
	}
	return "never compiled for this request; the closest build of this model differs in " +
		"" + strings.Join(names, ", ")
}

// MaxNeighbours is how many neighbours an explanation has at most.
const MaxNeighbours = 5

// Bounds of the search. A request waits for its slot within its searchTime.
const (
	searchTime  = 2 * time.Second
	maxSearches = 2 // at the same time
)

type neighbour struct {
	build    *index.Build
	distance int // number of different fields; entries of other models are always farther
}

func (n *neighbour) compare(other *neighbour) int {
	return cmp.Or(n.distance-other.distance,
		other.build.Created.Compare(n.build.Created),
		strings.Compare(n.build.ID.String(), other.build.ID.String()))
}

// addNeighbours adds the entries nearest to the request among those that the peer may see: first
// entries of the same model, with the fewest different fields first, then entries of other models
// with the same name, because the application's file may have changed.
func (q *Queries) addNeighbours(ctx context.Context, out *wire.Explanation,
	of *ExplainRequest) error {
	asked, err := identity.ParseFields(of.Record)
	if err != nil {
		return apierr.New(apierr.Internal, err, "model %q", of.Name)
	}
	limited, cancel := context.WithTimeout(ctx, searchTime)
	defer cancel()
	select {
	case q.searches <- struct{}{}:
		defer func() { <-q.searches }()
	case <-limited.Done():
		if ctx.Err() == nil {
			return nil // best effort: explain without neighbours
		}
		return Error(ctx, ctx.Err())
	}
	builds := make(map[index.RequestKey]uint32) // number of builds by entry
	var best []*neighbour                       // nearest first
	err = q.index.EachOfModel(limited, of.Model, of.Name, func(b index.Build) error {
		other := b.ModelDigest != of.Model
		if b.RequestKey == of.Key || other && (of.Name == "" || b.ModelName != of.Name) ||
			!q.rights.MaySee(of.Peer, b.ID, b.Scope) {
			return nil
		}
		builds[b.RequestKey]++
		if builds[b.RequestKey] > 1 {
			return nil // it has the same record as the first one
		}
		record, err := identity.ParseFields(b.RecordJSON)
		if err != nil {
			// perhaps a build of a later version of epcached with an unreadable record
			return nil
		}
		n := &neighbour{build: &b, distance: asked.CountDifferences(record)}
		if other {
			n.distance += 1 << 30
		}
		at, _ := slices.BinarySearchFunc(best, n, (*neighbour).compare)
		best = slices.Insert(best, at, n)
		best = best[:min(len(best), MaxNeighbours)]
		return nil
	})
	if err != nil && !(errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil) {
		return Error(ctx, err)
	}
	for _, n := range best {
		record, err := identity.ParseFields(n.build.RecordJSON)
		if err != nil {
			return Error(ctx, err)
		}
		out.Neighbours = append(out.Neighbours,
			&wire.Neighbour{RequestKey: n.build.RequestKey.String(),
				ModelName: n.build.ModelName, Builds: builds[n.build.RequestKey],
				Differences: differencesReply(asked.Differences(record))})
	}
	return nil
}

// Why explains the state and the history of an entry. The entry is named as for Show. While its
// history is kept, an entry without builds is named by its request key, a build key, or its model's
// name.
func (q *Queries) Why(ctx context.Context, p rights.Peer, entry string) (*wire.Explanation, error) {
	leave, err := q.explaining.enter(ctx, q.options.Owner(p.UID), entry)
	if err != nil {
		return nil, err
	}
	defer leave()
	builds, err := q.Find(ctx, p, []string{entry})
	if apierr.ClassOf(err) == apierr.NotFound {
		for _, f := range q.options.Failures(p) {
			if f.Means(entry) { // the entry has no builds because its compile failed
				out := &wire.Explanation{Decision: Failed, RequestKey: f.RequestKey.String(),
					Reason: f.Line()}
				return q.AddHistory(p, f.RequestKey, out), nil
			}
		}
		return q.whyRemoved(p, entry, err)
	}
	if err != nil {
		return nil, err
	}
	if err := oneEntry(entry, builds); err != nil {
		return nil, err
	}
	if builds, err = q.entryBuilds(p, builds); err != nil {
		return nil, err
	}
	first := &builds[0]
	out := &wire.Explanation{Decision: Miss, RequestKey: first.RequestKey.String(),
		Record: first.RecordJSON}
	of, err := q.options.ExplainEntry(ctx, p, builds)
	if err != nil {
		out.Decision, out.Reason = Stale, "this entry cannot be compiled here: "+err.Error()
		for i := range builds[:min(len(builds), maxCandidates)] {
			one, failed := q.candidate(p, &builds[i], err.Error())
			if failed != nil {
				return nil, failed
			}
			out.Candidates = append(out.Candidates, one)
		}
		of = &ExplainRequest{}
	}
	of.Peer, of.Name, of.Key = p, first.ModelName, first.RequestKey
	of.Model, of.Record, out.Runtime = first.ModelDigest, first.RecordJSON, of.Runtime
	if err == nil {
		if err := q.consider(ctx, out, of); err != nil {
			return nil, err
		}
		out.Decision = stateOf(out)
	}
	if err := q.addNeighbours(ctx, out, of); err != nil {
		return nil, err
	}
	return q.AddHistory(p, first.RequestKey, out), nil
}

// entryBuilds returns the entry's builds that the peer may see, in the order of a look-up.
func (q *Queries) entryBuilds(p rights.Peer, found []index.Build) ([]index.Build, error) {
	scopes := []string{"shared", rights.OwnScope(p)}
	for i := range found {
		if !slices.Contains(scopes, found[i].Scope) {
			scopes = append(scopes, found[i].Scope)
		}
	}
	var out []index.Build
	for _, scope := range scopes {
		builds, err := q.index.Lookup(found[0].RequestKey, scope)
		if err != nil {
			return nil, apierr.New(apierr.Internal, err, "look-up of %s", found[0].RequestKey)
		}
		for i := range builds {
			if q.rights.MaySee(p, builds[i].ID, builds[i].Scope) {
				out = append(out, builds[i])
			}
		}
	}
	if len(out) == 0 {
		return nil, apierr.New(apierr.NotFound, nil, "entry %s was removed during the "+
			"request", found[0].RequestKey)
	}
	return out, nil
}

// stateOf returns the state of a named entry.
func stateOf(e *wire.Explanation) string {
	if e.Decision == Hit {
		return index.Current
	}
	if state := e.Candidates[0].Build.State; state != index.Current {
		return state
	}
	return Stale
}

func oneEntry(name string, builds []index.Build) error {
	keys := make(map[index.RequestKey]string)
	for i := range builds {
		b := &builds[i]
		keys[b.RequestKey] = b.BuildKey.String()[:12]
		if len(b.EPs) > 0 {
			keys[b.RequestKey] += " of " + b.EPs[0].Name
		}
	}
	if len(keys) == 1 {
		return nil
	}
	list := slices.Sorted(maps.Values(keys))
	more := ""
	if len(list) > 8 {
		list, more = list[:8], ", ..."
	}
	return apierr.New(apierr.BadRequest, nil, "%q matches %d entries", name, len(keys)).
		WithHint("name a build: %s%s; to distinguish them: epcachectl show %s",
			strings.Join(list, ", "), more, name)
}

func (q *Queries) whyRemoved(p rights.Peer, name string,
	notFound error) (*wire.Explanation, error) {
	// Use the tombstone too, because after a crash the event of the removal may be missing, and
	// events are dropped earlier.
	stone := q.tombstoneOf(p, name)
	// name may be a model's digest, which events do not have
	if stone != nil && !meansEvent(name, eventOf(stone)) {
		name = stone.RequestKey.String()
	}
	events := q.index.Journal.Events(time.Time{})
	for i := len(events) - 1; i >= 0; i-- {
		e := &events[i]
		if e.RequestKey == (index.RequestKey{}) || !meansEvent(name, e) ||
			!q.rights.MaySeeEvent(p, e) {
			continue
		}
		if stone != nil && e.At.Before(stone.At) {
			break
		}
		out := &wire.Explanation{Decision: Removed, RequestKey: e.RequestKey.String(),
			Reason: fmt.Sprintf("no build is left; the last event: %s: %s", e.Kind, e.Text)}
		if e.Kind == event.Unkept {
			out.Reason = "no build exists; " + unkeptText(e)
		}
		return q.AddHistory(p, e.RequestKey, out), nil
	}
	if stone == nil {
		return nil, notFound
	}
	out := &wire.Explanation{Decision: Removed, RequestKey: stone.RequestKey.String(),
		Reason: "no build is left; the last event: " + stone.Reason}
	return q.AddHistory(p, stone.RequestKey, out), nil
}

// WhyNone returns why a request's last build does not exist any more, as far as the peer may know,
// or "".
func (q *Queries) WhyNone(p rights.Peer, key index.RequestKey) string {
	all := q.index.Journal.History(key)
	var last *index.Event
	seen := make(map[index.BuildID]bool)
	for i := range all {
		if e := &all[i]; (e.Kind == event.Retracted || e.Kind == event.Unkept) &&
			q.rights.MaySeeEvent(p, e) {
			last, seen[e.BuildID] = e, true
		}
	}
	// A tombstone says when and why its build was evicted. After a crash the event may be missing,
	// and events are dropped earlier.
	stones := q.index.Journal.Tombstones(func(t *index.Tombstone) bool {
		return t.RequestKey == key && (!seen[t.BuildID] || t.BuildID == last.BuildID) &&
			q.rights.MaySeeEvent(p, eventOf(t))
	})
	if n := len(stones); n > 0 {
		stone := &stones[n-1]
		if last == nil || last.BuildID == stone.BuildID || last.At.Before(stone.At) {
			return stone.Reason
		}
	}
	switch {
	case last == nil:
		return ""
	case last.Kind == event.Unkept:
		return unkeptText(last)
	}
	return fmt.Sprintf("no build is left; the last one was removed on %s: "+
		"%s", last.At.Format(time.RFC3339), last.Text)
}

func unkeptText(e *index.Event) string {
	return fmt.Sprintf("compiled on %s, and not stored: %s", e.At.Format(time.RFC3339), e.Text)
}

func (q *Queries) tombstoneOf(p rights.Peer, name string) *index.Tombstone {
	found := q.index.Journal.Tombstones(func(g *index.Tombstone) bool {
		e := eventOf(g)
		ofModel := len(name) >= index.MinPrefix && strings.HasPrefix(g.ModelDigest.String(), name)
		return (ofModel || meansEvent(name, e)) && q.rights.MaySeeEvent(p, e)
	})
	if len(found) == 0 {
		return nil
	}
	return &found[len(found)-1]
}

func eventOf(t *index.Tombstone) *index.Event {
	return &index.Event{At: t.At, RequestKey: t.RequestKey, BuildID: t.BuildID,
		BuildKey: t.BuildKey, ModelName: t.ModelName, Scope: t.Scope}
}

func meansEvent(name string, e *index.Event) bool {
	if modelname.Matches(e.ModelName, name) {
		return true
	}
	return len(name) >= index.MinPrefix && (strings.HasPrefix(e.RequestKey.String(), name) ||
		strings.HasPrefix(e.BuildKey.String(), name) || strings.HasPrefix(e.BuildID.String(), name))
}
