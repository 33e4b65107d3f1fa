package unixsock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// Server answers requests on Unix sockets. Set the exported fields, then call Serve, and do not
// change them after.
type Server struct {
	Backend Backend      // answers the requests
	Name    string       // for HelloReply: "epcached 0.1.0"
	Log     *slog.Logger // nil: silent

	// Errors converts errors of the backend to *Error or *NeedError; nil: they are already.
	Errors func(error) error

	// Owner returns the user for the limits of a uid; nil: the uid itself.
	Owner func(uid uint32) uint32
	// Administrator reports whether the peer may use the reserved connections; nil: no peer. Owner
	// and Administrator are not called while RefuseAll is in effect.
	Administrator func(Peer) bool

	initOnce sync.Once
	limits   limits          // zero: the default; tests bring others
	base     context.Context // ends every connection
	stop     context.CancelFunc
	serving  context.Context // ends before base, when no new requests are accepted
	drain    context.CancelFunc
	running  sync.WaitGroup // connections, and goroutines that wait for their unread answers

	overseer overseer
	gates    [2]gates              // of users, and of administrators
	crowded  atomic.Bool           // several users are served; set by the overseer
	slow     atomic.Int64          // requests of all users with files that may never answer
	refusals chan refusal          // connections that wait for their refusal
	refusal  atomic.Pointer[Error] // the answer to every request; nil: the backend answers

	mu        sync.Mutex // guards the fields below; taken last
	listeners map[net.Listener]struct{}
	users     map[account]*user
	total     int
	accepted  uint64
	stopped   bool
}

// account identifies the user that limits apply to: all uids of one owner together, but
// administrators separately, because root may own the uids of containers.
type account struct {
	owner         uint32
	administrator bool
}

type user struct {
	account
	requestBytes, frameBytes, descriptors, unread, subscriptions, slow atomic.Int64

	used        atomic.Int64 // UnixNano of its last connection, descriptors or request
	slots       *requestSlots
	hellos      pace
	connections map[*connection]struct{} // guarded by Server.mu
}

func (s *Server) init() {
	s.initOnce.Do(func() {
		if s.limits == (limits{}) {
			s.limits = defaultLimits
		}
		s.base, s.stop = context.WithCancel(context.Background())
		s.serving, s.drain = context.WithCancel(s.base)
		s.listeners = make(map[net.Listener]struct{})
		s.refusals = make(chan refusal, maxRefusals)
		s.users = make(map[account]*user)
		s.overseer.wake, s.overseer.hasten = make(chan struct{}, 1), make(chan struct{}, 1)
		s.gates = [2]gates{newGates(), newGates()}
		if s.Log == nil {
			s.Log = slog.New(slog.DiscardHandler)
		}
		if s.Errors == nil {
			s.Errors = func(err error) error { return err }
		}
		if s.Owner == nil {
			s.Owner = func(uid uint32) uint32 { return uid }
		}
		if s.Administrator == nil {
			s.Administrator = func(Peer) bool { return false }
		}
	})
}

// Serve accepts and answers until the context ends, which cancels the requests in flight, or
// Shutdown is called; then it returns nil after its last goroutine has ended. It closes the
// listener, which may come from Listen or from socket activation. Serve may run for several
// listeners at the same time.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	s.init()
	s.mu.Lock()
	s.listeners[l] = struct{}{}
	s.mu.Unlock()
	s.overseer.start.Do(func() {
		s.running.Go(s.oversee)
		s.running.Go(s.refuseLater)
	})
	end := context.AfterFunc(ctx, func() {
		s.drain()
		s.closeListeners()
		s.stop()
	})
	defer end()
	if s.draining() {
		s.closeListeners()
	}
	err := s.accept(l)
	s.closeListeners()
	if !s.draining() {
		s.stop() // the listener failed, so end the connections too
	}
	s.running.Wait()
	s.refuseRest()
	return err
}

