package query

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/epcached/epcached/index"
)

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
		if known := knownCause(err.Error()); known != nil {
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
