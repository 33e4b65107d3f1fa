package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/compilers"
)

// conform is replaced in tests.
var conform = func(ctx context.Context, job compilers.ConformanceJob) (compilers.Conformance,
	error) {
	worker := compilers.NewORT(compilers.ORTOptions{Worker: os.Getenv(workerVariable)})
	defer worker.Close() // its jobs have ended
	return worker.Conformance(ctx, job)
}

// conformance holds a plugin library to ONNX Runtime's guidelines, and prints a report.
func (a *app) conformance(ctx context.Context, library, dir string, asked *request) error {
	library, err := filepath.Abs(library)
	if err != nil {
		return err
	}
	if _, err := os.Stat(library); err != nil {
		return during("probe", fmt.Errorf("--conformance %q: %w", library, plainPathError(err)))
	}
	r, err := runtimeFor(library, dir)
	if err != nil {
		return &hintedError{during("probe", err),
			"name a folder that has ONNX Runtime: --runtime DIR"}
	}
	ep, err := asked.oneEP()
	if err != nil {
		return err
	}
	ep.Library = library
	job := compilers.ConformanceJob{Runtime: r, EP: ep}
	if !a.json {
		section := ""
		job.Told = func(f compilers.Finding) {
			if f.Section != section {
				section = f.Section
				a.print.line("%s", printable(section))
			}
			a.print.finding(f)
		}
	}
	result, err := conform(ctx, job)
	if err != nil {
		return err
	}
	if a.json {
		err = a.print.json(result)
	} else {
		a.print.conformance(result)
	}
	if err == nil && result.Broken() {
		return exitError(exitFailed)
	}
	return err
}

// oneEP is the execution provider that is asked for, at most one; without a name it is the
// library's.
func (r *request) oneEP() (compilers.EP, error) {
	if len(r.eps) > 1 {
		return compilers.EP{}, usageError{errors.New("one --ep at a time")}
	}
	ep := compilers.EP{Options: map[string]string{}}
	if len(r.eps) == 1 {
		ep.Name, ep.Options = r.eps[0].GetName(), r.eps[0].GetOptions()
		ep.Devices = selectors(r.eps[0].GetDevices())
	}
	for _, o := range append(r.early, r.named...) {
		if o.ep != "" && o.ep != ep.Name {
			return compilers.EP{}, usageError{fmt.Errorf("--option %s/%s: there is no --ep %s",
				brief(o.ep), brief(o.key), brief(o.ep))}
		}
		if ep.Options == nil {
			ep.Options = map[string]string{}
		}
		ep.Options[o.key] = o.value
	}
	return ep, nil
}

// runtimeFor finds the ONNX Runtime in dir, or in the nearest folder above the library that has
// one. It skips folders such as /tmp, because any user may have put a library there.
func runtimeFor(library, dir string) (compilers.Runtime, error) {
	if dir != "" {
		return compilers.FindORT(dir)
	}
	for folder := filepath.Dir(library); ; folder = filepath.Dir(folder) {
		r, err := compilers.FindORT(folder)
		if err == nil && !allMayWrite(folder) && !allMayWrite(filepath.Dir(r.ORTLibrary)) {
			return r, nil
		}
		if folder == filepath.Dir(folder) {
			return r, fmt.Errorf("--conformance %q: libonnxruntime.so*: %w in any folder above it",
				library, compilers.ErrNotFound)
		}
	}
}

func allMayWrite(dir string) bool {
	info, err := os.Stat(dir)
	return err != nil || info.Mode().Perm()&0o002 != 0
}

// finding prints a line on a guideline, and of a broken one the calls.
func (p *printer) finding(f compilers.Finding) {
	text := printable(f.Name)
	if f.Level != compilers.Required {
		text += " (" + f.Level + ")"
	}
	if f.Reason != "" {
		text += ": " + printable(f.Reason)
	}
	p.line("  %-15s %s", f.Outcome, text)
	if f.Outcome != compilers.GuidelineBroken {
		return
	}
	for _, call := range f.Calls {
		if call.OK {
			p.line("      %s: %s", printable(call.Call), printable(call.Happened))
			continue
		}
		p.line("      %s\n        expected: %s\n        happened: %s", printable(call.Call),
			printable(call.Expected), printable(call.Happened))
	}
	p.line("      see %s", f.Page)
}

// conformance prints what was tried, and how many guidelines hold.
func (p *printer) conformance(c compilers.Conformance) {
	var holds, broken, required int
	for _, f := range c.Findings {
		switch {
		case f.Outcome == compilers.GuidelineHolds:
			holds++
		case f.Outcome == compilers.GuidelineBroken:
			broken++
			if f.Level == compilers.Required {
				required++
			}
		}
	}
	p.line("%s in %s, on %s, with ONNX Runtime %s and models of %s:", printable(c.EP),
		printable(c.Library), printable(c.Device), printable(c.ORTVersion), c.Model)
	p.line("%d guidelines: %d hold, %d broken (%d of them required), %d not applicable",
		len(c.Findings), holds, broken, required, len(c.Findings)-holds-broken)
}
