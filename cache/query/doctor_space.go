package query

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/store/evict"
)

const thrashSpan = 7 * 24 * time.Hour

// Thrashing counts the builds that were evicted for the budget lately and compiled again. Builds that
// were removed by request, or for another bound, would not be kept by a larger budget.
func (d *Doctor) Thrashing() evict.Thrashing {
	since := d.q.options.Now().Add(-thrashSpan)
	return evict.Thrashes(d.q.index.Journal.Tombstones(func(g *index.Tombstone) bool { return g.ForBudget && g.At.After(since) }), d.madeSince)
}

func (d *Doctor) madeSince(g *index.Tombstone) bool {
	builds, err := d.q.index.Lookup(g.RequestKey, g.Scope)
	return err == nil && slices.ContainsFunc(builds, func(b index.Build) bool { return b.Created.After(g.At) })
}

// SpaceAdvice warns of too small a budget, and of results not kept whose models the peer may see.
func (d *Doctor) SpaceAdvice(p rights.Peer) []Advice {
	const subject = "space"
	r, err := d.q.Space()
	if err != nil {
		return []Advice{warning(subject, "%v", err)}
	}
	var out []Advice
	if t := d.Thrashing(); t.Counts() {
		out = append(out, warning(subject, "of %d entries that were evicted in the last 7 days %d were compiled again, for %.1f s", t.Evicted, t.Back, t.Seconds).
			hint("the budget is too small: with %s it would have kept them; see budget in [space]",
				bytesize.Text(r.BudgetBytes+t.Bytes)))
	}
	used := r.DiskBytes + r.UnpackedBytes + r.ManifestBytes + r.HeldBytes + r.ReservedBytes
	switch {
	case r.BudgetBytes > 0 && used > r.BudgetBytes:
		out = append(out, warning(subject, "%s are used of a budget of %s, and nothing more may go",
			bytesize.Text(used), bytesize.Text(r.BudgetBytes)).
			hint("epcachectl gc -n says what may not go, and why"))
	case r.FloorBytes > 0 && r.FreeBytes < r.FloorBytes:
		out = append(out, warning(subject,
			"%s are free, and %s are to stay free: nothing more is kept", bytesize.Text(r.FreeBytes),
			bytesize.Text(r.FloorBytes)).
			hint("make room on the disk, or lower free_floor in [space]"))
	}
	out = append(out, d.adviseUnkept(p)...)
	if len(out) == 0 && r.BudgetBytes > 0 {
		out = append(out, fine(subject, "%s are used of a budget of %s", bytesize.Text(used),
			bytesize.Text(r.BudgetBytes)))
	}
	return out
}

// adviseUnkept names models whose builds were not stored, those compiled most often first.
func (d *Doctor) adviseUnkept(p rights.Peer) []Advice {
	type lost struct {
		last  *index.Event
		times int
	}
	const subject = "space"
	byKey := make(map[index.RequestKey]*lost)
	all := d.q.index.Journal.Events(d.q.options.Now().Add(-thrashSpan))
	for i := range all {
		if e := &all[i]; e.Kind == event.Unkept && d.q.rights.MayHear(p, e) {
			if byKey[e.RequestKey] == nil {
				byKey[e.RequestKey] = &lost{}
			}
			byKey[e.RequestKey].last = e
			byKey[e.RequestKey].times++
		}
	}
	var worst []*lost
	for key, l := range byKey {
		if !d.hasBuild(key, l.last.Scope) {
			worst = append(worst, l)
		}
	}
	slices.SortFunc(worst, func(a, b *lost) int {
		return cmp.Or(cmp.Compare(b.times, a.times), b.last.At.Compare(a.last.At), strings.Compare(a.last.RequestKey.String(), b.last.RequestKey.String()))
	})
	var out []Advice
	for i, l := range worst {
		if i == maxFindings {
			out = append(out, warning(subject, "and %d more", len(worst)-i).hint("epcachectl events shows them: %q", event.Unkept))
			break
		}
		often := "once"
		if l.times > 1 {
			often = fmt.Sprintf("%d times", l.times)
		}
		out = append(out, warning(subject,
			"model %q was compiled %s in the last 7 days and is not kept: %s", l.last.ModelName,
			often, l.last.Text).hint("%s", d.unkeptHint(l.last)))
	}
	return out
}

// hasBuild reports whether the request has a build, shared or in the scope, or the look-up fails.
func (d *Doctor) hasBuild(key index.RequestKey, scope string) bool {
	for _, one := range []string{"shared", scope} {
		if builds, err := d.q.index.Lookup(key, one); err != nil || len(builds) > 0 {
			return true
		}
	}
	return false
}

func (d *Doctor) unkeptHint(e *index.Event) string {
	if hint, ok := memo.Recall[string](&d.q.index.Memos, event.UnkeptKey(e)); ok && hint != "" {
		return hint + " of the daemon's configuration"
	}
	return "epcachectl gc -n says what may not go, and why; or raise budget in [space] of the daemon's configuration"
}

func (d *Doctor) adviseConfiguration() []Advice {
	const subject = "configuration"
	now := d.q.options.Configured()
	var out []Advice
	for _, one := range now.Refused {
		out = append(out, problem(subject, "refused, and the earlier one stays in force: %s", one).
			hint("correct the file; it is read again when it changes, and upon SIGHUP"))
	}
	if len(now.Waiting) > 0 {
		out = append(out, warning(subject, "changed since the start, and takes effect at the next one: %s", strings.Join(now.Waiting, ", ")).
			hint("restart the daemon when it suits"))
	}
	if len(out) == 0 {
		out = append(out, fine(subject, "all of it is in force"))
	}
	return out
}

// adviseSandbox warns of what cannot be kept to here.
func (d *Doctor) adviseSandbox(ctx context.Context) []Advice {
	const subject = "sandbox"
	measures, err := d.q.options.Sandbox(ctx)
	if err != nil {
		a := problem(subject, "no worker starts: %v", err)
		if known := knownCause(err); known != nil {
			return []Advice{a.hint("%s", known.hint)}
		}
		return []Advice{a.hint("the worker program has to stand beside epcached, of the same version")}
	}
	var out []Advice
	for _, m := range measures {
		if m.InForce {
			out = append(out, fine(subject+" "+m.Name, "%s", m.Text))
		} else {
			out = append(out, warning(subject+" "+m.Name, "%s", m.Text).hint("%s", m.Hint))
		}
	}
	return out
}

func (d *Doctor) adviseSources(ctx context.Context) []Advice {
	s, err := d.q.sourceless(ctx)
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
		changeable = changeable || slices.Contains([]string{index.WhyPrivate, index.WhyClosed, index.WhySwitchedOff},
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
