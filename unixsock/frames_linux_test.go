package unixsock

import (
	"context"
	"encoding/binary"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// A breach of the framing ends the connection with its reason, and nothing else: serve checks that
// no descriptor is left, and each case ends with another client being served.
func TestBrokenFrames(t *testing.T) {
	length := func(n uint32) []byte { return binary.LittleEndian.AppendUint32(nil, n) }
	cases := map[string]struct {
		send func(c *rawClient, f *os.File)
		text string
	}{
		"zero length": {func(c *rawClient, f *os.File) { c.write(length(0), int(f.Fd())) },
			"a frame of 0 bytes"},
		"one byte too long": {func(c *rawClient,
			f *os.File) {
			c.write(length(MaxFrame+1), int(f.Fd()))
		}, "a frame of 1048577 bytes"},
		"four gigabytes": {func(c *rawClient, f *os.File) { c.write(length(1<<32-1), int(f.Fd())) },
			"a frame of 4294967295 bytes"},
		"garbage": {func(c *rawClient, f *os.File) {
			c.write(append(length(5), 0xff, 0xff, 0xff, 0xff, 0xff), int(f.Fd()))
		}, "is not an envelope"},
		"a descriptor too few": {func(c *rawClient,
			f *os.File) {
			c.write(acquireFrame(1, 2), int(f.Fd()))
		}, "names 2 descriptors and 1 came"},
		"a descriptor too many": {func(c *rawClient,
			f *os.File) {
			c.write(acquireFrame(1, 1), many(f, 2)...)
		}, "names 1 descriptors and 2 came"},
		"descriptors not named": {func(c *rawClient,
			f *os.File) {
			c.write(statusFrame(1), int(f.Fd()))
		}, "names none"},
		"descriptors not there": {func(c *rawClient, f *os.File) { c.write(acquireFrame(1, 1)) },
			"none came with its first byte"},
		"descriptors for a request without": {func(c *rawClient, f *os.File) {
			c.write(framed(&wire.Envelope{Request: 1, Descriptors: 1,
				Body: &wire.Envelope_Status{Status: &wire.Status{}}}), int(f.Fd()))
		}, "takes none"},
		"65 descriptors": {func(c *rawClient,
			f *os.File) {
			c.write(acquireFrame(1, 64), many(f, 65)...)
		}, "more than 64 descriptors"},
		"65 descriptors named": {func(c *rawClient,
			f *os.File) {
			c.write(acquireFrame(1, 65), many(f, 64)...)
		}, "names 65 descriptors"},
		"descriptors with the second half": {func(c *rawClient, f *os.File) {
			frame := acquireFrame(1, 1)
			c.write(frame[:7])
			time.Sleep(20 * time.Millisecond) // so that the halves arrive as two
			c.write(frame[7:], int(f.Fd()))
		}, "none came with its first byte"},
		"request number 0": {func(c *rawClient,
			f *os.File) {
			c.write(acquireFrame(0, 1), int(f.Fd()))
		}, "request number 0"},
		"a second hello": {func(c *rawClient, f *os.File) {
			c.write(
				framed(&wire.Envelope{Body: &wire.Envelope_Hello{Hello: &wire.Hello{Version: 1}}}))
		}, "request number 0"},
		"too many attached": {func(c *rawClient, f *os.File) {
			for range MaxAttached/MaxDescriptors + 1 {
				frame := framed(&wire.Envelope{Request: 1, Descriptors: MaxDescriptors,
					Body: &wire.Envelope_Attach{Attach: &wire.Attach{}}})
				if c.tryWrite(frame, many(f, MaxDescriptors)...) != nil {
					return // the daemon has closed
				}
			}
		}, "more than 4096 descriptors"},
		"half a frame, then the end": {func(c *rawClient, f *os.File) {
			c.write(acquireFrame(1, 1)[:9], int(f.Fd()))
			require.NoError(c.t, c.conn.CloseWrite())
		}, ""},
		"half a frame, then nothing": {func(c *rawClient,
			f *os.File) {
			c.write(acquireFrame(1, 1)[:9], int(f.Fd()))
		}, ""},
		"half a length, then nothing": {func(c *rawClient,
			f *os.File) {
			c.write([]byte{9, 0}, int(f.Fd()))
		}, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var few limits
			// nothing more comes of a frame; the others come in pieces, and this process may be
			// held up between them
			if tc.text == "" {
				few.FrameTimeout = 100 * time.Millisecond
			}
			s := serve(t, &standIn{}, few)
			c := rawHello(t, s)
			tc.send(c, modelFile(t))
			refusal := c.readEnd()
			if tc.text == "" {
				require.Nil(t, refusal)
			} else {
				require.Contains(t, refusal.GetText(), tc.text)
				require.Equal(t, wire.ErrorClass_BAD_REQUEST, refusal.GetClass())
			}
			require.Zero(t, s.backend.calls.Load())
			_, err := Ask[wire.StatusReply](context.Background(), dial(t, s), &wire.Status{}, nil)
			require.NoError(t, err)
		})
	}
}

