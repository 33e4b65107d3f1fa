package request

import (
	"cmp"
	"slices"
	"time"
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

// Stricter is the stricter of two policies, in each field.
func (p Policy) Stricter(q Policy) Policy {
	p.Unknown = stricter(p.Unknown, q.Unknown, PolicyLoadCheck, PolicyServe, PolicyLoadCheck, PolicyRefuse)
	p.PreferRecompilation = stricter(p.PreferRecompilation, q.PreferRecompilation, PolicyServeAndRefresh,
		PolicyServe, PolicyServeAndRefresh, PolicyRefuse)
	p.Unsupported = stricter(p.Unsupported, q.Unsupported, PolicyRecompile, PolicyRecompile, PolicyFail)
	if q.MaxAge > 0 && (p.MaxAge == 0 || q.MaxAge < p.MaxAge) {
		p.MaxAge = q.MaxAge
	}
	p.MinCompileSeconds = min(p.MinCompileSeconds, q.MinCompileSeconds)
	p.MeasureGain = cmp.Or(p.MeasureGain, q.MeasureGain)
	return p
}

// stricter returns the one of a and b that comes later in order; what is empty counts as usual.
func stricter(a, b, usual string, order ...string) string {
	if slices.Index(order, cmp.Or(b, usual)) > slices.Index(order, cmp.Or(a, usual)) {
		return b
	}
	return a
}
