package logs

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// The rate limit of log lines that users cause, by user and kind of line. Lines beyond it are
// counted, and their number is logged.
const (
	maxLines      = 20
	limitInterval = 10 * time.Second
)

// limitHandler drops lines with the attribute uid that exceed the limit of their user and message.
// Loggers with attributes of their own are not limited, because they log the daemon's own work.
type limitHandler struct {
	slog.Handler
	counts *lineCounts
}

type lineCounts struct {
	mu      sync.Mutex
	written map[lineKind]int // lines of a kind since its first one; forgotten after limitInterval
}

type lineKind struct {
	message string
	uid     uint64
}

func limit(h slog.Handler) slog.Handler {
	return limitHandler{h, &lineCounts{written: make(map[lineKind]int)}}
}

// Handle writes the record, or counts it.
func (l limitHandler) Handle(ctx context.Context, r slog.Record) error {
	of, user := lineKind{message: r.Message}, false
	r.Attrs(func(a slog.Attr) bool {
		if user = a.Key == "uid" && a.Value.Kind() == slog.KindUint64; user {
			of.uid = a.Value.Uint64()
		}
		return !user
	})
	if user && !l.counts.allow(of, func(more int) {
		said := slog.NewRecord(time.Now(), r.Level, "log lines dropped", 0)
		said.Add("uid", of.uid, "lines", more, "message", of.message)
		_ = l.Handler.Handle(context.Background(), said) // an error cannot be reported elsewhere
	}) {
		return nil
	}
	return l.Handler.Handle(ctx, r)
}

// allow counts a line, and reports whether to write it. rest is called later with the number of
// dropped lines.
func (ks *lineCounts) allow(of lineKind, rest func(more int)) bool {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	ks.written[of]++
	if ks.written[of] == 1 {
		time.AfterFunc(limitInterval, func() {
			ks.mu.Lock()
			more := ks.written[of] - maxLines
			delete(ks.written, of)
			ks.mu.Unlock()
			if more > 0 {
				rest(more)
			}
		})
	}
	return ks.written[of] <= maxLines
}
