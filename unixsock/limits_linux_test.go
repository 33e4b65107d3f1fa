package unixsock

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

func TestRequestsInFlight(t *testing.T) {
	s := serve(t, &standIn{acquire: waitForEnd}, limits{Requests: 3})
	c, f := rawHello(t, s), modelFile(t)
	for i := range 4 {
		c.write(acquireFrame(uint64(i+1), 1), int(f.Fd()))
	}
	e, _ := c.read()
	require.EqualValues(t, 4, e.GetRequest())
	require.Equal(t, wire.ErrorClass_BUSY, e.GetError().GetClass())
	c.write(framed(&wire.Envelope{Request: 2, Body: &wire.Envelope_Cancel{Cancel: &wire.Cancel{}}}))
	e, _ = c.read()
	require.EqualValues(t, 2, e.GetRequest())
	require.Equal(t, wire.ErrorClass_CANCELLED, e.GetError().GetClass())
	require.Eventually(t, func() bool { // the place is free a moment after the answer
		c.write(statusFrame(5))
		e, _ := c.read()
		return e.GetStatusReply() != nil
	}, patience, time.Millisecond)
}

func TestRequestBytesOfOneUser(t *testing.T) {
	s := serve(t, &standIn{acquire: waitForEnd}, limits{RequestBytesPerUID: 1 << 20})
	one, other, f := rawHello(t, s), rawHello(t, s), modelFile(t)
	large := acquireModel()
	large.Model.Name = string(make([]byte, 600<<10))
	frame := framed(&wire.Envelope{Request: 1, Descriptors: 1,
		Body: &wire.Envelope_Acquire{Acquire: large}})
	one.write(frame, int(f.Fd()))
	require.Eventually(t, func() bool { return s.backend.calls.Load() == 1 }, patience,
		time.Millisecond)
	other.write(frame, int(f.Fd()))
	e, _ := other.read()
	require.Equal(t, wire.ErrorClass_BUSY, e.GetError().GetClass())
}

func TestDescriptorsOfOneUser(t *testing.T) {
	s := serve(t, &standIn{acquire: waitForEnd}, limits{DescriptorsPerUID: 10})
	c, f := rawHello(t, s), modelFile(t)
	c.write(acquireFrame(1, 8), many(f, 8)...)
	require.Eventually(t, func() bool { return s.backend.calls.Load() == 1 }, patience,
		time.Millisecond)
	c.write(acquireFrame(2, 8), many(f, 8)...)
	e, _ := c.read()
	require.Equal(t, wire.ErrorClass_BUSY, e.GetError().GetClass())
	c.write(framed(&wire.Envelope{Request: 3, Descriptors: 8,
		Body: &wire.Envelope_Attach{Attach: &wire.Attach{}}}), many(f, 8)...)
	require.Equal(t, wire.ErrorClass_BUSY, c.readEnd().GetClass(), "attached ones count as well")
}

func TestConnectionsOfOneUser(t *testing.T) {
	s := serve(t, &standIn{}, limits{ConnectionsPerUID: 2})
	dial(t, s)
	second, err := Dial(background(t), s.path)
	require.NoError(t, err)
	_, err = Dial(background(t), s.path)
	require.ErrorIs(t, err, ErrBusy)
	require.Equal(t, 2, s.Connections())
	require.NoError(t, second.Close())
	require.Eventually(t, func() bool { return s.Connections() == 1 }, patience, time.Millisecond)
	dial(t, s)
}

func TestConnectionsInAll(t *testing.T) {
	s := serve(t, &standIn{}, limits{Connections: 1})
	dial(t, s)
	_, err := Dial(background(t), s.path)
	require.ErrorIs(t, err, ErrBusy)
}

// Descriptors that were sent and not read count for the whole daemon in the kernel.
func TestUnreadAnswersWithDescriptors(t *testing.T) {
	s := serve(t, &standIn{}, limits{Unread: 8})
	c, f := rawHello(t, s), modelFile(t)
	for i := range 20 {
		c.write(acquireFrame(uint64(i+1), 1), int(f.Fd()))
	}
	require.Eventually(t, func() bool { return s.backend.calls.Load() == 20 }, patience,
		time.Millisecond)
	time.Sleep(50 * time.Millisecond) // for a ninth to be sent, if it were
	unread := s.unreadAnswers()
	require.EqualValues(t, 8, unread)
	for range 20 { // a client that reads gets all
		e, fds := c.read()
		require.NotNil(t, e.GetAcquireReply())
		closeAll(fds)
	}
}

func (s *Server) unreadAnswers() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := int64(0)
	for _, u := range s.users {
		n += u.unread.Load()
	}
	return n
}

func TestClientThatNeverReadsDescriptors(t *testing.T) {
	s := serve(t, &standIn{}, limits{Unread: 2, WriteTimeout: 100 * time.Millisecond})
	c, f := rawHello(t, s), modelFile(t)
	for i := range 3 {
		c.write(acquireFrame(uint64(i+1), 1), int(f.Fd()))
	}
	require.Eventually(t, func() bool { return s.backend.calls.Load() == 3 }, patience,
		time.Millisecond)
	require.Eventually(t, func() bool { return c.tryWrite(statusFrame(9)) != nil }, patience,
		5*time.Millisecond, "the daemon gives up")
	require.EqualValues(t, 2, s.unreadAnswers(), "and goes on counting what is under way")
	c.readEnd()
	require.Eventually(t, func() bool { return s.unreadAnswers() == 0 && s.Connections() == 0 },
		patience, time.Millisecond)
}

func TestUnreadAnswersOfOneUser(t *testing.T) {
	s := serve(t, &standIn{},
		limits{Unread: 2, UnreadPerUID: 3, WriteTimeout: 200 * time.Millisecond})
	f := modelFile(t)
	lazy := []*rawClient{rawHello(t, s), rawHello(t, s)}
	lazy[0].write(acquireFrame(1, 1), int(f.Fd()))
	lazy[0].write(acquireFrame(2, 1), int(f.Fd()))
	lazy[1].write(acquireFrame(1, 1), int(f.Fd()))
	require.Eventually(t, func() bool { return s.unreadAnswers() == 3 }, patience, time.Millisecond)

	c := dial(t, s)
	_, _, err := c.Acquire(background(t), acquireModel(), []*os.File{f}, nil, nil)
	require.ErrorIs(t, err, ErrBusy, "refused, not dropped: it is others who do not read")
	for range 2 {
		_, fds := lazy[0].read()
		closeAll(fds)
	}
	_, view, err := c.Acquire(background(t), acquireModel(), []*os.File{f}, nil, nil)
	require.NoError(t, err)
	require.NoError(t, view.Close())
}

func TestClientThatNeverReads(t *testing.T) {
	large := &wire.ListReply{Next: string(make([]byte, 900<<10))}
	s := serve(t,
		&standIn{list: func(context.Context, *wire.List) (*wire.ListReply, error) {
			return large,
				nil
		}}, limits{WriteTimeout: 100 * time.Millisecond})
	c := rawHello(t, s)
	require.Eventually(t, func() bool {
		frame := framed(&wire.Envelope{Request: uint64(time.Now().UnixNano()),
			Body: &wire.Envelope_List{List: &wire.List{}}})
		_ = c.conn.SetWriteDeadline(time.Now().Add(5 * time.Second))
		_, err := Ask[wire.StatusReply](background(t), dial(t, s), &wire.Status{}, nil)
		require.NoError(t, err, "others are served meanwhile")
		return c.tryWrite(frame) != nil
	}, patience, 5*time.Millisecond)
}
