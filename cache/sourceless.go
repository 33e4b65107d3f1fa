package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// Bounds of the look at the builds. Of a store with more of them the count is of a part, in order
// of ids, which are random. The time is looked at once for so many builds, so that the count of a
// small store is always of all.
const (
	sourcelessTime  = 25 * time.Millisecond
	sourcelessBatch = 256
)

// sourceless counts the builds that the daemon cannot compile again without a request, because it does
// not have their source models.
func (c *Cache) sourceless(ctx context.Context) (*wire.Sourceless, error) {
	out, reasons := &wire.Sourceless{}, make(map[string]uint64)
	missing := make(map[index.BuildID]bool)
	for _, r := range c.rebuilds.List() {
		if r.State == upkeep.Waiting {
			missing[r.Build] = true
		}
	}
	enough := errors.New("enough")
	until := time.Now().Add(sourcelessTime)
	err := c.index.Each(ctx, func(b index.Build) error {
		out.Looked++
		if why := whySourceless(&b, missing[b.ID]); why != "" {
			out.Builds++
			reasons[why]++
		}
		if out.Looked%sourcelessBatch == 0 && time.Now().After(until) {
			return enough
		}
		return nil
	})
	if errors.Is(err, enough) {
		err = nil
	}
	for _, why := range sortedKeys(reasons) {
		out.Why = append(out.Why, &wire.Sourceless_Why{Text: why, Builds: reasons[why]})
	}
	slices.SortStableFunc(out.Why, func(a,
		b *wire.Sourceless_Why) int {
		return cmp.Compare(b.Builds, a.Builds)
	})
	return out, err
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
	changeable := false
	for _, one := range s.Why {
		why = append(why, fmt.Sprintf("%d: %s", one.Builds, one.Text))
		changeable = changeable || slices.Contains([]string{whyPrivate, whyClosed, whySwitchedOff},
			one.Text)
	}
	a := fine("rebuilds",
		"%d of %d builds cannot be compiled again in the background, only by their next request: %s",
		s.Builds, s.Looked, strings.Join(why, "; "))
	if changeable {
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
