package unixsock

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// serveUsers serves other users too; root is an administrator.
func serveUsers(t *testing.T, backend *standIn, own limits, owner func(uint32) uint32) *served {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root can connect as other users")
	}
	s := serve(t, backend, own, func(s *Server) {
		s.Owner, s.Administrator = owner, func(p Peer) bool { return p.UID == 0 }
	})
	require.NoError(t, os.Chmod(filepath.Dir(s.path), 0o711))
	require.NoError(t, os.Chmod(s.path, 0o666))
	return s
}

// dialAs connects as a user: the kernel reports to the daemon the uid of the connecting thread.
func dialAs(t *testing.T, s *served, uid int) (c *Client, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with its uid
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid),
			^uintptr(0)); errno != 0 {
			err = fmt.Errorf("become uid %d: %w", uid, errno)
			return
		}
		c, err = Dial(background(t), s.path)
	}()
	<-done
	if err == nil {
		require.EqualValues(t, uid, c.Hello().Uid)
		t.Cleanup(func() { c.Close() })
	}
	return c, err
}

// connectAll connects as a user until the daemon refuses.
func connectAll(t *testing.T, s *served, uid int) (all []*Client) {
	t.Helper()
	for {
		c, err := dialAs(t, s, uid)
		if err != nil {
			require.ErrorIs(t, err, ErrBusy)
			return all
		}
		all = append(all, c)
	}
}

// waits has a request of the client's under way until the test ends.
func waits(t *testing.T, s *served, c *Client) {
	t.Helper()
	before, ctx, f := s.backend.calls.Load(), t.Context(), modelFile(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _, _ = c.Acquire(ctx, acquireModel(), []*os.File{f}, nil, nil) // ends with the test
	}()
	t.Cleanup(func() { <-done }) // before the file is closed
	require.Eventually(t, func() bool { return s.backend.calls.Load() > before }, patience,
		time.Millisecond)
}

func alive(t *testing.T, c *Client) bool {
	t.Helper()
	_, err := Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
	if err != nil {
		require.True(t, ConnectionEnded(err),
			"the daemon gives no reason, so that clients connect again: %v", err)
	}
	return err == nil
}

func TestNoUsersTakeAllConnections(t *testing.T) {
	s := serveUsers(t, &standIn{acquire: waitForEnd},
		limits{Connections: 64, ConnectionsPerUID: 16, RefusalDelay: time.Millisecond}, nil)
	for uid := 5001; uid < 5017; uid++ {
		all := connectAll(t, s, uid)
		require.NotEmpty(t, all, "a user who comes later has some too")
		for _, c := range all {
			waits(t, s, c)
		}
	}
	for uid := 5017; s.Connections() < 63; uid++ {
		c, err := dialAs(t, s, uid)
		require.NoError(t, err)
		waits(t, s, c)
	}
	_, err := dialAs(t, s, 6000)
	require.ErrorIs(t, err, ErrBusy)
	require.ErrorContains(t, err, "all users together have 63 connections, of at most 64")
	c, err := dialAs(t, s, 0)
	require.NoError(t, err, "an administrator has a connection in reserve")
	require.True(t, alive(t, c))
}

func TestTheLongestIdleConnectionIsClosed(t *testing.T) {
	backend := &standIn{}
	backend.acquire = func(ctx context.Context, _ Peer, a *wire.Acquire, _ []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		if a.OnMiss == wire.OnMiss_CLAIM {
			return Answer{Reply: &wire.AcquireReply{Outcome: "claim",
				Claim: &wire.Claim{Id: "c", DeadlineMs: 1e6}}}, nil
		}
		return waitForEnd(ctx, Peer{}, a, nil, nil)
	}
	s := serveUsers(t, backend, limits{Connections: 48, RefusalDelay: time.Millisecond}, nil)
	many := connectAll(t, s, 5001)
	require.Len(t, many, 6)
	subscriber, claimant, waiter, first, second, third := many[0], many[1], many[2], many[4],
		many[3], many[5]
	go func() { _ = subscriber.Subscribe(t.Context(), func(*wire.Event) error { return nil }) }()
	require.Eventually(t, func() bool { return backend.subscribed.Load() == 1 }, patience,
		time.Millisecond)
	claim := proto.CloneOf(acquireModel())
	claim.OnMiss = wire.OnMiss_CLAIM
	_, _, err := claimant.Acquire(background(t), claim, []*os.File{modelFile(t)}, nil, nil)
	require.NoError(t, err)
	waits(t, s, waiter)
	for _, c := range []*Client{first, second, third} {
		require.True(t, alive(t, c))
	}

	others := connectAll(t, s, 5002)
	require.Len(t, others, 6, "as many as the first user had")
	require.False(t, alive(t, first))
	for _, c := range append(others, subscriber, claimant, waiter, second, third) {
		require.True(t, alive(t, c))
	}
}

