package rules

import (
	"fmt"
	"regexp"
	"slices"

	"github.com/epcached/epcached/compilers"
)

// The classes of reports.
const (
	Stale    = "stale"     // the build does not suit the runtime, or is damaged: to be checked and made anew
	NotStale = "not stale" // the cause is elsewhere: the application's options, files or session
	Unclear  = "unclear"   // only a check can tell
)

type report struct {
	name   string
	codes  []int          // nil: every code
	text   *regexp.Regexp // nil: every text
	class  string
	reason template
	hint   template
}

// Class is what an error of ONNX Runtime is taken for.
type Class struct {
	Name     string // Stale, NotStale or Unclear
	Rule     string // what decided; empty: nothing did, and the class is Unclear
	File     string // where it stands
	Reason   string // for people; never empty
	Hint     string // what they can do; may be empty
	CodeName string // as CodeName gives it
}

// maxText bounds the part of a message that is looked at. The vendors' messages are shorter; a client may send anything.
const maxText = 64 << 10

// Classify tells what an error code and its text mean when a session with a build of the EP could not be made. A code below zero is no code of ONNX
// Runtime: a crash.
func (s *Set) Classify(ep string, code int, text string) Class {
	name := compilers.CodeName(code)
	if len(text) > maxText {
		text = text[:maxText]
	}
	for _, part := range s.sections(ep) {
		for _, r := range part.reports {
			if r.codes != nil && !slices.Contains(r.codes, code) || r.text != nil && !r.text.MatchString(text) {
				continue
			}
			fill := func(placeholder string) string {
				if placeholder == "code" {
					return name
				}
				return ep
			}
			return Class{Name: r.class, Rule: r.name, File: part.file, Reason: r.reason.fill(fill), Hint: r.hint.fill(fill), CodeName: name}
		}
	}
	return Class{Name: Unclear, CodeName: name, Reason: fmt.Sprintf("nothing is known of %s from %s", name, shown(ep))}
}

func codeByName(text string) (int, bool) {
	for code, name := range compilers.CodeNames {
		if text == name || text == compilers.CodeName(code) {
			return code, true
		}
	}
	return 0, false
}
