package unixsock

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// A deadline counts time in which this process does not run, in which an answer may have come.
func TestFrameThatCameBeforeTheDeadlineIsReadAfterIt(t *testing.T) {
	c := rawDial(t, serve(t, &standIn{}, limits{}))
	hello := &wire.Envelope_Hello{Hello: &wire.Hello{Version: Version}}
	c.write(framed(&wire.Envelope{Body: hello}))
	require.Eventually(t, func() bool {
		require.NoError(t, c.conn.SetReadDeadline(time.Unix(1, 0)))
		c.stream.late = true
		payload, _, err := c.stream.frame(0)
		if err != nil {
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		}
		return payload != nil
	}, patience, time.Millisecond)
}

func TestAnswerThatCameBeforeTheDeadlineIsTaken(t *testing.T) {
	asked, ctx := make(chan struct{}), background(t)
	s := serve(t, &standIn{acquire: func(context.Context, Peer, *wire.Acquire, []*os.File,
		func(*wire.Progress)) (Answer, error) {
		close(asked)
		time.Sleep(100 * time.Millisecond) // until a goroutine reads for the caller
		return Answer{}, &Error{Class: wire.ErrorClass_NOT_FOUND, Text: "none"}
	}}, limits{})
	c := dial(t, s)
	limited, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	go func() { // its reader cannot hand the answer over before the limit
		<-asked
		time.Sleep(50 * time.Millisecond)
		c.mu.Lock()
		<-limited.Done()
		time.Sleep(10 * time.Millisecond)
		c.mu.Unlock()
	}()
	_, _, err := c.Acquire(limited, acquireModel(), []*os.File{modelFile(t)}, nil, nil)
	require.ErrorContains(t, err, "none")
}
