package workerproto

// Guideline is the work of one process of compilers/conformance, which reads it as JSON from
// standard input. The answers go to descriptor 3, as lines of JSON: each call before it is made,
// then the rest, so that the call that a process died over is known.
type Guideline struct {
	ORTLibrary string
	EP         EP     // Name may be empty for Identify
	Do         string // Identify, FindFamily, or "": the steps
	Steps      []string
	Bare       bool     // the library is not registered before the first step
	Family     string   // of models, of an answer to FindFamily
	Dir        string   // private; for some, with a build that an earlier process made there
	Watch      []string // directories that the EP has no reason to write to
}

// The kinds of work beside the guidelines.
const (
	Identify   = "identify"    // what the EP is called, and its devices
	FindFamily = "find family" // which models it makes EPContext models of
)

// GuidelineAnswer is one line of an answer.
type GuidelineAnswer struct {
	Call    string   `json:",omitempty"`
	Error   string   `json:",omitempty"`
	Finding *Finding `json:",omitempty"`

	EP, Vendor, ORTVersion string        // Identify
	Devices                []DeviceFacts // Identify
	Family                 string        // FindFamily; "" with a Finding: none
	SDK, Hardware, Info    string        // FindFamily: what its build states
}

// Finding is what became of a guideline.
type Finding struct {
	Outcome string `json:"outcome"`          // Holds, Broken or NotApplicable
	Reason  string `json:"reason,omitempty"` // why it is not applicable
	Calls   []Call `json:"calls"`            // in order; where it is broken the last one says why
}

// Outcomes of guidelines.
const (
	Holds         = "holds"
	Broken        = "broken"
	NotApplicable = "not applicable"
)

// Call is a call of ONNX Runtime that was made to find out, and what came of it.
type Call struct {
	Call     string `json:"call"`
	Expected string `json:"expected"`
	Happened string `json:"happened"`
	OK       bool   `json:"ok"`
}
