package evict

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
)

// Plan has the steps to free space, and after their execution the outcomes, for printing both.
type Plan struct {
	// Used are the disk bytes of the builds that may be collected, and Goal those to reach;
	// negative: no goal.
	Used, Goal int64
	Freed      int64 // that the steps free
	Short      int64 // bytes by which the goal is missed
	Steps      []Step
	Kept       []Kept
	Considered uint64
}

// Action is what a step does.
type Action int

// The actions in order of their cost when the build is needed again: a copy, unpacking, a compile.
const (
	DropCopy Action = iota // removes the unpacked copy of a packed build
	PackBuild
	Evict
)

// String names it: "drop copy", "pack", "remove".
func (a Action) String() string { return [...]string{"drop copy", "pack", "remove"}[a] }

// done is the outcome of a step that was carried out.
func (a Action) done() string { return [...]string{"dropped", "packed", "removed"}[a] }

const (
	planned = "planned"
	kept    = "kept: "
)

// Step is the action on one build; a group is one build. Keep it small, because a plan may have
// hundreds of thousands.
type Step struct {
	Action  Action
	ID      index.BuildID
	Frees   int64  // bytes on disk, after the earlier steps
	Outcome string // "planned", "dropped", "packed", "removed", "kept: <why>"
	Last    time.Time
	Must    bool // even if there is space, because of age or a user's limit

	why   cause
	of    *candidate // only during planning
	blobs []uint32   // blobs to pack, or with copies to drop, by index; only during planning
}

// Reason returns why this build is evicted.
func (s *Step) Reason() string { return s.why.text(s.Last) }

// NoteKept records that a step was not carried out.
func (s *Step) NoteKept(why string) { s.Outcome = kept + why }

// KeptReason returns why a step was not carried out, "" if it was or is still planned.
func (s *Step) KeptReason() string {
	if why, found := strings.CutPrefix(s.Outcome, kept); found {
		return why
	}
	return ""
}

// NoteDone records that a step was carried out, and what that freed.
func (p *Plan) NoteDone(s *Step, freed int64) {
	s.Outcome, s.Frees = s.Action.done(), freed
	p.Freed += freed
}

// Finish records by how much the goal was missed.
func (p *Plan) Finish() {
	if p.Goal >= 0 {
		p.Short = max(p.Used-p.Freed-p.Goal, 0)
	}
}

// GoalReached reports whether the goal is reached if besides more bytes are freed, or there is no
// goal.
func (p *Plan) GoalReached(besides int64) bool {
	return p.Goal < 0 || p.Used-p.Freed-besides <= p.Goal
}

// Count counts the steps with an action that were carried out or are planned.
func (p *Plan) Count(a Action) (n uint64) {
	for i := range p.Steps {
		if s := &p.Steps[i]; s.Action == a && (s.Outcome == planned || s.Outcome == a.done()) {
			n++
		}
	}
	return n
}

// Kept counts the builds that are kept for one reason. For the collected builds, the bytes of all
// Kept and those that the steps free add up to Used.
type Kept struct {
	Reason string
	Builds uint64 // 0: the bytes are needed by builds that are not collected
	// Bytes on disk, with bases. Blobs that are kept for several reasons count for the first of
	// these.
	Bytes int64
	First []index.BuildID // some of the builds; maxNamed in a whole plan
}

// maxNamed bounds the kept builds that a plan lists.
const maxNamed = 1024

// KeptText lists, in words, which builds were kept and why; "" if none.
func (p *Plan) KeptText() string {
	stays := make(map[string]Kept)
	add := func(why string, builds uint64, bytes int64) {
		k := stays[why]
		k.Builds += builds
		k.Bytes += bytes
		stays[why] = k
	}
	for _, k := range p.Kept {
		if k.Builds > 0 {
			add(k.Reason, k.Builds, k.Bytes)
		}
	}
	for i := range p.Steps {
		if why := p.Steps[i].KeptReason(); why != "" {
			add(why, 1, p.Steps[i].Frees)
		}
	}
	var parts []string
	for _, why := range slices.Sorted(maps.Keys(stays)) {
		noun := "builds"
		if stays[why].Builds == 1 {
			noun = "build"
		}
		parts = append(parts, fmt.Sprintf("%d %s of %s: %s", stays[why].Builds, noun,
			bytesize.Text(stays[why].Bytes), why))
	}
	if len(parts) == 0 {
		return ""
	}
	return "remaining: " + strings.Join(parts, "; ")
}

// cause is why a step is in a plan. The text is made only for printed steps, because there may be
// hundreds of thousands.
type cause struct {
	kind   int8
	class  int8      // of the build
	limit  string    // what was exceeded, in words; "": nothing was
	state  string    // of classNotServed
	since  time.Time // of classSuperseded: creation time of the newer build
	action Action    // of causeSmaller

	compileSeconds float64 // of classServed
	hits           uint64  // of classServed
}

// The kinds of causes.
const (
	// space or a limit requires it, and the build is next
	causeLeastValuable int8 = iota
	causeUnused
	causeSmaller // freeing its bytes costs no compile
)

// causeOf returns why this build is evicted next.
func (pl *planner) causeOf(one *candidate, kind int8, limit string) cause {
	w := cause{kind: kind, class: one.class, limit: limit, compileSeconds: one.CompileSeconds,
		hits: one.Use.Hits}
	switch one.class {
	case classNotServed:
		w.state = pl.NotServed[one.ID]
	case classSuperseded:
		w.since = one.successor.Created
	}
	return w
}

// text returns the reason in words. last is when the build was last used.
func (w *cause) text(last time.Time) string {
	used := last.Format(time.RFC3339)
	switch w.kind {
	case causeUnused:
		return fmt.Sprintf("not used since %s, longer than max_unused (%s)", used, w.limit)
	case causeSmaller:
		if w.action == DropCopy {
			return "a copy of a packed build, which the next request makes again; last used " + used
		}
		return "other builds have most of its bytes; last used " + used
	}
	hits := fmt.Sprintf("%d hits, last used %s", w.hits, used)
	switch w.hits {
	case 0: // without hits, last is the creation time
		hits = "no hits since " + used
	case 1:
		hits = "1 hit, last used " + used
	}
	text := fmt.Sprintf("least valuable for its size: %s of compiling, %s",
		bytesize.Seconds(w.compileSeconds), hits)
	switch w.class {
	case classNotServed:
		text = "not served: it is " + w.state
	case classSuperseded:
		text = "replaced by the build of " + w.since.Format(time.RFC3339)
	}
	if w.limit != "" {
		return w.limit + ": " + text
	}
	return text
}
