package store

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// openBench opens a store that no other process uses.
func openBench(b testing.TB, adjust ...func(*Options)) *Store {
	o := Options{Log: slog.New(slog.DiscardHandler), Now: time.Now,
		OnPublished: func(*index.Build, uint32) {}, OnWithheld: func(*index.Build) {},
		Compiling: func() bool { return false }}
	for _, one := range adjust {
		one(&o)
	}
	st, err := Open(filepath.Join(b.TempDir(), "state"), o)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, st.Close()) })
	return st
}

// stageBuild makes the files of a build, which has 64 KiB.
func stageBuild(b testing.TB, st *Store) (*index.Build, string) {
	dir, remove, err := st.Stage("bench-")
	require.NoError(b, err)
	b.Cleanup(remove)
	build := &index.Build{Scope: "shared", UID: 1000, ModelName: "m", Graph: "g.onnx",
		Created: time.Now(), LoadCheck: "passed"}
	_, _ = rand.Read(build.RequestKey[:])
	_, _ = rand.Read(build.BuildKey[:])
	for name, n := range map[string]int{"g.onnx": 2000, "g.bin": 64 << 10} {
		content := make([]byte, n)
		_, _ = rand.Read(content)
		require.NoError(b, os.WriteFile(filepath.Join(dir, name), content, 0o600))
		build.Files = append(build.Files, index.File{Name: name})
	}
	return build, dir
}

// BenchmarkPublish has several publish at the same time, from staged files to the acknowledgement.
func BenchmarkPublish(b *testing.B) {
	for _, at := range []int{1, 2, 8} {
		b.Run(fmt.Sprint(at), func(b *testing.B) {
			st := openBench(b)
			type staged struct {
				build *index.Build
				dir   string
			}
			list := make([]staged, b.N)
			for i := range list {
				list[i].build, list[i].dir = stageBuild(b, st)
			}
			var next atomic.Int64
			var all sync.WaitGroup
			b.ResetTimer()
			for range at {
				all.Go(func() {
					for i := next.Add(1) - 1; i < int64(b.N); i = next.Add(1) - 1 {
						hold := st.Blobs().Hold()
						if err := st.Publish(b.Context(),
							Publication{Build: list[i].build, Dir: list[i].dir, Kind: "test"},
							hold); err != nil {
							b.Error(err)
						}
						st.Packing().Release(hold)
					}
				})
			}
			all.Wait()
			b.StopTimer()
		})
	}
}

// BenchmarkPublishFull publishes for a user that has all that the quota allows, with 2,000 other
// builds there, so that a build is evicted for each.
func BenchmarkPublishFull(b *testing.B) {
	const full, logical = 2000, 2000 + 64<<10
	st := openBench(b)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	st.Start(ctx)
	for range full {
		publishInRoom(b, st, logical)
	}
	st.SetSettings(Settings{Space: SpaceOptions{UserBytes: Amount{Bytes: full * logical}}})
	for b.Loop() {
		publishInRoom(b, st, logical)
	}
	cancel()
}
