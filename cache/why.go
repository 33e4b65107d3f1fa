package cache

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// Why explains what an entry's state is, and how it came to be so. The entry is named as in Show; one that is gone by
// its request key, its build key, or its model's name, as long as its history is kept.
func (c *Cache) Why(ctx context.Context, p Peer, entry string) (*wire.Explanation, error) {
	leave, err := c.explaining.enter(ctx, c.owners.Of(p.UID), entry)
	if err != nil {
		return nil, err
	}
	defer leave()
	builds, err := c.query.Find(ctx, p, []string{entry})
	if apierr.ClassOf(err) == apierr.NotFound {
		for _, f := range c.failures.List(c.hears(p), nil) {
			if f.Means(entry) { // it has no builds, because its compile failed
				out := &wire.Explanation{Decision: decidedFailed, RequestKey: f.RequestKey.String(),
					Reason: f.Said()}
				return out, c.query.AddHistory(p, f.RequestKey, out)
			}
		}
		return c.whyGone(p, entry, err)
	}
	if err != nil {
		return nil, err
	}
	if err := oneEntry(entry, builds); err != nil {
		return nil, err
	}
	if builds, err = c.wholeEntry(p, builds); err != nil {
		return nil, err
	}
	first := &builds[0]
	out := &wire.Explanation{Decision: decidedMiss, RequestKey: first.RequestKey.String(),
		Record: first.RecordJSON}
	at, err := c.planAgain(ctx, first)
	if err != nil {
		out.Decision, out.Reason = decidedStale, "nothing can be compiled for this entry here: "+err.Error()
		for i := range builds[:min(len(builds), maxCandidates)] {
			one, failed := c.candidate(p, &builds[i], err.Error())
			if failed != nil {
				return nil, failed
			}
			out.Candidates = append(out.Candidates, one)
		}
	} else {
		r := *at.Request
		r.Peer = p
		at, out.Runtime = at.withRequest(&r), at.runtime
		order, err := c.arrange(ctx, at, func(yield func(*index.Build, error) bool) {
			for i := range builds {
				if !yield(&builds[i], nil) {
					return
				}
			}
		})
		if err != nil {
			return nil, err
		}
		if err := c.consider(ctx, out, at, order); err != nil {
			return nil, err
		}
		out.Decision = stateOf(out)
	}
	record, err := identity.ParseFields(first.RecordJSON)
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "entry %s", first.RequestKey)
	}
	out.Neighbours, err = c.neighbours(ctx, p, wanted{key: first.RequestKey, model: first.ModelDigest, name: first.ModelName, record: record})
	if err != nil {
		return nil, query.Error(ctx, err)
	}
	return out, c.query.AddHistory(p, first.RequestKey, out)
}