func TestRequestNumberInUse(t *testing.T) {
	s := serve(t, &standIn{acquire: waitForEnd}, limits{})
	c := rawHello(t, s)
	f := modelFile(t)
	c.write(acquireFrame(7, 1), int(f.Fd()))
	c.write(acquireFrame(7, 1), int(f.Fd()))
	require.Contains(t, c.readEnd().GetText(), "number 7 was used again")
}

func waitForEnd(ctx context.Context, _ Peer, _ *wire.Acquire, _ []*os.File,
	_ func(*wire.Progress)) (Answer, error) {
	<-ctx.Done()
	return Answer{}, ctx.Err()
}

func TestUnknownRequestLeavesTheConnection(t *testing.T) {
	s := serve(t, &standIn{}, limits{})
	c := rawHello(t, s)
	// request 3, an empty message under field 1012
	c.write([]byte{5, 0, 0, 0, 0x08, 3, 0xa2, 0x3f, 0})
	e, _ := c.read()
	require.EqualValues(t, 3, e.GetRequest())
	require.Equal(t, wire.ErrorClass_VERSION, e.GetError().GetClass())

	c.write(framed(&wire.Envelope{Request: 4,
		Body: &wire.Envelope_StatusReply{StatusReply: &wire.StatusReply{}}}))
	e, _ = c.read()
	require.Equal(t, wire.ErrorClass_BAD_REQUEST, e.GetError().GetClass(),
		"an answer is no request")

	c.write(statusFrame(5))
	e, _ = c.read()
	require.NotNil(t, e.GetStatusReply())
}

func TestFirstFrame(t *testing.T) {
	hello := func(e *wire.Envelope) []byte { return framed(e) }
	cases := map[string]struct {
		frame []byte
		class wire.ErrorClass
	}{
		"not hello": {statusFrame(1), wire.ErrorClass_BAD_REQUEST},
		"under a number": {hello(&wire.Envelope{Request: 1,
			Body: &wire.Envelope_Hello{Hello: &wire.Hello{Version: 1}}}),
			wire.ErrorClass_BAD_REQUEST},
		"without version": {hello(&wire.Envelope{Body: &wire.Envelope_Hello{Hello: &wire.Hello{}}}),
			wire.ErrorClass_VERSION},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := rawDial(t, serve(t, &standIn{}, limits{}))
			c.write(tc.frame)
			require.Equal(t, tc.class, c.readEnd().GetClass())
		})
	}
	t.Run("a newer client gets our version", func(t *testing.T) {
		c := rawDial(t, serve(t, &standIn{}, limits{}))
		c.write(
			hello(
				&wire.Envelope{Body: &wire.Envelope_Hello{Hello: &wire.Hello{Version: 9,
					Features: []string{"later"}}}}))
		e, _ := c.read()
		require.EqualValues(t, Version, e.GetHelloReply().GetVersion())
		require.EqualValues(t, os.Geteuid(), e.GetHelloReply().GetUid())
	})
	t.Run("none comes", func(t *testing.T) {
		c := rawDial(t, serve(t, &standIn{}, limits{HelloTimeout: 50 * time.Millisecond}))
		require.Nil(t, c.readEnd())
	})
	t.Run("byte by byte is too slow as well", func(t *testing.T) {
		c := rawDial(t, serve(t, &standIn{}, limits{HelloTimeout: 100 * time.Millisecond}))
		frame := hello(
			&wire.Envelope{Body: &wire.Envelope_Hello{Hello: &wire.Hello{Version: 1,
				Client: strings.Repeat("a client with a long name", 30)}}})
		for _, b := range frame {
			if c.tryWrite([]byte{b}) != nil {
				return // closed, as it should
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Fatal("the daemon waited for all of it")
	})
}

// Frames that arrive in any pieces are the same frames.
func TestPieces(t *testing.T) {
	s := serve(t, &standIn{}, limits{})
	c := rawHello(t, s)
	f := modelFile(t)
	two := append(statusFrame(1), acquireFrame(2, 1)...)
	c.write(two[:3])
	time.Sleep(5 * time.Millisecond)
	c.write(two[3:len(statusFrame(1))])
	c.write(acquireFrame(2, 1)[:1], int(f.Fd()))
	time.Sleep(5 * time.Millisecond)
	c.write(acquireFrame(2, 1)[1:])
	c.write(append(statusFrame(3), statusFrame(4)...))
	seen := map[uint64]bool{}
	for range 4 {
		e, fds := c.read()
		closeAll(fds)
		require.Nil(t, e.GetError())
		seen[e.GetRequest()] = true
	}
	require.Len(t, seen, 4)
}

func TestLargestFrame(t *testing.T) {
	s := serve(t, &standIn{}, limits{})
	c := dial(t, s)
	padded := acquireModel()
	padded.Model.Name = string(make([]byte, MaxFrame-200))
	_, view, err := c.Acquire(context.Background(), padded, []*os.File{modelFile(t)}, nil, nil)
	require.NoError(t, err)
	require.NoError(t, view.Close())

	padded.Model.Name = string(make([]byte, MaxFrame))
	_, _, err = c.Acquire(context.Background(), padded, []*os.File{modelFile(t)}, nil, nil)
	require.ErrorIs(t, err, ErrBadRequest)
	_, err = Ask[wire.StatusReply](context.Background(), c, &wire.Status{}, nil)
	require.NoError(t, err, "the connection is as good as before")
}
