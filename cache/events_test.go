package cache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

func (b *bench) events(p request.Peer) []*wire.Event {
	b.Helper()
	out, err := b.cache.Queries.Events(context.Background(), p, time.Time{}, 0)
	require.NoError(b, err)
	return out.Events
}

func (b *bench) self() request.Peer { return request.Peer{UID: b.cache.uid} }

// others is a request of another user, with a descriptor of a file that all may read.
func (b *bench) others(uid uint32, seed uint64) *request.Request {
	r := b.request(b.model(seed))
	r.Peer = request.Peer{UID: uid}
	return r
}

func kinds(events []*wire.Event) []string {
	var out []string
	for _, e := range events {
		out = append(out, e.Kind)
	}
	return out
}

// entryKinds leaves out what is of the machine.
func entryKinds(events []*wire.Event) []string {
	var out []*wire.Event
	for _, e := range events {
		if e.RequestKey != "" {
			out = append(out, e)
		}
	}
	return kinds(out)
}

func TestEventsOfABuildFromCompileToRemoval(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	b.acquire(b.request(b.model(1)))
	require.NoError(t, os.Remove(b.blob(a)))
	b.acquire(b.request(b.model(1)))
	_, err := b.cache.Remove(context.Background(), b.self(), nil, true, false)
	require.NoError(t, err)

	events := b.events(b.self())
	require.Equal(t,
		[]string{event.Compiled, event.Damaged, event.Compiled, event.Healed, event.Retracted,
			event.Retracted}, entryKinds(events))
	last := uint64(0)
	for _, e := range events {
		require.Greater(t, e.Sequence, last)
		last = e.Sequence
		if e.RequestKey == "" {
			continue
		}
		require.Equal(t, a.RequestKey.String(), e.RequestKey)
		require.Equal(t, a.Build.BuildKey.String(), e.Build, "also of builds that are gone")
		require.Equal(t, "model.onnx", e.Model)
	}
}

// blob is the path of the largest file of an answer's build in the store.
func (b *bench) blob(a *request.Answer) string {
	file := a.Build.Files[len(a.Build.Files)-1].Digest.String()
	found, err := filepath.Glob(filepath.Join(b.state, "objects", "*", "*"))
	require.NoError(b, err)
	for _, path := range found {
		if filepath.Base(path) == file || filepath.Base(filepath.Dir(path))+
			filepath.Base(path) == file {
			return path
		}
	}
	b.Fatalf("no blob %s among %v", file, found)
	return ""
}

func TestEventsOutliveTheDaemon(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	before := b.events(b.self())
	b.reopen()
	after := b.events(b.self())
	require.GreaterOrEqual(t, len(after), len(before))
	for i := range before {
		before[i].Sequence = 0
		require.True(t, proto.Equal(before[i], after[i]),
			"but for the sequence, which counts from the start: %v", after[i])
	}
}

func TestEventsReachOnlyUsersWhoMaySeeThem(t *testing.T) {
	b := newBench(t)
	alice, bob := request.Peer{UID: 2001}, request.Peer{UID: 2002}
	b.acquire(b.others(alice.UID, 1))
	private := b.others(alice.UID, 2)
	private.Store = "user"
	b.acquire(private)
	failing := b.others(bob.UID, 3)
	failing.EPs[0].Options = map[string]string{"fault": string(standin.Crash)}
	b.refused(failing)
	b.cache.Store.RecordEvent(index.Event{Kind: event.Probed, Runtime: "/opt/ort"})

	require.Equal(t, []string{event.Compiled, event.Compiled}, entryKinds(b.events(alice)))
	require.Equal(t, []string{event.Failed}, entryKinds(b.events(bob)))
	require.Equal(t, []string{event.Compiled, event.Compiled, event.Failed},
		entryKinds(b.events(b.self())))
	require.Contains(t, kinds(b.events(bob)), event.Probed, "the machine is everybody's")

	b.acquire(b.others(bob.UID, 1))
	require.Equal(t, []string{event.Compiled, event.Failed}, entryKinds(b.events(bob)),
		"who has the model may know")
}

func TestEventsAreBounded(t *testing.T) {
	b := newBench(t)
	start := b.cache.now()
	for i := range 50 {
		b.later.Store(int64(time.Duration(i) * time.Hour))
		b.cache.Store.RecordEvent(index.Event{Kind: event.Probed, Text: fmt.Sprint(i)})
	}
	newest, err := b.cache.Queries.Events(context.Background(), b.self(), time.Time{}, 3)
	require.NoError(t, err)
	require.Len(t, newest.Events, 3)
	require.Equal(t, []string{"47", "48", "49"},
		[]string{newest.Events[0].Text, newest.Events[1].Text, newest.Events[2].Text})
	late, err := b.cache.Queries.Events(context.Background(), b.self(),
		start.Add(48*time.Hour-time.Minute), 0)
	require.NoError(t, err)
	require.Len(t, late.Events, 2)
}

// subscribe listens until the test ends.
func (b *bench) subscribe(p request.Peer) <-chan *wire.Event {
	ctx, cancel := context.WithCancel(context.Background())
	out, done := make(chan *wire.Event, 100), make(chan error)
	end := b.cache.events.End()
	go func() {
		done <- b.cache.Queries.Subscribe(ctx, p, end,
			func(e *wire.Event) error { out <- e; return nil })
	}()
	b.Cleanup(func() {
		cancel()
		require.NoError(b, <-done)
	})
	return out
}

func TestSubscribersReceiveEventsAtOnce(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1))) // not theirs: before they came
	alice, all := b.subscribe(request.Peer{UID: 2001}), b.subscribe(b.self())
	b.acquire(b.request(b.model(2)))
	b.acquire(b.others(2001, 3))
	b.cache.Store.RecordEvent(index.Event{Kind: "end"})

	hear := func(from <-chan *wire.Event) (out []string) {
		for e := range from {
			if e.Kind == "end" {
				return out
			}
			if e.RequestKey != "" {
				out = append(out, e.Kind)
			}
		}
		return out
	}
	require.Equal(t, []string{event.Compiled, event.Compiled}, hear(all))
	require.Equal(t, []string{event.Compiled}, hear(alice))
}

func TestSlowSubscriberIsToldItMissedEvents(t *testing.T) {
	b := newBench(t)
	b.assessed(func(runtimes.Facts) bool { return true }) // nothing else happens from here on
	end := b.cache.events.End()
	for i := range 3 * query.MaxBehind {
		b.cache.Store.RecordEvent(index.Event{Kind: event.Probed, Text: fmt.Sprint(i)})
	}
	enough := errors.New("enough")
	var got []*wire.Event
	err := b.cache.Queries.Subscribe(context.Background(), b.self(), end,
		func(e *wire.Event) error {
			got = append(got, e)
			if e.Text == fmt.Sprint(3*query.MaxBehind-1) {
				return enough
			}
			return nil
		})
	require.ErrorIs(t, err, enough)
	require.Len(t, got, 1+query.MaxBehind)
	require.Equal(t, event.Missed, got[0].Kind)
	require.Zero(t, got[0].Sequence)
	require.Equal(t, fmt.Sprint(2*query.MaxBehind), got[1].Text)
}
