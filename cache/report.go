package cache

import "context"

// Report says that ONNX Runtime refused a build.
type Report struct {
	Build      string // build key, as the answer gave it
	Code       int32  // ONNX Runtime's error code
	Text       string
	ORTVersion string
	Graph      string // as the answer gave it: tells which copy was loaded
	Runtime    RuntimeRef
}

// Decision is what came of a report.
type Decision struct {
	Decision string // "retry", "compile_yourself", "sound"
	Text     string // what was found
	Hint     string // what to do
	Class    string // what code and text are taken for: "stale", "not stale", "unclear"
	State    string // of the build now: "current", "withheld", "damaged", "withheld from you"
}

// Report looks into what a client says of a build. The client is not simply believed: one user must not be able to
// empty what all share.
func (c *Cache) Report(ctx context.Context, p Peer, r Report) (*Decision, error) {
	return nil, fail(Unavailable, nil, "build %q: not looked into yet", r.Build)
}
