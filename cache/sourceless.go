package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/index"
)

// Sourceless counts the builds that the daemon cannot compile again without a request, because it
// does not have their source models.
type Sourceless struct {
	Builds int            // that are without
	Looked int            // builds that were looked at
	Why    map[string]int // how many are without, by the reason
}

// Bounds of the look at the builds. Of a store with more of them the count is of a part, in order
// of ids, which are random. The time is looked at once for so many builds, so that the count of a
// small store is always of all.
const (
	sourcelessTime  = 25 * time.Millisecond
	sourcelessBatch = 256
)

// sourceless looks at the builds of the store.
func (c *Cache) sourceless(ctx context.Context) (Sourceless, error) {
	out := Sourceless{Why: make(map[string]int)}
	missing := make(map[index.BuildID]bool)
	for _, r := range c.rebuilds.list() {
		if r.State == rebuildWaiting {
			missing[r.Build] = true
		}
	}
	enough := errors.New("enough")
	until := time.Now().Add(sourcelessTime)
	err := c.index.Each(ctx, func(b index.Build) error {
		out.Looked++
		if why := whySourceless(&b, missing[b.ID]); why != "" {
			out.Builds++
			out.Why[why]++
		}
		if out.Looked%sourcelessBatch == 0 && time.Now().After(until) {
			return enough
		}
		return nil
	})
	if errors.Is(err, enough) {
		err = nil
	}
	return out, err
}

// Reasons lists why builds are without their sources: the most frequent first.
func (s Sourceless) Reasons() []string {
	reasons := slices.Collect(maps.Keys(s.Why))
	slices.SortFunc(reasons, func(a, b string) int {
		return cmp.Or(s.Why[b]-s.Why[a], strings.Compare(a, b))
	})
	return reasons
}

// adviseSources says which builds are not compiled again in the background after an update.
func (c *Cache) adviseSources(ctx context.Context) []Advice {
	s, err := c.sourceless(ctx)
	if err != nil {
		return []Advice{warning("rebuilds", "the builds cannot be looked at: %v", err)}
	}
	if s.Builds == 0 {
		return nil
	}
	var why []string
	for _, reason := range s.Reasons() {
		why = append(why, fmt.Sprintf("%d: %s", s.Why[reason], reason))
	}
	a := fine("rebuilds",
		"%d of %d builds cannot be compiled again in the background, only by their next request: %s",
		s.Builds, s.Looked, strings.Join(why, "; "))
	if s.Why[whyPrivate]+s.Why[whyClosed]+s.Why[whySwitchedOff] > 0 {
		a.Severity = SeverityWarning
		a = a.hint("let the daemon's user read the models and pass the directories above them, " +
			"or set keep_source = \"copy\"; a build has it from its next compile on")
	}
	return []Advice{a}
}

// whySourceless says why a build cannot be compiled again without a request; "" if it can, as far
// as is known.
func whySourceless(b *index.Build, missing bool) string {
	sources := []index.Source{b.Source}
	for i := 1; i < len(b.Members); i++ {
		sources = append(sources, b.Members[i].Source)
	}
	for _, s := range sources {
		switch {
		case s.Kind != "":
		case b.Put:
			return whyPut
		case s.Why == "":
			return whyUnknown
		default:
			return s.Why
		}
	}
	if missing {
		return whyMissing
	}
	return ""
}
