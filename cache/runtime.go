package cache

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// runtime is one libonnxruntime with the EP libraries used with it, as it lies on this machine.
type runtime struct {
	name       string            // the directory, or the path of libonnxruntime where it was named one by one
	subject    string            // tells it from others of its name, which have other execution providers
	registered bool              // by the administrator; others were named by a client of the daemon's own user
	spec       compilers.Runtime // as it was registered
	find       func() (compilers.Runtime, error)

	looking chan struct{}                  // holds one token while the files are looked at anew
	facts   atomic.Pointer[runtimeContent] // nil until looked at
	state   atomic.Pointer[string]
	due     atomic.Bool                        // an assessment of what was found began, and none has come to its end since
	noticed atomic.Pointer[runtimes.MachineID] // what a probe found changed last, though neither files nor machine did; nil: nothing
}

// on is the machine as it counts for this runtime: with what only a probe notices.
func (rt *runtime) on(m runtimes.MachineID) runtimes.MachineID {
	if seen := rt.noticed.Load(); seen != nil {
		return digestOf(append(m[:], seen[:]...))
	}
	return m
}

// The states of a runtime, as Probe gives them.
var (
	stateReady    = "ready"
	stateChanging = "changing"
	stateUnusable = "unusable"
)

func newRuntime(name string, registered bool, find func() (compilers.Runtime, error)) *runtime {
	rt := &runtime{name: name, subject: name, registered: registered, find: find, looking: make(chan struct{}, 1)}
	rt.state.Store(&stateReady)
	return rt
}

