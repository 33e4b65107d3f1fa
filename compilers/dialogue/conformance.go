package dialogue

// Guideline is a sentence of ONNX Runtime's pages for authors of execution providers.
type Guideline struct {
	Section string `json:"section"`
	Name    string `json:"name"` // in the page's words
	Page    string `json:"page"`
	Level   string `json:"level"` // Required, Recommended or Optional
}

// Levels of guidelines.
const (
	Required    = "required"
	Recommended = "recommended"
	Optional    = "optional" // a feature that not every EP has
)

// Finding is what became of a guideline.
type Finding struct {
	Guideline
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

// Call is a call that was made to find out, and what came of it.
type Call struct {
	Call     string `json:"call"`
	Expected string `json:"expected"`
	Happened string `json:"happened"`
	OK       bool   `json:"ok"`
}