func (s *Server) accept(l net.Listener) error {
	pause := 5 * time.Millisecond
	for {
		conn, err := l.Accept()
		switch {
		case err == nil:
			pause = 5 * time.Millisecond
			s.admit(conn)
		case s.draining():
			return nil
		case tryAgain(err):
			s.Log.Warn("accept", "error", err)
			select {
			case <-time.After(pause):
			case <-s.base.Done():
			}
			pause = min(2*pause, time.Second)
		default:
			return err
		}
	}
}

// Shutdown stops accepting and lets requests in flight finish until the context ends, then cancels
// them. In the meantime it answers new requests with class BUSY. It returns after the last
// connection is closed, with the context's error if it had to cancel.
func (s *Server) Shutdown(ctx context.Context) error {
	s.init()
	s.drain()
	s.closeListeners()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	var err error
	for err == nil && s.busy() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	s.stop()
	s.running.Wait()
	return err
}

// RefuseAll answers every request with err: those under way, which it cancels, and new ones. New
// connections get err instead of a HelloReply. With nil the backend answers again.
func (s *Server) RefuseAll(err *Error) {
	s.refusal.Store(err)
	if err == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range s.users {
		for c := range u.connections {
			c.cancelRequests()
		}
	}
}

// refused returns the error of RefuseAll, or nil.
func (s *Server) refused() error {
	if err := s.refusal.Load(); err != nil {
		return err
	}
	return nil
}

func (s *Server) closeListeners() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l := range s.listeners {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			s.Log.Warn("close listener", "error", err)
		}
		delete(s.listeners, l)
	}
}

func (s *Server) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range s.users {
		for c := range u.connections {
			if c.inFlight.Load() > 0 {
				return true
			}
		}
	}
	return false
}

func (s *Server) draining() bool { return s.serving.Err() != nil }

// Connections returns the number of clients.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}

// Accepted returns the number of clients since the start.
func (s *Server) Accepted() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accepted
}

// StopIfUnused stops accepting if there is no client, and reports whether it did; Serve then
// returns. It disconnects a client that connects at this moment without an answer.
func (s *Server) StopIfUnused() bool {
	s.init()
	s.mu.Lock()
	if s.total > 0 {
		s.mu.Unlock()
		return false
	}
	s.stopped = true
	s.mu.Unlock()
	s.drain()
	s.closeListeners()
	s.stop()
	return true
}

// admit starts a connection, or refuses it where there are too many.
func (s *Server) admit(accepted net.Conn) {
	c, err := s.newConnection(accepted)
	if err != nil {
		s.Log.Warn("connection", "error", err)
		if closeErr := accepted.Close(); closeErr != nil {
			s.Log.Warn("close connection", "error", closeErr)
		}
		return
	}
	switch err := s.register(c); {
	case errors.Is(err, errStopped):
		c.closeSilently()
		return
	case err != nil:
		if s.refused() == nil { // otherwise all requests are refused
			s.Log.Warn("connection refused", "uid", c.peer.UID, "pid", c.peer.PID, "error", err)
		}
		s.refuse(c, err)
		return
	}
	go func() {
		defer s.running.Done()
		c.serve()
		c.closeAfterRead()
		s.unregister(c)
	}()
}

// refuse delays the refusal of a client, because a client that reconnects repeatedly would take
// processor time from other users.
func (s *Server) refuse(c *connection, err error) {
	if s.draining() || !errors.Is(err, ErrBusy) {
		c.refuse(err)
		return
	}
	select {
	case s.refusals <- refusal{c, err, time.Now().Add(s.limits.RefusalDelay)}:
	default:
		c.refuse(err)
	}
}

// refusal is for a connection that waits for it.
type refusal struct {
	*connection
	reason error
	at     time.Time
}

