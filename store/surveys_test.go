package store

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// surveys counts the surveys in a log.
type surveys struct {
	slog.Handler
	n atomic.Int64
}

func (s *surveys) Enabled(context.Context, slog.Level) bool { return true }

func (s *surveys) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "surveyed" {
		s.n.Add(1)
	}
	return nil
}

// Where small builds are published into a full store, one after another or four at a time, the
// whole index is read for few of them. All of them are kept, and the bound is.
func TestSmallPublicationsShareASurvey(t *testing.T) {
	const (
		full    = 200
		more    = 40
		disk    = 17*4096 + ManifestNeed
		logical = 2000 + 64<<10
	)
	for name, space := range map[string]SpaceOptions{
		"budget": {Budget: Amount{Bytes: full * disk}},
		"user":   {UserBytes: Amount{Bytes: full * logical}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log := &surveys{Handler: slog.DiscardHandler}
			st, err := Open(filepath.Join(t.TempDir(), "state"),
				Options{Log: slog.New(log), Now: time.Now,
					OnPublished: func(*index.Build, uint32) {}, OnWithheld: func(*index.Build) {},
					Compiling: func() bool { return false }, Settings: Settings{Space: space}})
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			st.Start(ctx)
			t.Cleanup(func() { cancel(); require.NoError(t, st.Close()) })
			publish := func(builds, at int) {
				var all sync.WaitGroup
				for range at {
					all.Go(func() {
						for range builds / at {
							publishInRoom(t, st, 2000, 64<<10)
						}
					})
				}
				all.Wait()
			}
			publish(full, 4)
			for _, at := range []int{1, 4} {
				before := log.n.Load()
				publish(more, at)
				require.Less(t, log.n.Load()-before, int64(more/2), "%d at a time", at)
			}
		})
	}
}

// publishInRoom publishes a build as a job does, in reserved space, without a waiting request.
func publishInRoom(t testing.TB, st *Store, sizes ...int64) {
	b, dir := stageBuild(t, st)
	reservation, err := st.Reserve(t.Context(), b.UID, true, sizes...)
	if !assert.NoError(t, err) {
		return
	}
	hold := st.Blobs().Hold()
	defer st.Packing().Release(hold)
	assert.NoError(t, st.Publish(t.Context(),
		Publication{Build: b, Dir: dir, Kind: "test", Reservation: reservation}, hold))
	st.ExpectTakers(b.ID, 0)
}
