package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock/wire"
)

// rememberedRequest is a bench with a request that was a hit, whose files are old enough.
func rememberedRequest(t *testing.T) (*bench, *request.Request) {
	b := newBench(t)
	b.later.Store(int64(time.Minute))
	r := b.request(b.model(1))
	b.acquire(r)
	require.Equal(t, request.Hit, b.acquire(r).Outcome)
	return b, r
}

// fromMemory answers the request without deciding it again, nil if that is not possible.
func (b *bench) fromMemory(r *request.Request) *wire.AcquireReply {
	b.Helper()
	a := b.cache.Repeats.Answer(context.Background(), r.Peer, b.repetition(r), nil)
	if a == nil {
		return nil
	}
	require.NoError(b, a.View.Close())
	raw, err := proto.Marshal(a.Reply())
	require.NoError(b, err)
	var out wire.AcquireReply
	require.NoError(b, proto.Unmarshal(raw, &out))
	return &out
}

// A repeated request gets the answer that it would get if it was decided again, and counts as it.
func TestRepeatedRequestIsAnsweredFromMemory(t *testing.T) {
	b, r := rememberedRequest(t)
	a, err := b.cache.Acquire(t.Context(), r, nil)
	require.NoError(t, err)
	require.NoError(t, a.View.Close())
	hits := b.cache.index.Counters.All()["hits"]
	for range 3 { // the reply is encoded once
		got := b.fromMemory(r)
		require.NotNil(t, got)
		require.True(t, proto.Equal(a.Reply(), got), "want %v\ngot  %v", a.Reply(), got)
	}
	require.Equal(t, hits+3, b.cache.index.Counters.All()["hits"])
}

// A request is decided again after a change of anything that its answer depends on.
func TestChangedRequestIsNotAnsweredFromMemory(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, b *bench, r *request.Request){
		"other bytes of the model": func(t *testing.T, b *bench, r *request.Request) {
			require.NoError(t, os.WriteFile(r.Graph.Name(), compilertest.Dense(2, 8, 1), 0o644))
		},
		"an equal model of another time": func(t *testing.T, b *bench, r *request.Request) {
			now := time.Now().Add(-time.Hour)
			require.NoError(t, os.Chtimes(r.Graph.Name(), now, now))
		},
		"another library": func(t *testing.T, b *bench, _ *request.Request) { b.library("9.9.9") },
		"a library more": func(t *testing.T, b *bench, _ *request.Request) {
			path := filepath.Join(b.runtime, "libsdk.so")
			require.NoError(t, os.WriteFile(path, []byte("not a library"), 0o644))
		},
		"no build": func(t *testing.T, b *bench, _ *request.Request) {
			require.NoError(t, b.remove(&b.list()[0].Build))
		},
		"a damaged build": func(t *testing.T, b *bench, r *request.Request) {
			path := b.blob(b.acquire(r))
			require.NoError(t, os.Chmod(path, 0o644))
			require.NoError(t, os.WriteFile(path, []byte("damage"), 0o644))
		},
		"other settings of options": func(t *testing.T, b *bench, _ *request.Request) {
			b.reload(func(o *Options) { o.AllowOptions = []string{"session/session.unheard_of"} })
		},
		"a build that gets too old": func(t *testing.T, b *bench, r *request.Request) {
			b.reload(func(o *Options) {
				o.Policies = map[string]request.Policy{"": {MaxAge: time.Hour}}
			})
			b.acquire(r)
			require.NotNil(t, b.fromMemory(r))
			b.later.Add(int64(2 * time.Hour))
		},
		"another user": func(t *testing.T, b *bench, r *request.Request) { r.Peer.UID++ },
		"another option": func(t *testing.T, b *bench, r *request.Request) {
			r.SessionOptions = map[string]string{"session.unheard_of": "1"}
		},
		"nothing looked up": func(t *testing.T, b *bench, r *request.Request) {
			r.OnMiss = request.Refresh
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, r := rememberedRequest(t)
			require.NotNil(t, b.fromMemory(r))
			change(t, b, r)
			require.Nil(t, b.fromMemory(r))
		})
	}
}

// A file that has just been written may be written again without a new time.
func TestFreshFilesAreNotRemembered(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	b.acquire(r)
	require.Empty(t, b.repetition(r))
	b.later.Store(int64(time.Minute))
	require.NotEmpty(t, b.repetition(r))
}

// A stored compiled model is a hit without a plan. It is not remembered: its files decide.
func TestAHitWithoutAPlanIsNotRemembered(t *testing.T) {
	b := newBench(t)
	stored := b.acquire(b.request(b.model(1)))
	at := &request.Attempt{Request: &request.Request{Repetition: "again", Adopt: true}}
	hit := &request.Answer{Outcome: request.Hit, Build: stored.Build}
	b.cache.Repeats.remember(at, nil, hit)
	require.Nil(t, b.cache.Repeats.Answer(b.Context(), b.self(), "again", nil))
}
