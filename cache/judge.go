package cache

import (
	"time"

	"github.com/epcached/epcached/compilers"
)

// Judgement says how a build suits a runtime, and how that is known.
type Judgement struct {
	Verdict compilers.Verdict
	Source  string // "same library", "execution provider", "fingerprint", "load check", "rule NAME"; "": nobody judged
	Reason  string
	At      time.Time
	Runtime string // the runtime's name
}

// The sources of judgements, from best to worst; rules are named one by one.
const (
	sameLibrary = "same library"
)

// Gain compares how long the two forms of a model take to load, in seconds; 0: not measured.
type Gain struct {
	Load, SourceLoad float64
}