// refuseLater sends delayed refusals until the server stops. It is one goroutine, because hundreds
// of ready goroutines would delay other users' requests.
func (s *Server) refuseLater() {
	for {
		select {
		case r := <-s.refusals:
			select {
			case <-time.After(time.Until(r.at)):
			case <-s.serving.Done():
			}
			r.refuse(r.reason)
		case <-s.base.Done():
			return
		}
	}
}

func (s *Server) refuseRest() {
	for {
		select {
		case r := <-s.refusals:
			r.refuse(r.reason)
		default:
			return
		}
	}
}

var errStopped = errors.New("the daemon stops")

func (s *Server) register(c *connection) error {
	err := s.refused()
	if err == nil {
		c.account = account{c.peer.UID, s.Administrator(c.peer)}
		if !c.account.administrator {
			c.account.owner = s.Owner(c.peer.UID)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.stopped:
		return errStopped
	case err != nil:
		return err
	case s.refused() != nil:
		return s.refused()
	case s.draining():
		return busy("the daemon is stopping", "")
	}
	u := s.users[c.account]
	if u == nil {
		u = &user{account: c.account, slots: newRequestSlots(s.limits.RunningPerUID, &s.crowded),
			connections: make(map[*connection]struct{})}
	}
	if err := s.checkUserConnections(u); err != nil {
		return err
	}
	s.users[c.account] = u
	u.connections[c] = struct{}{}
	c.user = u
	c.stream.charge = c.chargeFrames
	now := time.Now().UnixNano()
	c.used.Store(now)
	u.used.Store(now)
	s.total++
	s.accepted++
	s.running.Add(1)
	return nil
}

func busy(text, hint string) error {
	return &Error{Class: wire.ErrorClass_BUSY, Text: text, Hint: hint}
}

// checkUserConnections reports why a user may have no more connections. A user may have only a part
// of the free connections, so that a few users cannot take all. Beyond that it closes the
// connection that was idle for longest, of the user with most connections.
func (s *Server) checkUserConnections(u *user) error {
	own, free := len(u.connections), s.limits.Connections-s.total
	shared := free - s.limits.Connections/reservedShare
	switch {
	case own >= s.limits.ConnectionsPerUID:
		return busy(fmt.Sprintf("this user has %d connections, the most that one user may "+
			"have", own),
			"close connections that are not needed")
	case u.administrator && free > 0, own < (shared+freeShare-1)/freeShare:
		return nil
	}
	var most, idlest *connection
	now := time.Now()
	for _, other := range s.users {
		if len(other.connections) <= own || most != nil &&
			len(other.connections) <= len(most.user.connections) {
			continue
		}
		idlest = nil
		for c := range other.connections {
			if c.idle(now) && (idlest == nil || c.used.Load() < idlest.used.Load()) {
				idlest = c
			}
		}
		if idlest != nil {
			most = idlest
		}
	}
	if most == nil {
		return busy(fmt.Sprintf("all users together have %d connections, of at most "+
			"%d", s.total, s.limits.Connections),
			"try again later")
	}
	s.release(most)
	most.cancel()
	return nil
}

// release removes a connection from the total. It counts for its user until it has ended.
func (s *Server) release(c *connection) {
	if !c.released {
		c.released = true
		s.total--
	}
}

func (s *Server) unregister(c *connection) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(c.user.connections, c)
	// While other users are served the overseer deletes it later, because a user that reconnects
	// must not escape the pace of its Hellos.
	if !s.crowded.Load() {
		s.forget(c.user)
	}
	s.release(c)
}

// forget deletes a user without connections. A user with slow files stays, because their count
// would be lost. The caller holds mu.
func (s *Server) forget(u *user) {
	if len(u.connections) == 0 && u.slow.Load() == 0 {
		delete(s.users, u.account)
	}
}

// releaseRead releases the user's answers that were read in the meantime.
func (s *Server) releaseRead(u *user) {
	s.mu.Lock()
	connections := slices.Collect(maps.Keys(u.connections))
	s.mu.Unlock()
	for _, c := range connections {
		c.noteRead()
	}
}
