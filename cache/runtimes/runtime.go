package runtimes

import (
	"cmp"
	"context"
	"errors"
	"sync/atomic"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// Runtime is one libonnxruntime with the EP libraries used with it, as it lies on this machine.
type Runtime struct {
	Name       string            // the directory, or the path of libonnxruntime where it was named one by one
	subject    string            // tells it from others of its name, which have other execution providers
	Registered bool              // by the administrator; others were named by a client of the daemon's own user
	spec       compilers.Runtime // as it was registered
	find       func() (compilers.Runtime, error)

	looking chan struct{}           // holds one token while the files are looked at again
	facts   atomic.Pointer[Content] // nil until looked at
	state   atomic.Pointer[string]
	pending atomic.Bool               // it is to be assessed
	due     atomic.Bool               // an assessment of what was found began, and none has come to its end since
	noticed atomic.Pointer[MachineID] // what a probe found changed last, though neither files nor machine did; nil: nothing
}

// on is the machine as it counts for this runtime: with what only a probe notices.
func (rt *Runtime) on(m MachineID) MachineID {
	if seen := rt.noticed.Load(); seen != nil {
		return blake3.Sum256(append(m[:], seen[:]...))
	}
	return m
}

// The states of a runtime.
var (
	stateReady    = "ready"
	stateChanging = "changing"
	stateUnusable = "unusable"
)

// Found returns the contents that were found last, nil before the runtime was looked at.
func (rt *Runtime) Found() *Content { return rt.facts.Load() }

// State returns "ready", "changing" or "unusable".
func (rt *Runtime) State() string { return *rt.state.Load() }

// close is called when the runtime is in the set no more. Requests that have it may go on with it.
func (rt *Runtime) close() {
	if rc := rt.Found(); rc != nil {
		rc.folders.close()
	}
}

func newRuntime(name string, registered bool, find func() (compilers.Runtime, error)) *Runtime {
	rt := &Runtime{Name: name, subject: name, Registered: registered, find: find, looking: make(chan struct{}, 1)}
	rt.state.Store(&stateReady)
	return rt
}

// Content returns the runtime as it is now. It looks again, or blocks, while its files change.
func (s *Set) Content(ctx context.Context, rt *Runtime, progress func(string)) (*Content, error) {
	if rc := rt.Found(); rc != nil && s.holds(rc) {
		return rc, nil
	}
	progress("probing")
	select {
	case rt.looking <- struct{}{}:
		defer func() { <-rt.looking }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	before := rt.Found()
	if before != nil && s.holds(before) {
		return before, nil
	}
	if before != nil && !before.intact() {
		s.changing(rt)
	}
	rc, err := s.look(ctx, rt, before)
	if err != nil {
		return nil, s.lost(ctx, rt, before, err)
	}
	s.found(rt, before, rc)
	return rc, nil
}

func (s *Set) holds(rc *Content) bool {
	return rc.Machine == rc.now() && rc.folders.unchanged()
}

func (s *Set) changing(rt *Runtime) {
	if rt.state.CompareAndSwap(&stateReady, &stateChanging) {
		s.options.Event(index.Event{Kind: event.Changing, Runtime: rt.Name, Text: "its files are being changed"})
	}
}

func (s *Set) lost(ctx context.Context, rt *Runtime, before *Content, err error) error {
	if ctx.Err() != nil {
		return err
	}
	if !rt.Registered && before == nil {
		s.forget(rt) // it never worked, and the client that brought it will name it again
	}
	if was := rt.state.Swap(&stateUnusable); was != &stateUnusable {
		s.log.Warn("runtime cannot be used", "runtime", rt.Name, "error", err)
		s.options.Event(index.Event{Kind: event.Unusable, Runtime: rt.Name, Text: err.Error()})
	}
	return apierr.New(apierr.Unavailable, err, "runtime %q cannot be used", rt.Name)
}

func (s *Set) found(rt *Runtime, before, rc *Content) {
	rt.facts.Store(rc)
	if before != nil {
		before.folders.close()
	}
	if !s.Has(rt) {
		rt.close() // it was forgotten while it was looked at
	}
	rt.state.Store(&stateReady)
	s.watch(rt, rc)
	if before == nil || !before.Same(rc) {
		if before != nil {
			s.log.Info("runtime changed", "runtime", rt.Name)
			before.past.Store(true)
		}
		s.changed(rt)
	} else if rt.due.Load() {
		s.changed(rt) // the same libraries as before, but they moved while they were assessed
	}
}

// Attempts and pause while a package manager is at work on a runtime's files.
const (
	lookAttempts = 20
	lookPause    = 250 * time.Millisecond
	lookPatience = 30 * time.Second // for files that are whole each time one looks, and other ones
)

// ErrMoving says that a runtime's files did not come to rest, or changed while they were used.
var ErrMoving = errors.New("its files keep changing")

// look identifies the runtime's libraries. Stamps are taken before and after the bytes are hashed.
// While they differ, a package manager is writing, and the bytes are of no library. Where there was something
// before, the files must have come to rest as well: half of an update may look like a whole runtime.
func (s *Set) look(ctx context.Context, rt *Runtime, before *Content) (*Content, error) {
	began := time.Now()
	patient := before != nil && rt.state.Load() != &stateUnusable // it was here a moment ago, and will be again
	for attempt := 0; ; {
		rc, err := s.lookOnce(ctx, rt)
		pause := lookPause
		settled := err == nil && rc.folders.unchanged()
		if settled {
			if pause = s.unrest(rc, before); pause <= 0 {
				return rc, nil
			}
		}
		if err == nil {
			rc.folders.close()
		}
		if !settled {
			attempt++
		}
		if attempt == lookAttempts || time.Since(began) > lookPatience {
			return nil, cmp.Or(err, ErrMoving)
		}
		if err != nil && !errors.Is(err, ErrMoving) && !patient {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause):
		}
	}
}

// unrest is how long the files must still be at rest before they are believed to be all there.
func (s *Set) unrest(rc, before *Content) time.Duration {
	if before == nil || before.Same(rc) {
		return 0
	}
	since := time.Since(rc.newest())
	if since < 0 {
		return 0 // times from the future say nothing
	}
	return s.options.Quiet - since
}
