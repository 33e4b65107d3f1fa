package index

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// A survey says of every build and every blob what the records say, also after some are gone and
// over a restart.
func TestASurveyIsTheRecords(t *testing.T) {
	ctx, dir := context.Background(), memoryDir(t)
	sizes := map[cas.Digest]int64{}
	o := Options{MeasureDisk: func(d cas.Digest) (int64, error) {
		if n, ok := sizes[d]; ok {
			return n, nil
		}
		return 0, errors.New("not there")
	}}
	x, err := Open(dir, o)
	require.NoError(t, err)
	shared := cas.Digest{9}
	sizes[shared] = 12288
	var builds []Build
	for i := range byte(3) {
		own := cas.Digest{i + 1}
		sizes[own] = 4096 * int64(i+1)
		b := Build{ID: BuildID{i + 1, 7}, RequestKey: RequestKey{i},
			ModelDigest: cas.Digest{100 + i}, BuildKey: BuildKey{i}, Scope: "shared",
			UID: 1000 + uint32(i%2), Put: i == 2,
			ModelName: "m", Graph: "g",
			Files: []File{{"g", 100, own}, {"s", 9000, shared}, {"again", 9000, shared}},
			EPs:   []EPFacts{{Name: "EP"}}, CompileSeconds: float64(i),
			Created: time.Unix(int64(i), 5).UTC()}
		require.NoError(t, x.Publish(ctx, b))
		builds = append(builds, b)
	}
	x.Uses.Add(builds[1].ID, time.Unix(50, 0), 4, 2)
	check := func(want []Build, needs uint32) {
		t.Helper()
		s, err := x.Survey(ctx, map[cas.Digest]struct{}{shared: {}, {77}: {}}, nil)
		require.NoError(t, err)
		require.Len(t, s.Builds, len(want))
		require.Len(t, s.At, 1, "what no build needs is not there")
		for i, b := range s.Builds {
			w := want[i]
			require.Equal(t, w.ID, b.ID)
			require.Equal(t,
				[]any{w.RequestKey, w.Scope, w.UID, w.Put, "EP", w.Created, w.CompileSeconds,
					int64(18100)},
				[]any{b.RequestKey, b.Scope, b.UID, b.Put, b.EP, b.Created, b.CompileSeconds,
					b.LogicalBytes})
			require.Len(t, b.Blobs, 2)
			require.Equal(t, Blob{100, sizes[w.Files[0].Digest], 1}, s.Blobs[b.Blobs[0]])
			require.Equal(t, Blob{9000, 12288, needs}, s.Blobs[b.Blobs[1]])
			require.Equal(t, b.Blobs[1], s.At[shared])
			require.Equal(t, w.ModelDigest, b.ModelDigest)
			u := x.Uses.usageOf(w.ID)
			require.Equal(t, u, b.Use)
		}
		space, err := x.Space()
		require.NoError(t, err)
		disk := int64(12288)
		users := map[uint32]UserSpace{}
		for _, w := range want {
			disk += sizes[w.Files[0].Digest]
			u := users[w.UID]
			u.Builds, u.LogicalBytes = u.Builds+1, u.LogicalBytes+18100
			if w.Put {
				u.PutBytes += 18100
			}
			users[w.UID] = u
		}
		require.Equal(t, disk, space.DiskBytes)
		manifest, err := cas.DiskBytes(x.manifests.path(want[0].ID))
		require.NoError(t, err)
		require.Equal(t, manifest*int64(len(want)), space.ManifestBytes)
		have, err := x.Users(ctx)
		require.NoError(t, err)
		require.Equal(t, users, have)
	}
	check(builds, 3)
	require.NoError(t, x.Retract(ctx, builds[0].ID, "test"))
	check(builds[1:], 2)
	sizes[shared] = 0 // it was moved away
	require.NoError(t, x.Remeasure(shared))
	sizes[shared] = 12288
	require.NoError(t, x.Remeasure(shared))
	check(builds[1:], 2)
	require.NoError(t, x.Close())
	x, err = Open(dir, o)
	require.NoError(t, err)
	check(builds[1:], 2)
	require.NoError(t, x.Close())
}

// Reading a build's state does not block on the disk.
func TestReadersDoNotWaitForSyncs(t *testing.T) {
	slow := &slowSync{begun: make(chan struct{}, 1), end: make(chan struct{})}
	x, err := Open(memoryDir(t), Options{FS: slow})
	require.NoError(t, err)
	slow.on.Store(true)
	done := make(chan error, 1)
	go func() {
		done <- x.Journal.AddTombstones([]Tombstone{{BuildID: BuildID{1}, At: time.Unix(1, 0)}})
	}()
	<-slow.begun
	require.Equal(t, Current, x.Journal.StateOf(BuildID{1}).Name)
	_, pinned := x.Journal.Pinned(BuildID{1})
	require.False(t, pinned)
	require.NoError(t, x.Journal.AddEvent(context.Background(), Event{Kind: "test"}),
		"nor who appends")
	select {
	case err := <-done:
		t.Fatal("it did not wait for the disk:", err)
	default:
	}
	slow.on.Store(false)
	close(slow.end)
	require.NoError(t, <-done)
	require.NoError(t, x.Close())
}

type slowSync struct {
	cas.OS
	on    atomic.Bool
	begun chan struct{}
	end   chan struct{}
}

func (s *slowSync) Sync(f *os.File) error {
	if s.on.Load() {
		s.begun <- struct{}{}
		<-s.end
	}
	return s.OS.Sync(f)
}