// wholeEntry gives all builds of the entry that the peer may see, for the name may have been that of one of them, in
// the order of a look-up: what all share, then the peer's own, then others', the newest first.
func (c *Cache) wholeEntry(p Peer, found []index.Build) ([]index.Build, error) {
	scopes := []string{"shared", rights.OwnScope(p)}
	for i := range found {
		if !slices.Contains(scopes, found[i].Scope) {
			scopes = append(scopes, found[i].Scope)
		}
	}
	var out []index.Build
	for _, scope := range scopes {
		builds, err := c.index.Lookup(found[0].RequestKey, scope)
		if err != nil {
			return nil, apierr.New(apierr.Internal, err, "look-up of %s", found[0].RequestKey)
		}
		for i := range builds {
			if c.rights.MaySee(p, builds[i].ID, builds[i].Scope) {
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
	if e.Decision == decidedHit {
		return index.Current
	}
	if state := e.Candidates[0].Build.State; state != index.Current {
		return state
	}
	return decidedStale
}

// oneEntry refuses a name that means several.
func oneEntry(name string, builds []index.Build) error {
	keys := make(map[string]bool)
	for i := range builds {
		keys[builds[i].RequestKey.String()] = true
	}
	if len(keys) == 1 {
		return nil
	}
	list := sortedKeys(keys)
	for i := range list {
		list[i] = list[i][:16]
	}
	more := ""
	if len(list) > 8 {
		list, more = list[:8], ", ..."
	}
	return apierr.New(apierr.BadRequest, nil, "%q names %d entries", name, len(keys)).WithHint("one of %s%s; epcachectl show %s tells them apart", strings.Join(list, ", "), more, name)
}

// whyGone explains an entry of which only the history is left.
func (c *Cache) whyGone(p Peer, name string, notFound error) (*wire.Explanation, error) {
	// A crash may have come between a ghost and the event that tells of the removal, and events are fewer.
	ghost := c.ghostOf(p, name)
	events := c.index.Journal.Events(time.Time{})
	for i := len(events) - 1; i >= 0; i-- {
		e := &events[i]
		if e.RequestKey == (index.RequestKey{}) || !meansEvent(name, e) || !c.rights.MayHear(p, e) {
			continue
		}
		if ghost != nil && e.At.Before(ghost.At) {
			break
		}
		out := &wire.Explanation{Decision: decidedGone, RequestKey: e.RequestKey.String(),
			Reason: fmt.Sprintf("no build is left; the last that happened: %s: %s", e.Kind, e.Text)}
		if e.Kind == event.Unkept {
			out.Reason = "there is no build; " + unkept(e)
		}
		return out, c.query.AddHistory(p, e.RequestKey, out)
	}
	if ghost == nil {
		return nil, notFound
	}
	out := &wire.Explanation{Decision: decidedGone, RequestKey: ghost.RequestKey.String(),
		Reason: "no build is left; the last that happened: " + ghost.Reason}
	return out, c.query.AddHistory(p, ghost.RequestKey, out)
}

// whyNone says why there is no build for a request: what became of the last one, as far as the peer may hear it. "": nobody knows of one.
func (c *Cache) whyNone(p Peer, key index.RequestKey) string {
	all, err := c.index.Journal.History(key)
	if err != nil {
		return "" // no answer depends on it
	}
	var last *Event
	told := make(map[index.BuildID]bool)
	for i := range all {
		if e := &all[i]; (e.Kind == event.Retracted || e.Kind == event.Unkept) && c.rights.MayHear(p, e) {
			last, told[e.BuildID] = e, true
		}
	}
	// A crash may have come between a ghost and the event that tells of the removal, and events are fewer.
	ghosts := c.index.Journal.Tombstones(func(g *index.Tombstone) bool {
		return g.RequestKey == key && !told[g.BuildID] && c.rights.MayHear(p, &Event{RequestKey: key,
			BuildKey: g.BuildKey, BuildID: g.BuildID, Scope: g.Scope})
	})
	if n := len(ghosts); n > 0 && (last == nil || last.At.Before(ghosts[n-1].At)) {
		return ghosts[n-1].Reason
	}
	switch {
	case last == nil:
		return ""
	case last.Kind == event.Unkept:
		return unkept(last)
	case strings.HasPrefix(last.Text, store.EvictedOn):
		return last.Text // it says when
	}
	return fmt.Sprintf("no build is left; the last went on %s: %s", last.At.Format(time.RFC3339), last.Text)
}

// unkept says of an event of a result that was not kept when that was, and why.
func unkept(e *Event) string {
	return fmt.Sprintf("compiled on %s, and not kept: %s", e.At.Format(time.RFC3339), e.Text)
}

// ghostOf gives the latest ghost of what is meant, nil if there is none.
func (c *Cache) ghostOf(p Peer, name string) *index.Tombstone {
	found := c.index.Journal.Tombstones(func(g *index.Tombstone) bool {
		e := &Event{At: g.At, RequestKey: g.RequestKey, BuildID: g.BuildID, BuildKey: g.BuildKey,
			ModelName: g.ModelName, Scope: g.Scope}
		return meansEvent(name, e) && c.rights.MayHear(p, e)
	})
	if len(found) == 0 {
		return nil
	}
	return &found[len(found)-1]
}

func meansEvent(name string, e *Event) bool {
	if name == e.ModelName {
		return true
	}
	return len(name) >= index.MinPrefix && (strings.HasPrefix(e.RequestKey.String(),
		name) || strings.HasPrefix(e.BuildKey.String(),
		name) || strings.HasPrefix(e.BuildID.String(), name))
}

// planAgain thinks a build's request through again, for the first runtime that has its execution providers.
func (c *Cache) planAgain(ctx context.Context, b *index.Build) (*attempt, error) {
	at, err := c.attemptOf(b)
	if err != nil {
		return nil, err
	}
	last := runtimes.None(at.EPs, nil)
	for _, rt := range c.runtimes.All() {
		rc, err := c.runtimes.Content(ctx, rt, func(string) {})
		if err != nil || !rc.HasAll(at.EPs) {
			continue // another one may do
		}
		var planned *attempt
		if planned, last = c.planned(ctx, at.withRuntime(rt.Name, rc)); last == nil {
			return planned, nil
		}
	}
	return nil, last
}
