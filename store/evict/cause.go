package evict

import (
	"fmt"
	"time"
)

// cause is why a step is in a plan. It is put into words when somebody is told: of hundreds of thousands of steps few are.
type cause struct {
	kind   int8
	class  int8      // of the build
	limit  string    // what was exceeded, in words; "": nothing was
	state  string    // of classNotServed
	since  time.Time // of classSuperseded: when the build was made that has taken its place
	action Action    // of becauseSmaller

	compileSeconds float64 // of classServed
	hits           uint64  // likewise
}

// The kinds of causes.
const (
	becausePoorest int8 = iota // there has to be room, or less of something, and it is the build's turn
	becauseOld
	becauseSmaller // what it frees costs no compile
)

// causeOf says why it is this build's turn.
func (pl *planner) causeOf(one *candidate, kind int8, limit string) cause {
	w := cause{kind: kind, class: one.class, limit: limit, compileSeconds: one.CompileSeconds, hits: one.Use.Hits}
	switch one.class {
	case classNotServed:
		w.state = pl.NotServed[one.ID]
	case classSuperseded:
		w.since = one.first.Created
	}
	return w
}

// said puts it into words, for a build that was used last at that time.
func (w *cause) said(last time.Time) string {
	used := last.Format(time.RFC3339)
	switch w.kind {
	case becauseOld:
		return fmt.Sprintf("not used since %s, which is longer than max_unused, %s", used, w.limit)
	case becauseSmaller:
		if w.action == DropCopy {
			return "a copy of a packed build, which the next request makes again; last used " + used
		}
		return "other builds have most of what this frees; last used " + used
	}
	hits := fmt.Sprintf("%d hits, last used %s", w.hits, used)
	switch w.hits {
	case 0: // last is then when it was made
		hits = "no hits since " + used
	case 1:
		hits = "1 hit, last used " + used
	}
	text := fmt.Sprintf("pays least for its bytes: %.1f s of compiling, %s", w.compileSeconds, hits)
	switch w.class {
	case classNotServed:
		text = "not served: it is " + w.state
	case classSuperseded:
		text = "superseded by the build of " + w.since.Format(time.RFC3339)
	}
	if w.limit != "" {
		return w.limit + ": " + text
	}
	return text
}
