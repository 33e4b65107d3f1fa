package main

import (
	"fmt"

	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock/wire"
)

// judgement says in one line what a build is good for, who says so, when, and for which runtime.
func judgement(b *wire.Build) string {
	if b.GetCompatibility() == "" {
		return "not judged yet"
	}
	text := verdict(b.GetCompatibility())
	if b.GetCompatibilitySource() != "" {
		text += ", says " + sourceName(b.GetCompatibilitySource())
	}
	if b.GetCompatibilityRuntime() != "" {
		text += ", for " + term.Printable(b.GetCompatibilityRuntime())
	}
	if b.GetJudgedMs() != 0 {
		text += ", " + term.Time(b.GetJudgedMs())
	}
	if b.GetCompatibilityReason() != "" {
		text += ": " + term.Printable(b.GetCompatibilityReason())
	}
	return text
}

// verdict spells ONNX Runtime's words as people do.
func verdict(word string) string {
	switch word {
	case "prefer_recompilation":
		return "prefer recompilation"
	}
	return term.Printable(word)
}

// sourceName makes a source the subject of a sentence.
func sourceName(source string) string {
	switch source {
	case "same library", "execution provider", "fingerprint":
		return "the " + source
	case "load check":
		return "a load check"
	}
	return term.Printable(source) // "rule NAME"
}

// gain compares the processor time of loading the compiled form with that of its source. A loss is
// said as plainly as a gain.
func gain(b *wire.Build) string {
	load, source := b.GetLoadSeconds(), b.GetSourceLoadSeconds()
	switch {
	case load <= 0 || source <= 0:
		return "not measured"
	case load > source:
		return fmt.Sprintf("the compiled form loads slower than the source: "+
			"%s of processor time, the source %s", loadTime(load), loadTime(source))
	}
	return fmt.Sprintf("loads in %s of processor time, the source in %s", loadTime(load),
		loadTime(source))
}

// loadTime has the same unit for both sides, so that they compare at a glance.
func loadTime(s float64) string {
	if s < 0.01 {
		return fmt.Sprintf("%.4f s", s)
	}
	return fmt.Sprintf("%.2f s", s)
}

// gainColumn is the gain in a table: how many times faster the compiled form loads.
func gainColumn(b *wire.Build) string {
	load, source := b.GetLoadSeconds(), b.GetSourceLoadSeconds()
	if load <= 0 || source <= 0 {
		return "-"
	}
	if load > source {
		return fmt.Sprintf("%.1fx slower", load/source)
	}
	return fmt.Sprintf("%.1fx", source/load)
}
