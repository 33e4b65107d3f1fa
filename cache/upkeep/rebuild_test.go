package upkeep

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// A request with more files than a task may hold is not held, because its files stay open for minutes.
func TestARequestOfManyFilesIsNotHeld(t *testing.T) {
	for name, c := range map[string]struct {
		files int
		held  bool
	}{"few": {maxHeldFiles, true}, "many": {maxHeldFiles + 1, false}} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			var q Rebuilds
			q.Start(ctx, Options{Limits: func() Limits { return Limits{} }, NewID: func() string { return name },
				Now: time.Now, Log: slog.New(slog.DiscardHandler)})
			open := 0
			q.Want(Wish{Build: &index.Build{}, Files: &Files{Count: c.files, Hold: func() (Compile, func(), error) {
				open++
				return func(context.Context, Rebuild) Outcome { return Outcome{} }, func() { open-- }, nil
			}}})
			require.Equal(t, c.held, open == 1)
			cancel()
			q.Close()
			require.Zero(t, open)
		})
	}
}
