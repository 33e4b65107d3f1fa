package query

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/unixsock/wire"
)

// A search for neighbours looks at all builds, so few run at a time. An explanation does not wait
// long for one.
func TestExplanationsDoNotWaitForOthersSearches(t *testing.T) {
	q := &Queries{searches: make(chan struct{}, maxSearches)}
	for range maxSearches {
		q.searches <- struct{}{}
	}
	out := &wire.Explanation{}
	require.NoError(t, q.addNeighbours(t.Context(), out, &ExplainRequest{Record: "{}"}))
	require.Empty(t, out.Neighbours)
}

// One explanation of each user is made at a time, and a few in all.
func TestFewExplanationsAtATime(t *testing.T) {
	e := &explainSlots{slots: make(keyed.Slots, maxExplaining)}
	waits := func(user uint32) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := e.enter(ctx, user, "m.onnx")
		require.Equal(t, apierr.Deadline, apierr.ClassOf(err))
	}
	enter := func(user uint32) (leave func()) {
		t.Helper()
		leave, err := e.enter(t.Context(), user, "m.onnx")
		require.NoError(t, err)
		return leave
	}
	var leave []func()
	for user := range uint32(maxExplaining) {
		leave = append(leave, enter(user))
	}
	waits(maxExplaining)
	leave[0]()
	waits(1)
	again := enter(0)
	waits(0)
	again()
	for _, one := range leave[1:] {
		one()
	}
	enter(1)()
}

func TestDifferencesAreText(t *testing.T) {
	bad := "not \xff text"
	_, err := proto.Marshal(&wire.Candidate{
		Differences: differencesReply([]identity.Difference{{Asked: bad, Found: bad}})})
	require.NoError(t, err)
}