func TestUidsOfOneOwnerShareLimits(t *testing.T) {
	s := serveUsers(t, &standIn{}, limits{ConnectionsPerUID: 2, RefusalDelay: time.Millisecond},
		func(uid uint32) uint32 {
			if uid >= 100_000 {
				return 5001
			}
			return 0 // a range of root's is not root
		})
	for _, uid := range []int{100_001, 165_535} {
		_, err := dialAs(t, s, uid)
		require.NoError(t, err)
	}
	_, err := dialAs(t, s, 100_002)
	require.ErrorIs(t, err, ErrBusy)
	require.ErrorContains(t, err, "this user has 2 connections")
	require.Len(t, connectAll(t, s, 5002), 2)
	_, err = dialAs(t, s, 0)
	require.NoError(t, err)
}

// A frame that is no request is read in a slot of its user, too.
func TestFramesOfAUserTakeTurns(t *testing.T) {
	s := serve(t, &standIn{}, limits{RunningPerUID: 1})
	c := rawHello(t, s)
	var slots *requestSlots
	s.mu.Lock()
	for _, u := range s.users {
		slots = u.slots
	}
	s.mu.Unlock()
	slot := slots.take(background(t), nil)
	c.write(framed(&wire.Envelope{Body: &wire.Envelope_Cancel{Cancel: &wire.Cancel{}}}))
	require.NoError(t, c.conn.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	_, err := c.conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded, "nothing is read without a slot")
	require.NoError(t, c.conn.SetReadDeadline(time.Time{}))
	slots.end(slot)
	answer, _ := c.read()
	require.Contains(t, answer.GetError().GetText(), "request number 0")
}

// A client that has too many connections is refused late, and delays no other.
func TestRefusalsWait(t *testing.T) {
	s := serveUsers(t, &standIn{}, limits{ConnectionsPerUID: 1, RefusalDelay: time.Hour}, nil)
	_, err := dialAs(t, s, 5001)
	require.NoError(t, err)
	refused := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := dialAs(t, s, 5001)
			refused <- err
		}()
	}
	s.init() // so that its fields can be read
	// the other one is being waited for
	require.Eventually(t, func() bool { return len(s.refusals) == 1 }, patience, time.Millisecond)
	_, err = dialAs(t, s, 5002)
	require.NoError(t, err)
	require.Empty(t, refused)
	s.stop()
	require.ErrorIs(t, <-refused, ErrBusy)
	require.ErrorIs(t, <-refused, ErrBusy)
	require.Empty(t, s.refusals)
}

func TestUnfinishedFramesOfOneUser(t *testing.T) {
	s := serve(t, &standIn{}, limits{FrameBytesPerUID: 256 << 10})
	half := append([]byte{0, 0, 16, 0}, make([]byte, 100<<10)...)
	one, other := rawHello(t, s), rawHello(t, s)
	one.write(half)
	require.Eventually(t, func() bool { return s.frameBytes() == 128<<10 }, patience,
		time.Millisecond)
	other.write(half)
	require.Eventually(t, func() bool { return s.frameBytes() == 256<<10 }, patience,
		time.Millisecond)
	_ = other.tryWrite(half) // the daemon may have closed it already
	e := other.readEnd()
	require.Equal(t, wire.ErrorClass_BUSY, e.GetClass())
	require.Contains(t, e.GetText(), "large frames of this user")
	require.Eventually(t, func() bool { return s.frameBytes() == 128<<10 }, patience,
		time.Millisecond)
	require.NoError(t, one.conn.Close())
	require.Eventually(t, func() bool { return s.frameBytes() == 0 }, patience, time.Millisecond)
}

