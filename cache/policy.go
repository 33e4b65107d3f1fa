package cache

import (
	"cmp"
	"slices"
	"time"

	"github.com/epcached/epcached/compilers"
)

// Policy says what to do with builds that are not the best for a runtime. The zero value is the default.
type Policy struct {
	Unknown             string        // "load_check" (default): serve what loads; "serve"; "refuse"
	PreferRecompilation string        // "serve_and_refresh" (default), "serve", "refuse"
	Unsupported         string        // "recompile" (default), "fail"
	MaxAge              time.Duration // builds older than this are served, and compiled anew in the background; 0: any age
	MinCompileSeconds   float64       // what compiles faster is answered but not kept
	MeasureGain         *bool         // measure how long the source model takes to load; nil: yes
}

// The words of policies.
const (
	PolicyLoadCheck       = "load_check"
	PolicyServe           = "serve"
	PolicyRefuse          = "refuse"
	PolicyServeAndRefresh = "serve_and_refresh"
	PolicyRecompile       = "recompile"
	PolicyFail            = "fail"
)

// policy is the one for an execution provider.
func (s *settings) policy(ep string) Policy {
	p, ok := s.policies[ep]
	if !ok {
		p = s.policies[""]
	}
	return p
}

// policyOf is the strictest of the policies for the execution providers of a request.
func (c *Cache) policyOf(eps []compilers.EP) Policy {
	var out Policy
	now := c.settings.Load()
	for i, ep := range eps {
		p := now.policy(ep.Name)
		if i == 0 {
			out = p
			continue
		}
		out.Unknown = stricter(out.Unknown, p.Unknown, PolicyLoadCheck, PolicyServe, PolicyLoadCheck, PolicyRefuse)
		out.PreferRecompilation = stricter(out.PreferRecompilation, p.PreferRecompilation, PolicyServeAndRefresh,
			PolicyServe, PolicyServeAndRefresh, PolicyRefuse)
		out.Unsupported = stricter(out.Unsupported, p.Unsupported, PolicyRecompile, PolicyRecompile, PolicyFail)
		if p.MaxAge > 0 && (out.MaxAge == 0 || p.MaxAge < out.MaxAge) {
			out.MaxAge = p.MaxAge
		}
		out.MinCompileSeconds = min(out.MinCompileSeconds, p.MinCompileSeconds)
		if out.MeasureGain == nil {
			out.MeasureGain = p.MeasureGain
		}
	}
	return out
}

// stricter gives the one of a and b that comes later in order; what is empty counts as usual.
func stricter(a, b, usual string, order ...string) string {
	if slices.Index(order, cmp.Or(b, usual)) > slices.Index(order, cmp.Or(a, usual)) {
		return b
	}
	return a
}
