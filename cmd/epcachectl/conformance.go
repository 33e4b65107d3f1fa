package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/compilers"
)

// conform is replaced in tests.
var conform = func(ctx context.Context, job compilers.ConformanceJob) (compilers.Conformance,
	error) {
	worker := compilers.NewORT(compilers.ORTOptions{Worker: os.Getenv(acquire.WorkerVariable)})
	defer worker.Close() // its jobs have ended
	return worker.Conformance(ctx, job)
}

// conformance holds a plugin library to ONNX Runtime's guidelines, and prints a report.
func (a *app) conformance(ctx context.Context, library, dir string, asked *acquire.Request) error {
	library, err := filepath.Abs(library)
	if err != nil {
		return err
	}
	if _, err := os.Stat(library); err != nil {
		return exit.During("probe", fmt.Errorf("--conformance %q: %w", library, modelfile.PlainPathError(err)))
	}
	r, err := runtimeFor(library, dir)
	if err != nil {
		return exit.Hint(exit.During("probe", err),
			"name a folder that has ONNX Runtime: --runtime DIR")
	}
	ep, err := asked.OneEP()
	if err != nil {
		return err
	}
	ep.Library = library
	job := compilers.ConformanceJob{Runtime: r, EP: ep}
	if !a.JSON {
		section := ""
		job.Told = func(f compilers.Finding) {
			if f.Section != section {
				section = f.Section
				a.Print.Line("%s", term.Printable(section))
			}
			printGuideline(a.Print, f)
		}
	}
	result, err := conform(ctx, job)
	if err != nil {
		return err
	}
	if a.JSON {
		err = a.Print.JSON(result)
	} else {
		printConformance(a.Print, result)
	}
	if err == nil && result.Broken() {
		return exit.Status(exit.Failed)
	}
	return err
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

// printGuideline prints a line on a guideline, and of a broken one the calls.
func printGuideline(p *term.Printer, f compilers.Finding) {
	text := term.Printable(f.Name)
	if f.Level != compilers.Required {
		text += " (" + f.Level + ")"
	}
	text += term.After(": ", f.Reason)
	p.Line("  %-15s %s", f.Outcome, text)
	if f.Outcome != compilers.GuidelineBroken {
		return
	}
	for _, call := range f.Calls {
		if call.OK {
			p.Line("      %s: %s", term.Printable(call.Call), term.Printable(call.Happened))
			continue
		}
		p.Line("      %s\n        expected: %s\n        happened: %s", term.Printable(call.Call),
			term.Printable(call.Expected), term.Printable(call.Happened))
	}
	p.Line("      see %s", f.Page)
}

// printConformance prints what was tried, and how many guidelines hold.
func printConformance(p *term.Printer, c compilers.Conformance) {
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
	p.Line("%s in %s, on %s, with ONNX Runtime %s and models of %s:", term.Printable(c.EP),
		term.Printable(c.Library), term.Printable(c.Device), term.Printable(c.ORTVersion), c.Model)
	p.Line("%d guidelines: %d hold, %d broken (%d of them required), %d not applicable",
		len(c.Findings), holds, broken, required, len(c.Findings)-holds-broken)
}