func (s *Server) frameBytes() (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range s.users {
		n += u.frameBytes.Load()
	}
	return n
}

func TestRequestsOfOneUser(t *testing.T) {
	s := serve(t, &standIn{acquire: waitForEnd}, limits{RequestBytesPerUID: 4 * requestBytes})
	f := modelFile(t)
	for i := range 3 {
		rawHello(t, s).write(acquireFrame(1, 1), int(f.Fd()))
		require.Eventually(t, func() bool { return s.backend.calls.Load() == int64(i+1) }, patience,
			time.Millisecond)
	}
	c := rawHello(t, s)
	c.write(acquireFrame(1, 1), int(f.Fd()))
	e, _ := c.read()
	require.Equal(t, wire.ErrorClass_BUSY, e.GetError().GetClass())
}

// A request that waits keeps no other one of its user from running.
func TestSlowRequestsPassTheirSlotOn(t *testing.T) {
	s := serve(t, &standIn{acquire: waitForEnd}, limits{RunningPerUID: 1})
	f := modelFile(t)
	for i := range 8 { // on a connection of their own, and behind another one on the same
		c := rawHello(t, s)
		c.write(append(acquireFrame(1, 1), acquireFrame(2, 0)...), int(f.Fd()))
		require.Eventually(t, func() bool { return s.backend.calls.Load() == int64(i+1) }, patience,
			time.Millisecond)
		c.write(statusFrame(3))
		for number := uint64(0); number != 3; {
			e, _ := c.read()
			number = e.GetRequest()
		}
	}
}

func TestRequestSlots(t *testing.T) {
	all := newRequestSlots(2, new(atomic.Bool))
	first, second := all.take(t.Context(), nil), all.take(t.Context(), nil)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.Nil(t, all.take(ended, nil).requestSlot, "two run")
	require.True(t, all.end(heldSlot{}), "a request without a slot keeps its reader")

	require.True(t, all.end(second))
	third := all.take(t.Context(), nil)
	require.False(t, all.end(second), "a released slot is another request's by now")
	require.True(t, all.passOnSlow(), "the first look")
	require.True(t, all.end(third))
	fourth := all.take(t.Context(), nil)
	require.True(t, all.passOnSlow())
	require.False(t, all.end(first), "the first request ran at two looks")
	require.True(t, all.end(fourth), "the fourth ran at one")
	require.False(t, all.passOnSlow())
}

// A user with more requests than slots leaves processor time to others as long as they are served.
func TestAFloodRestsWhileOtherUsersAreServed(t *testing.T) {
	var busy atomic.Int64 // nanoseconds in which the flood's requests ran
	s := serveUsers(t, &standIn{status: func(context.Context) (*wire.StatusReply, error) {
		began := time.Now()
		time.Sleep(300 * time.Microsecond)
		busy.Add(int64(time.Since(began)))
		return &wire.StatusReply{}, nil
	}}, limits{RunningPerUID: 1}, func(uid uint32) uint32 { return uid })
	ctx, end := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer end()
	for range 8 {
		c, err := dialAs(t, s, 4001)
		require.NoError(t, err)
		all.Go(func() {
			for ctx.Err() == nil {
				_, _ = Ask[wire.StatusReply](ctx, c, &wire.Status{}, nil) // fails at the end
			}
		})
	}
	share := func() float64 {
		began, before := time.Now(), busy.Load()
		time.Sleep(400 * time.Millisecond)
		return float64(busy.Load()-before) / float64(time.Since(began))
	}
	alone := func() bool { return share() > 0.3 }
	require.Eventually(t, alone, patience, time.Millisecond)
	other, err := dialAs(t, s, 4002)
	require.NoError(t, err)
	_, _, err = other.Acquire(background(t), acquireModel(), []*os.File{modelFile(t)}, nil, nil)
	require.NoError(t, err)
	require.Less(t, share(), 0.25)
	require.Eventually(t, alone, patience, time.Millisecond, "the other user is served no more")
}
