package cache

import (
	"context"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock/wire"
)

// Sandbox tells what keeps the execution providers' code from doing harm, found out once by trying. It is empty for a compiler that has no
// such code.
func (c *Cache) Sandbox(ctx context.Context) ([]compilers.Measure, error) {
	s, ok := c.compiler.(compilers.Sandboxed)
	if !ok {
		return nil, nil
	}
	measures, err := s.Sandbox(ctx)
	if err != nil {
		return nil, workerError(err, "sandbox")
	}
	return measures, nil
}

// sandboxLines is Sandbox in lines.
func (c *Cache) sandboxLines(ctx context.Context) (lines []string) {
	measures, err := c.Sandbox(ctx)
	if err != nil {
		return []string{wire.Valid("NOT KNOWN: " + err.Error())}
	}
	for _, m := range measures {
		lines = append(lines, wire.Valid(m.String()))
	}
	return lines
}

// adviseSandbox warns of what cannot be kept to here.
func (c *Cache) adviseSandbox(ctx context.Context) []Advice {
	const subject = "sandbox"
	measures, err := c.Sandbox(ctx)
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
