package query

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// Why explains the state of an entry, and how it came to be so. The entry is named as in Show; one
// without builds is named by its request key, a build key, or its model's name, as long as its
// history is kept.
func (q *Queries) Why(ctx context.Context, p rights.Peer, entry string) (*wire.Explanation, error) {
	leave, err := q.explaining.enter(ctx, q.options.Owner(p.UID), entry)
	if err != nil {
		return nil, err
	}
	defer leave()
	builds, err := q.Find(ctx, p, []string{entry})
	if apierr.ClassOf(err) == apierr.NotFound {
		for _, f := range q.options.Failures(p) {
			if f.Means(entry) { // it has no builds, because its compile failed
				out := &wire.Explanation{Decision: Failed, RequestKey: f.RequestKey.String(),
					Reason: f.Said()}
				return q.WithHistory(p, f.RequestKey, out), nil
			}
		}
		return q.whyGone(p, entry, err)
	}
	if err != nil {
		return nil, err
	}
	if err := oneEntry(entry, builds); err != nil {
		return nil, err
	}
	if builds, err = q.wholeEntry(p, builds); err != nil {
		return nil, err
	}
	first := &builds[0]
	out := &wire.Explanation{Decision: Miss, RequestKey: first.RequestKey.String(),
		Record: first.RecordJSON}
	of, err := q.options.PlanAgain(ctx, p, builds)
	if err != nil {
		out.Decision, out.Reason = Stale, "nothing can be compiled for this entry here: "+err.Error()
		for i := range builds[:min(len(builds), maxCandidates)] {
			one, failed := q.candidate(p, &builds[i], err.Error())
			if failed != nil {
				return nil, failed
			}
			out.Candidates = append(out.Candidates, one)
		}
		of = &Question{}
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
	return q.WithHistory(p, first.RequestKey, out), nil
}

// wholeEntry returns the entry's builds that the peer may see, in the order of a look-up.
func (q *Queries) wholeEntry(p rights.Peer, found []index.Build) ([]index.Build, error) {
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
		return nil, apierr.New(apierr.NotFound, nil, "entry %s has just gone", found[0].RequestKey)
	}
	return out, nil
}

// stateOf is what became of an entry that was asked for by name.
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
	keys := make(map[string]bool)
	for i := range builds {
		keys[builds[i].RequestKey.String()] = true
	}
	if len(keys) == 1 {
		return nil
	}
	list := slices.Sorted(maps.Keys(keys))
	for i := range list {
		list[i] = list[i][:16]
	}
	more := ""
	if len(list) > 8 {
		list, more = list[:8], ", ..."
	}
	return apierr.New(apierr.BadRequest, nil, "%q names %d entries", name, len(keys)).
		WithHint("one of %s%s; epcachectl show %s tells them apart", strings.Join(list, ", "), more, name)
}

func (q *Queries) whyGone(p rights.Peer, name string, notFound error) (*wire.Explanation, error) {
	// A crash may come between a tombstone and the event of the removal, and events are dropped earlier.
	stone := q.tombstoneOf(p, name)
	events := q.index.Journal.Events(time.Time{})
	for i := len(events) - 1; i >= 0; i-- {
		e := &events[i]
		if e.RequestKey == (index.RequestKey{}) || !meansEvent(name, e) || !q.rights.MayHear(p, e) {
			continue
		}
		if stone != nil && e.At.Before(stone.At) {
			break
		}
		out := &wire.Explanation{Decision: Gone, RequestKey: e.RequestKey.String(),
			Reason: fmt.Sprintf("no build is left; the last that happened: %s: %s", e.Kind, e.Text)}
		if e.Kind == event.Unkept {
			out.Reason = "there is no build; " + unkept(e)
		}
		return q.WithHistory(p, e.RequestKey, out), nil
	}
	if stone == nil {
		return nil, notFound
	}
	out := &wire.Explanation{Decision: Gone, RequestKey: stone.RequestKey.String(),
		Reason: "no build is left; the last that happened: " + stone.Reason}
	return q.WithHistory(p, stone.RequestKey, out), nil
}

// WhyNone returns what became of a request's last build, as the peer may know, or "".
func (q *Queries) WhyNone(p rights.Peer, key index.RequestKey) string {
	all := q.index.Journal.History(key)
	var last *index.Event
	told := make(map[index.BuildID]bool)
	for i := range all {
		if e := &all[i]; (e.Kind == event.Retracted || e.Kind == event.Unkept) && q.rights.MayHear(p, e) {
			last, told[e.BuildID] = e, true
		}
	}
	// A tombstone says when and why its build was evicted. A crash may come between the tombstone and
	// the event, and events are dropped earlier.
	stones := q.index.Journal.Tombstones(func(t *index.Tombstone) bool {
		return t.RequestKey == key && (!told[t.BuildID] || t.BuildID == last.BuildID) &&
			q.rights.MayHear(p, eventOf(t))
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
		return unkept(last)
	}
	return fmt.Sprintf("no build is left; the last went on %s: %s", last.At.Format(time.RFC3339), last.Text)
}

func unkept(e *index.Event) string {
	return fmt.Sprintf("compiled on %s, and not kept: %s", e.At.Format(time.RFC3339), e.Text)
}

func (q *Queries) tombstoneOf(p rights.Peer, name string) *index.Tombstone {
	found := q.index.Journal.Tombstones(func(g *index.Tombstone) bool {
		e := eventOf(g)
		return meansEvent(name, e) && q.rights.MayHear(p, e)
	})
	if len(found) == 0 {
		return nil
	}
	return &found[len(found)-1]
}

func eventOf(t *index.Tombstone) *index.Event {
	return &index.Event{At: t.At, RequestKey: t.RequestKey, BuildID: t.BuildID, BuildKey: t.BuildKey,
		ModelName: t.ModelName, Scope: t.Scope}
}

func meansEvent(name string, e *index.Event) bool {
	if name == e.ModelName {
		return true
	}
	return len(name) >= index.MinPrefix && (strings.HasPrefix(e.RequestKey.String(), name) ||
		strings.HasPrefix(e.BuildKey.String(), name) || strings.HasPrefix(e.BuildID.String(), name))
}
