package compilers

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/epcached/epcached/compilers/dialogue"
)

// Outcomes and levels of guidelines.
const (
	GuidelineHolds  = dialogue.Holds
	GuidelineBroken = dialogue.Broken
	Required        = dialogue.Required
)

// Conformance is how an EP keeps ONNX Runtime's guidelines.
type Conformance struct {
	EP         string    `json:"ep"` // as the library calls it
	Library    string    `json:"library"`
	ORTVersion string    `json:"ort_version"`
	Device     string    `json:"device"`
	Model      string    `json:"model"` // the kind of models that it was tried with: "MatMul float"
	Findings   []Finding `json:"guidelines"`
}

// Finding is what became of one guideline.
type Finding = dialogue.Finding

// GuidelineCall is a call that was made to find out.
type GuidelineCall = dialogue.Call

// Broken tells whether a guideline that is required does not hold.
func (c Conformance) Broken() bool {
	return slices.ContainsFunc(c.Findings, func(f Finding) bool {
		return f.Outcome == dialogue.Broken && f.Level == dialogue.Required
	})
}

// ConformanceJob asks how an EP keeps the guidelines.
type ConformanceJob struct {
	Runtime Runtime // its EPs do not count
	EP      EP      // Library has to be set
	Only    func(section, name string) bool
	Told    func(Finding) // is called with each finding; Only and Told may be nil
}

// Conformance holds an EP to ONNX Runtime's guidelines, each in a worker of its own. An EP without
// a name has the one that its library's file is known for, else the library's own. The error is
// that of an
// EP with which nothing can be found out: it does not register, or makes no EPContext model.
func (o *ORT) Conformance(ctx context.Context, job ConformanceJob) (Conformance, error) {
	r, ep := job.Runtime, job.EP
	c := Conformance{Library: ep.Library}
	if name, known := epOfLibrary(ep.Library); ep.Name == "" && known {
		ep.Name = name
	}
	found, _, err := o.conform(ctx, r, ep, "", "")
	if err != nil {
		return c, fmt.Errorf("conformance of %q: %w", ep.Library, err)
	}
	if len(found.EPs) != 1 {
		return c, fmt.Errorf("conformance of %q: %w", ep.Library, ErrDialogue)
	}
	ep.Name = found.EPs[0].Name
	c.ORTVersion, c.EP, c.Model = found.ORTVersion, ep.Name, found.Family
	c.Device = Device{}.Listed(found.EPs[0].Devices)
	for _, g := range found.Guidelines {
		if job.Only != nil && !job.Only(g.Section, g.Name) {
			continue
		}
		finding := Finding{Guideline: g, Outcome: dialogue.Broken}
		done, last, err := o.conform(ctx, r, ep, g.Section+"/"+g.Name, found.Family)
		switch {
		case err == nil && done.Finding != nil:
			finding = *done.Finding
		case ctx.Err() != nil:
			return c, ctx.Err()
		case err == nil || errors.Is(err, ErrStart):
			return c, fmt.Errorf("conformance of %q: %w", ep.Library, errors.Join(err, ErrDialogue))
		default: // the worker died over the call that it told last
			finding.Calls = []dialogue.Call{{Call: last, Expected: "an answer",
				Happened: err.Error()}}
		}
		c.Findings = append(c.Findings, finding)
		if job.Told != nil {
			job.Told(finding)
		}
	}
	return c, nil
}

func (o *ORT) conform(ctx context.Context, r Runtime, ep EP, guideline,
	family string) (done answer, last string, err error) {
	eps, err := requestEPs(r, []EP{ep})
	if err != nil {
		return answer{}, "", err
	}
	r.EPs = []EPLibrary{ownLibrary(ep.Name, ep.Library)}
	req := dialogue.Request{Do: dialogue.Conformance, ORTLibrary: r.ORTLibrary, EPs: eps,
		Guideline: guideline, Family: family, Readable: readable(r, eps)}
	done, err = o.scratchJob(ctx, req, Pace{}, func(call string) { last = call })
	return done, last, err
}
