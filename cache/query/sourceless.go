package query

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

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
func (q *Queries) sourceless(ctx context.Context) (*wire.Sourceless, error) {
	out, reasons := &wire.Sourceless{}, make(map[string]uint64)
	missing := q.options.Rebuilds()
	enough := errors.New("enough")
	until := time.Now().Add(sourcelessTime)
	err := q.index.Each(ctx, func(b index.Build) error {
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
	for _, why := range slices.Sorted(maps.Keys(reasons)) {
		out.Why = append(out.Why, &wire.Sourceless_Why{Text: why, Builds: reasons[why]})
	}
	slices.SortStableFunc(out.Why, func(a,
		b *wire.Sourceless_Why) int {
		return cmp.Compare(b.Builds, a.Builds)
	})
	return out, err
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
			return WhyPut
		case s.Why == "":
			return WhyUnknown
		default:
			return s.Why
		}
	}
	if missing {
		return WhyMissing
	}
	return ""
}

// Further reasons, which are not recorded in the build.
const (
	WhyPut     = "an application gave the compiled model, and not its source"
	WhyMissing = "the model was gone, or had changed, when it was to be compiled again"
	WhyUnknown = "the model was not kept, by an earlier version"
)
