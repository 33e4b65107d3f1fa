package upkeep

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
)

// A request with more files than a task may hold is not held, because its files stay open for
// minutes.
func TestARequestOfManyFilesIsNotHeld(t *testing.T) {
	for name, c := range map[string]struct {
		files int
		held  bool
	}{"few": {maxOpenFiles, true}, "many": {maxOpenFiles + 1, false}} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			var q Rebuilds
			q.Start(ctx, Options{Limits: func() Limits { return Limits{} },
				Now: time.Now, Log: slog.New(slog.DiscardHandler)})
			r := &request.Request{External: make(map[string]*os.File)}
			for i := range c.files {
				f, err := os.Open(os.DevNull)
				require.NoError(t, err)
				defer f.Close()
				r.External[fmt.Sprint(i)] = f
			}
			r.Graph = r.External["0"]
			q.Enqueue(RebuildRequest{Build: &index.Build{}, Asked: r, Delay: time.Hour})
			require.Equal(t, c.held, q.tasksWithFiles == 1)
			cancel()
			q.Close()
			require.Zero(t, q.tasksWithFiles)
		})
	}
}
