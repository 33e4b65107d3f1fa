// Package logs writes the daemon's log: lines of text, in systemd's journal with a priority each,
// and for a daemon that a client started into a file that is bounded.
package logs

import (
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/coreos/go-systemd/v22/journal"

	"github.com/epcached/epcached/internal/printable"
)

// New returns a logger of text lines, of which each user causes few at a time. In systemd's journal
// each line has the priority of its level, and no time because the journal has its own.
func New(w io.Writer, level slog.Leveler) *slog.Logger {
	options := &slog.HandlerOptions{Level: level}
	if !isJournal(w) {
		return slog.New(limit(slog.NewTextHandler(w, options)))
	}
	options.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}
	return slog.New(limit(slog.NewTextHandler(priorityWriter{w}, options)))
}

func isJournal(w io.Writer) bool {
	is, err := journal.StderrIsJournalStream()
	return w == os.Stderr && is && err == nil // a malformed variable counts as no journal
}

// priorityWriter writes lines that begin with "level=ERROR" behind the priorities of sd-daemon(3).
type priorityWriter struct{ out io.Writer }

// Write writes one record.
func (p priorityWriter) Write(line []byte) (int, error) {
	var level slog.Level
	word, _, _ := strings.Cut(strings.TrimPrefix(string(line), "level="), " ")
	_ = level.UnmarshalText([]byte(word)) // an unknown word leaves slog.LevelInfo
	if _, err := io.WriteString(p.out, priority(level)+string(line)); err != nil {
		return 0, err
	}
	return len(line), nil
}

func priority(level slog.Level) string {
	switch {
	case level >= slog.LevelError:
		return "<3>"
	case level >= slog.LevelWarn:
		return "<4>"
	case level >= slog.LevelInfo:
		return "<6>"
	}
	return "<7>"
}

// WriteFatal writes the error that ends the program.
func WriteFatal(w io.Writer, text string) {
	text = printable.Text(text)
	if isJournal(w) {
		text = priority(slog.LevelError) + strings.ReplaceAll(text, "\n",
			"\n"+priority(slog.LevelError))
	}
	_, _ = io.WriteString(w, text+"\n") // it cannot be reported elsewhere
}
