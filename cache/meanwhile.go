package cache

import (
	"context"
	"slices"
)

// meanwhile is the job of a request whose build was stored after it had been looked for, and before anybody could wait
// for it: there is nothing left to do.
type meanwhile struct {
	result *compiled
	about  jobFacts
}

func (m *meanwhile) facts() jobFacts { return m.about }

func (m *meanwhile) run(context.Context, *flight) (*compiled, error) {
	return m.result, nil
}

// madeMeanwhile looks once more for the build that a job in this scope would make, nil if it is still to be made. Jobs
// store their builds before they are taken from those that can be joined, so under flights.mu nothing is overlooked.
func (c *Cache) madeMeanwhile(r *Request, p *plan, rc *runtimeContent, scope string) *meanwhile {
	if r.OnMiss == Refresh || r.OnMiss == Bypass || scope == "" {
		return nil
	}
	if rc == nil {
		rc = statedRuntime(r)
	}
	builds, err := c.index.Lookup(p.requestKey, scope)
	if err != nil {
		return nil // whoever makes it will say so
	}
	for i := range builds {
		if b := &builds[i]; p.exactly(b) && !slices.Contains(r.unserved, b.ID) && c.barred(r, rc, b) == "" {
			return &meanwhile{result: &compiled{build: b, found: true}, about: p.job(r, scope, "asked for")}
		}
	}
	return nil
}
