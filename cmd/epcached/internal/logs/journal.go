// Package logs writes the daemon's log: lines of text, in systemd's journal with a priority each, and for a
// daemon that a client started into a file that is bounded.
package logs

import (
	"context"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"

	"github.com/coreos/go-systemd/v22/journal"
)

// New returns a logger of text lines. In systemd's journal each line has the priority of its level,
// and no time because the journal has its own.
func New(w io.Writer, level slog.Leveler) *slog.Logger {
	options := &slog.HandlerOptions{Level: level}
	if !isJournal(w) {
		return slog.New(slog.NewTextHandler(w, options))
	}
	options.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}
	to := &prioritized{out: w}
	return slog.New(journalHandler{slog.NewTextHandler(to, options), to})
}

func isJournal(w io.Writer) bool {
	is, err := journal.StderrIsJournalStream()
	return w == os.Stderr && is && err == nil // a malformed variable names no journal
}

// journalHandler writes records with the priorities of sd-daemon(3).
type journalHandler struct {
	slog.Handler
	to *prioritized
}

// Handle writes one record.
func (h journalHandler) Handle(ctx context.Context, r slog.Record) error {
	h.to.mu.Lock()
	defer h.to.mu.Unlock()
	h.to.priority = priority(r.Level)
	return h.Handler.Handle(ctx, r)
}

// WithAttrs returns a handler whose records have further attributes.
func (h journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return journalHandler{h.Handler.WithAttrs(attrs), h.to}
}

// WithGroup returns a handler whose further attributes are in a group.
func (h journalHandler) WithGroup(name string) slog.Handler {
	return journalHandler{h.Handler.WithGroup(name), h.to}
}

// prioritized writes lines that begin with a priority.
type prioritized struct {
	mu       sync.Mutex // held while a record is handled
	priority string
	out      io.Writer
}

// Write writes one record.
func (p *prioritized) Write(line []byte) (int, error) {
	if _, err := io.WriteString(p.out, p.priority+string(line)); err != nil {
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

// Complain writes what keeps the program from going on.
func Complain(w io.Writer, text string) {
	if isJournal(w) {
		text = priority(slog.LevelError) + strings.ReplaceAll(text, "\n", "\n"+priority(slog.LevelError))
	}
	_, _ = io.WriteString(w, text+"\n") // it cannot be told elsewhere
}
