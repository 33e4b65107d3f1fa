package program

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/printable"
)

// Summary is the output of run --json. Scripts depend on the names of its fields.
type Summary struct {
	Sessions []Event `json:"sessions"`
	// processes and libraries in which epcache had no effect, and why
	Notes    []string       `json:"notes"`
	Outcomes map[string]int `json:"outcomes"` // number of sessions by outcome
	Pythons  int            `json:"pythons"`  // Python processes that loaded epcache
	// SavedSeconds is how long the hits took to compile originally, less how long they took now.
	SavedSeconds float64 `json:"saved_seconds"`
}

var cachedOutcomes = []string{"hit", "compiled", "waited", "put", "adopted"}

// isServed reports whether a session needed no compile: its model came from the cache, or was
// compiled already.
func (e *Event) isServed() bool {
	return slices.Contains(cachedOutcomes, e.Outcome) || e.Outcome == "passthrough"
}

func summaryOf(events []Event, more bool) *Summary {
	s := &Summary{Sessions: []Event{}, Notes: []string{}, Outcomes: map[string]int{}}
	var imported bool
	for _, e := range events {
		switch e.Kind {
		case "python":
			s.Pythons++
			if e.Old {
				s.note("Python " + e.Version +
					" is older than 3.10, and epcache is for that and later")
			}
		case "onnxruntime", "failed":
			imported = true
			s.note(e.Why)
		case "raised":
			imported = true
			s.note(fmt.Sprintf("%s could not be loaded, with or without epcached: %s",
				filepath.Base(e.Model), keyLine(e.Why)))
		case "other":
			s.note(fmt.Sprintf("%s was used: %s; its sessions are not listed here", e.What, e.Why))
		case "session", "compile":
			s.Sessions = append(s.Sessions, e)
			s.Outcomes[e.Outcome]++
			// A program that asked for the CPU would not have compiled.
			if e.Outcome == "hit" && !e.Sent {
				s.SavedSeconds += max(0, e.CompileSeconds-e.AcquireSeconds)
			}
		}
	}
	switch {
	case s.Pythons == 0:
		s.note("no Python was reached: the program is in another language, or its Python " +
			"ignores its environment (-I, -E, -S)")
	case !imported && len(s.Notes) == 0:
		s.note("onnxruntime was not imported, in " + term.Count(s.Pythons, "Python process"))
	case len(s.Sessions) == 0 && len(s.Notes) == 0:
		s.note("no session was made with onnxruntime")
	}
	if more {
		s.note("the list is incomplete")
	}
	return s
}

// Summary sums up the events.
func (l *Log) Summary() (*Summary, error) {
	events, more, err := l.read()
	return summaryOf(events, more), err
}

func (s *Summary) note(text string) {
	if text != "" && !slices.Contains(s.Notes, text) {
		s.Notes = append(s.Notes, text)
	}
}

// WriteFile writes the summary, for people or for scripts, into a file.
func (s *Summary) WriteFile(path string, asJSON bool) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if asJSON {
		err = s.WriteJSON(f)
	} else {
		_, err = io.WriteString(f, printable.Text(strings.Join(s.Lines(true), "\n"))+"\n")
	}
	return cmp.Or(err, f.Close())
}

// WriteJSON writes the summary for scripts.
func (s *Summary) WriteJSON(w io.Writer) error {
	text, err := jsonout.Indented("", s)
	if err == nil {
		_, err = w.Write(text)
	}
	return err
}

// Lines returns the summary as text: with all, each session; otherwise only those that compiled or
// failed.
func (s *Summary) Lines(all bool) []string {
	var lines []string
	if all && len(s.Sessions) > 0 {
		lines = append(lines, s.total())
	}
	for _, group := range groupSessions(s.Sessions) {
		if all || !group.isServed() {
			lines = append(lines, group.line())
		}
	}
	return append(lines, s.Notes...)
}

func (s *Summary) total() string {
	var parts []string
	for _, outcome := range slices.Sorted(maps.Keys(s.Outcomes)) {
		parts = append(parts, fmt.Sprintf("%d %s", s.Outcomes[outcome], outcome))
	}
	what := "session"
	if slices.ContainsFunc(s.Sessions, func(e Event) bool { return e.Kind == "compile" }) {
		what = "request" // of a session, or of a compile to a file
	}
	text := fmt.Sprintf("%s: %s", term.Count(len(s.Sessions), what), strings.Join(parts, ", "))
	if s.SavedSeconds > 0 {
		text += fmt.Sprintf("; %s of compiling saved", term.Seconds(s.SavedSeconds))
	}
	return text
}

// sameSessions are sessions that groupSessions combined.
type sameSessions struct {
	Event
	count int
}

// groupSessions combines sessions that differ only in their times, because programs make many
// sessions of one model.
func groupSessions(sessions []Event) []*sameSessions {
	var groups []*sameSessions
	for _, e := range sessions {
		same := func(g *sameSessions) bool {
			return g.Kind == e.Kind && g.Model == e.Model && g.Outcome == e.Outcome &&
				g.Why == e.Why && slices.Equal(g.Providers, e.Providers)
		}
		if i := slices.IndexFunc(groups, same); i >= 0 {
			groups[i].count++
			continue
		}
		groups = append(groups, &sameSessions{e, 1})
	}
	return groups
}

func (g *sameSessions) line() string {
	provider := "-"
	if len(g.Providers) > 0 {
		provider = term.Printable(g.Providers[0])
	}
	outcome, model := term.Printable(g.Outcome), term.Printable(filepath.Base(g.Model))
	sessions := ""
	if g.count > 1 {
		sessions = fmt.Sprintf(" (%d sessions)", g.count)
	}
	ran := "ran on"
	if g.Kind == "compile" {
		ran = "was compiled for"
	}
	if !g.isServed() {
		return fmt.Sprintf("%s %s %s without the cache%s: %s: %s", model, ran, provider, sessions,
			outcome, strings.TrimPrefix(term.Printable(keyLine(g.Why)), outcome+": "))
	}
	text := fmt.Sprintf("%s %s on %s%s", outcome, model, provider, sessions)
	text += fmt.Sprintf(": ready in %s", term.Seconds(g.AcquireSeconds+g.LoadSeconds))
	if g.CompileSeconds > 0 {
		text += fmt.Sprintf(", compiling took %s", term.Seconds(g.CompileSeconds))
	}
	return text
}

// keyLine returns the most informative line of a reason. A compiler's message may have many lines,
// of which the last sums up the others; --json has all of them.
func keyLine(why string) string {
	const most = 300
	lines := strings.Split(strings.TrimSpace(why), "\n")
	said := []rune(strings.TrimPrefix(lines[len(lines)-1], "-- "))
	if len(said) > most {
		return string(said[:most]) + "..."
	}
	return string(said)
}
