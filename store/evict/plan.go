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

// Plan is the steps to free space, and afterwards their outcome: printing and execution share it.
type Plan struct {
	// bytes on disk, of the builds that may be collected: before, and wished for; a goal below 0:
	// there is none
	Used, Goal int64
	Freed      int64 // that the steps free
	Short      int64 // bytes by which the goal is missed
	Steps      []Step
	Kept       []Kept
	Considered uint64
}

// Action is what a step does.
type Action int

// The actions, the milder ones first: what a copy costs, what packing and unpacking costs, a
// compile.
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

// Step is what is done with one build; a weight-sharing group is one. A plan may have hundreds of
// thousands.
type Step struct {
	Action  Action
	ID      index.BuildID
	Frees   int64  // bytes on disk, after those before it
	Outcome string // "planned", "dropped", "packed", "removed", "kept: <why>"
	Last    time.Time
	Must    bool // also if there is space: it is too old, or its user is above a limit

	why   cause
	of    *candidate // while it is planned
	blobs []uint32   // to change the form of, by place in the inventory; while it is planned
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

// GoalReached reports whether the goal is reached once so much more is freed, or there is no goal.
func (p *Plan) GoalReached(besides int64) bool {
	return p.Goal < 0 || p.Used-p.Freed-besides <= p.Goal
}

// Count counts the steps of one kind that were carried out, or are planned.
func (p *Plan) Count(a Action) (n uint64) {
	for i := range p.Steps {
		if s := &p.Steps[i]; s.Action == a && (s.Outcome == planned || s.Outcome == a.done()) {
			n++
		}
	}
	return n
}

// Kept counts the builds that stay, by reason. Of those that are planned for, their bytes and what
// the steps free add up to what is used.
type Kept struct {
	Reason string
	Builds uint64 // 0: bytes that builds need which are not planned for
	// on disk, with what recipes take from: what several reasons hold counts for the first of them
	Bytes int64
	First []index.BuildID // of the builds; maxNamed in a whole plan
}

// maxNamed bounds the builds that a plan names as staying.
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

// cause is why a step is in a plan. Only printed steps get words, few of hundreds of thousands.
type cause struct {
	kind   int8
	class  int8      // of the build
	limit  string    // what was exceeded, in words; "": nothing was
	state  string    // of classNotServed
	since  time.Time // of classSuperseded: when the build was made that has taken its place
	action Action    // of causeSmaller

	compileSeconds float64 // of classServed
	hits           uint64  // likewise
}

// The kinds of causes.
const (
	// space or a limit requires it, and the build is next
	causeLeastValuable int8 = iota
	causeUnused
	causeSmaller // what it frees costs no compile
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

// text puts it into words, for a build that was used last at that time.
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
	case 0: // last is then when it was made
		hits = "no hits since " + used
	case 1:
		hits = "1 hit, last used " + used
	}
	text := fmt.Sprintf("least valuable for its size: %.1f s of compiling, "+
		"%s", w.compileSeconds, hits)
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