// content gives the runtime as it is now, looking again if any of its files changed since.
func (c *Cache) content(ctx context.Context, rt *runtime, progress func(string)) (*runtimeContent, error) {
	if rc := rt.facts.Load(); rc != nil && c.holds(rc) {
		return rc, nil
	}
	progress("probing")
	select {
	case rt.looking <- struct{}{}:
		defer func() { <-rt.looking }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	before := rt.facts.Load()
	if before != nil && c.holds(before) {
		return before, nil
	}
	if before != nil && !before.intact() {
		c.changing(rt)
	}
	rc, err := c.look(ctx, rt, before)
	if err != nil {
		return nil, c.lost(ctx, rt, before, err)
	}
	c.found(rt, before, rc)
	return rc, nil
}

// holds tells whether the files and the machine are what they were.
func (c *Cache) holds(rc *runtimeContent) bool {
	return rc.machine == rc.now() && rc.unchanged()
}

// changing says once that a runtime's files are being replaced.
func (c *Cache) changing(rt *runtime) {
	if rt.state.CompareAndSwap(&stateReady, &stateChanging) {
		c.happened(Event{Kind: event.Changing, Runtime: rt.name, Text: "its files are being changed"})
	}
}

func (c *Cache) lost(ctx context.Context, rt *runtime, before *runtimeContent, err error) error {
	if ctx.Err() != nil {
		return err
	}
	if !rt.registered && before == nil {
		c.runtimes.forget(rt) // a client brought it, and it never worked: who brings it again names it again
	}
	if was := rt.state.Swap(&stateUnusable); was != &stateUnusable {
		c.log.Warn("runtime cannot be used", "runtime", rt.name, "error", err)
		c.happened(Event{Kind: event.Unusable, Runtime: rt.name, Text: err.Error()})
	}
	return apierr.New(apierr.Unavailable, err, "runtime %q cannot be used", rt.name)
}

// found puts what was found into the place of what was before.
func (c *Cache) found(rt *runtime, before, rc *runtimeContent) {
	rt.facts.Store(rc)
	rt.state.Store(&stateReady)
	c.watchRuntime(rt, rc)
	if before == nil || !before.same(rc) {
		if before != nil {
			c.log.Info("runtime changed", "runtime", rt.name)
			before.past.Store(true)
		}
		c.changes.add(rt)
	} else if rt.due.Load() {
		c.changes.add(rt) // the same libraries as before, but they moved while they were assessed
	}
}

// Attempts and pause while a package manager is at work on a runtime's files.
const (
	lookAttempts = 20
	lookPause    = 250 * time.Millisecond
	lookPatience = 30 * time.Second // for files that are whole each time one looks, and other ones
)

var errMoving = errors.New("its files keep changing")

// look identifies the runtime's libraries. Stamps are taken before and after the bytes are hashed; as long as
// they differ, somebody is writing, and what was read is nobody's library. Where there was something before, the
// files must have come to rest as well: half of an update may look like a whole runtime.
func (c *Cache) look(ctx context.Context, rt *runtime, before *runtimeContent) (*runtimeContent, error) {
	began := time.Now()
	patient := before != nil && rt.state.Load() != &stateUnusable // it was here a moment ago, and will be again
	for attempt := 0; ; {
		rc, err := c.lookOnce(ctx, rt)
		pause := lookPause
		if err == nil && rc.unchanged() {
			if pause = c.unrest(rc, before); pause <= 0 {
				return rc, nil
			}
		} else {
			attempt++
		}
		if attempt == lookAttempts || time.Since(began) > lookPatience {
			return nil, cmp.Or(err, errMoving)
		}
		if err != nil && !errors.Is(err, errMoving) && !patient {
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
func (c *Cache) unrest(rc, before *runtimeContent) time.Duration {
	if before == nil || before.same(rc) {
		return 0
	}
	since := time.Since(rc.newest())
	if since < 0 {
		return 0 // times from the future say nothing
	}
	return c.options.Quiet - since
}

// register is what the administrator named, in order, and what own clients brought.
type register struct {
	mu   sync.Mutex
	list []*runtime // registered ones first; guarded by mu
}

// maxNamedRuntimes bounds what clients can bring; the oldest goes first.
const maxNamedRuntimes = 64

func directoryRuntime(dir string, registered bool) *runtime {
	return newRuntime(dir, registered, func() (compilers.Runtime, error) { return compilers.Find(dir) })
}

// explicitRuntime is a runtime that was given library by library.
func explicitRuntime(spec compilers.Runtime, registered bool) *runtime {
	rt := newRuntime(spec.ORTLibrary, registered, func() (compilers.Runtime, error) { return compilers.Complete(spec) })
	for _, l := range spec.EPs {
		rt.subject += " " + l.EP + "=" + l.Path
	}
	if spec.ORTVersion != "" {
		rt.subject += " " + spec.ORTVersion // as a client says; the file may be another by now
	}
	return rt
}

func registeredRuntime(spec compilers.Runtime) *runtime {
	rt := explicitRuntime(spec, true)
	if spec.ORTLibrary == "" {
		rt = directoryRuntime(filepath.Clean(spec.Directory), true)
	}
	rt.spec = spec
	return rt
}

// register makes these the registered runtimes, in this order. Those that are registered already stay what they are. It
// gives the new ones, and the subjects that are none any more.
func (rs *register) register(specs []compilers.Runtime) (added []*runtime, gone []string) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	before := rs.list
	rs.list = nil
	for _, spec := range specs {
		same := func(rt *runtime) bool { return rt.registered && reflect.DeepEqual(rt.spec, spec) }
		if slices.ContainsFunc(rs.list, same) {
			continue
		}
		i := slices.IndexFunc(before, same)
		if i >= 0 {
			rs.list = append(rs.list, before[i])
			continue
		}
		rt := registeredRuntime(spec)
		added = append(added, rt)
		rs.list = append(rs.list, rt)
	}
	for _, rt := range before {
		stays := slices.ContainsFunc(rs.list, func(now *runtime) bool { return now.subject == rt.subject })
		switch {
		case stays: // or another of the same libraries does
		case rt.registered:
			gone = append(gone, rt.subject)
		default:
			rs.list = append(rs.list, rt)
		}
	}
	return added, gone
}

// has tells whether the runtime may still be used: it was not taken out of the register.
func (rs *register) has(rt *runtime) bool { return slices.Contains(rs.all(), rt) }

func (rs *register) all() []*runtime {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return slices.Clone(rs.list)
}

// named is the runtime of that name that has the build's execution providers, as far as is known; nil if none is.
func (rs *register) named(name string, b *index.Build) *runtime {
	for _, rt := range rs.all() {
		if rc := rt.facts.Load(); rt.name == name && rc != nil && rc.hasEvery(b) {
			return rt
		}
	}
	return nil
}

func (rs *register) forget(rt *runtime) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.list = slices.DeleteFunc(rs.list, func(old *runtime) bool { return old == rt })
}

// add gives the runtime that is the same, or else registers this one; evicted is one that went for it.
func (rs *register) add(rt *runtime, same func(*runtime) bool) (added, evicted *runtime) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if i := slices.IndexFunc(rs.list, same); i >= 0 {
		return rs.list[i], nil
	}
	// Registered ones come first.
	first := slices.IndexFunc(rs.list, func(old *runtime) bool { return !old.registered })
	if first >= 0 && len(rs.list)-first >= maxNamedRuntimes {
		evicted = rs.list[first]
		rs.list = slices.Delete(rs.list, first, first+1)
	}
	rs.list = append(rs.list, rt)
	return rt, evicted
}

// addNamed is add for what a client names. What goes for it is not watched any longer.
func (c *Cache) addNamed(rt *runtime, same func(*runtime) bool) *runtime {
	added, evicted := c.runtimes.add(rt, same)
	if evicted != nil && !slices.ContainsFunc(c.runtimes.all(), func(other *runtime) bool { return other.subject == evicted.subject }) {
		c.watcher.Set(evicted.subject, nil)
	}
	return added
}
