//go:build linux && (amd64 || arm64)

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/workerproto"
)

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

// Report is how an EP keeps ONNX Runtime's guidelines.
type Report struct {
	EP         string    `json:"ep"` // as the library calls it
	Library    string    `json:"library"`
	ORTVersion string    `json:"ort_version"`
	Device     string    `json:"device"`
	Model      string    `json:"model"` // the kind of models that it was tried with: "MatMul float"
	Findings   []Finding `json:"guidelines"`
}

// broken reports whether a guideline that is required does not hold.
func (r Report) broken() bool {
	return slices.ContainsFunc(r.Findings, func(f Finding) bool {
		return f.Outcome == Broken && f.Level == Required
	})
}

const timeLimit = 30 * time.Minute // for one guideline

// job asks how an EP keeps the guidelines.
type job struct {
	ortLibrary string
	ep         workerproto.EP // its library is set
	limit      time.Duration
	only       func(name string) bool
	found      func(Finding) // is called with each finding; only and found may be nil
}

// examine holds an EP to the guidelines, each in a process of its own. An EP without a name has the
// one that its library's file is known for, else the library's own. The error is that of an EP with
// which nothing can be found out: it does not register, or makes no EPContext model.
func examine(ctx context.Context, j job) (Report, error) {
	r := Report{Library: j.ep.Library}
	if j.ep.Name == "" {
		j.ep.Name = nameOf(j.ep.Library)
	}
	if info, ok := compilers.EPByName(j.ep.Name); ok {
		j.ep.Options = info.Resolve(j.ep.Library, j.ep.Options)
	}
	found, err := ask(ctx, j.limit, request{ORTLibrary: j.ortLibrary, EP: j.ep})
	if err != nil {
		return r, fmt.Errorf("conformance of %q: %w", j.ep.Library, err)
	}
	j.ep.Name = found.EP
	r.EP, r.ORTVersion, r.Model, r.Device = found.EP, found.ORTVersion, found.Family, found.Device
	for _, g := range guidelines() {
		if j.only != nil && !j.only(g.Name) {
			continue
		}
		finding := Finding{Guideline: g, Outcome: Broken}
		done, err := ask(ctx, j.limit, request{ORTLibrary: j.ortLibrary, EP: j.ep,
			Guideline: g.Section + "/" + g.Name, Family: found.Family})
		switch {
		case err == nil:
			finding = *done.Finding
		case ctx.Err() != nil:
			return r, ctx.Err()
		case errors.Is(err, compilers.ErrStart):
			return r, fmt.Errorf("conformance of %q: %w", j.ep.Library, err)
		default: // the child died over the call that it reported last
			finding.Calls = []Call{{Call: done.Call, Expected: "an answer", Happened: err.Error()}}
		}
		r.Findings = append(r.Findings, finding)
		if j.found != nil {
			j.found(finding)
		}
	}
	return r, nil
}

// nameOf is the name of the EP that a library is known for by its file's name, or "".
func nameOf(library string) string {
	for _, name := range compilers.EPNames() {
		info, _ := compilers.EPByName(name)
		for _, pattern := range info.Libraries {
			if ok, err := filepath.Match(pattern, filepath.Base(library)); err == nil && ok {
				return name
			}
		}
	}
	return ""
}
