// Package runtimes finds ONNX Runtimes and execution provider libraries, notices their changes, and
// probes which devices they find on this machine.
//
// A Set has the runtimes that the administrator registered and those that clients named. Resolve
// finds the one that a request means. A Content describes the files of a runtime at the last check.
// Each use compares the files with it, so that a replaced library is never taken for the previous
// one. A watcher notices changes as well: then the runtime is probed again, and Options.Assessed is
// called.
//
// Files are kept open if the times of their directory and the kernel's reports of mounts show that
// their names still lead to them; other names are looked up. The kernel also reports writes to
// these files, see kept.go. So each request itself notices a rename, a mount over a file, and
// changed bytes.
//
// Results of workers (devices, fingerprints, verdicts) are remembered, also over restarts, under
// keys that cover the libraries' bytes and the machine: see Remember.
//
// Start reading at Set.
package runtimes

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/internal/watch"
)

// Options are the dependencies of a Set. All functions must be set.
type Options struct {
	Compiler compilers.Compiler
	Runtimes []compilers.Runtime // registered by the administrator, in order of preference
	Drivers  []DriverSource
	Quiet    time.Duration // how long a runtime's files must be unchanged after a change
	Poll     time.Duration // interval of checks of files that cannot be watched
	UID      uint32        // the daemon's own user; its clients may name libraries
	Book     Book          // stores facts over restarts
	Now      func() time.Time
	Log      *slog.Logger

	// Event adds an event to the history.
	Event func(index.Event)
	// Inquire runs find, once for all callers of one key at a time. It is shown among the asker's
	// jobs.
	Inquire func(ctx context.Context, q Inquiry,
		find func(context.Context) (any, error)) (any, error)
	// ReadShown blocks until a client's library may be read. It bounds the concurrent reads,
	// because a file system may never answer.
	ReadShown func(ctx context.Context, uid uint32) (leave func(), err error)
	// Assessed is called when a runtime was probed that is new or changed, with the digests of the
	// libraries by EP that it had before. recorded says that the history has an event of the
	// change. Assessed returns false if its work did not end, so that the runtime is assessed
	// again.
	Assessed func(ctx context.Context, rt *Runtime, rc *Content, previous map[string]string,
		recorded bool) bool
	// Attach makes the value of Content.Attached.
	Attach func() any
}

// Set has the runtimes of one daemon: the registered ones in the order of the configuration, then
// those that clients of the daemon's own user have named. Make one with New. Its methods may be
// called by several goroutines. The zero value has no runtimes.
type Set struct {
	options Options
	log     *slog.Logger
	machine *Machine
	watcher *watch.Watcher
	wake    chan struct{} // has a token when a runtime must be assessed
	digests digests

	mu   sync.Mutex
	list []*Runtime // registered ones first; guarded by mu
	// generation counts the changes of list and of the runtimes' contents
	generation atomic.Uint64

	facts memo.Table[string, memo.Fact] // results of workers, by key

	ctx  context.Context // context of the background work; set by Start
	work sync.WaitGroup  // the background work, which Close waits for
}

// New returns a set of the registered runtimes, without checking their files yet.
func New(o Options) *Set {
	s := &Set{options: o, log: o.Log, machine: NewMachine(o.Drivers), wake: make(chan struct{}, 1),
		digests: digests{o.Book, o.Now, o.ReadShown},
		watcher: watch.New(watch.Options{Quiet: o.Quiet, Poll: o.Poll, Log: o.Log})}
	s.register(o.Runtimes)
	return s
}

// Start checks the machine and assesses changes until the context ends. Close must follow.
func (s *Set) Start(ctx context.Context) {
	s.ctx = ctx
	s.work.Go(func() { s.machine.Refresh(ctx) })
	s.work.Go(func() { s.watchChanges(ctx) })
	s.work.Go(func() { s.assessChanges(ctx) })
}

// Close waits for the background work. The context of Start must have ended.
func (s *Set) Close() error {
	err := s.watcher.Close()
	s.work.Wait()
	for _, rt := range s.All() {
		rt.close()
	}
	return err
}

// RefreshAll probes each runtime, so that the first request need not, and has its files watched.
func (s *Set) RefreshAll(ctx context.Context) {
	s.watcher.Set(watchedDrivers, s.machine.Files())
	for _, rt := range s.All() {
		s.watch(rt, nil)
		s.refreshContent(ctx, rt)
	}
}

func (s *Set) refreshContent(ctx context.Context, rt *Runtime) {
	if _, err := s.Content(ctx, rt, func(string) {}); err != nil && ctx.Err() == nil &&
		rt.state.Load() != &stateUnusable { // otherwise Content has logged it
		s.log.Warn("runtime cannot be used", "runtime", rt.Name, "error", err)
	}
}

// Register makes these the registered runtimes, in this order. Those that clients named follow
// them.
func (s *Set) Register(specs []compilers.Runtime) {
	added, gone := s.register(specs)
	for _, subject := range gone {
		s.watcher.Set(subject, nil)
	}
	for _, rt := range added {
		s.watch(rt, nil)
		// The error is ignored because Content reports and logs it.
		s.work.Go(func() { _, _ = s.Content(s.ctx, rt, func(string) {}) })
	}
}

// SetDrivers has drivers' versions read from these sources.
func (s *Set) SetDrivers(sources []DriverSource) {
	if s.machine.SetSources(sources) {
		s.watcher.Set(watchedDrivers, s.machine.Files())
		s.work.Go(func() { s.WatchMachine(s.ctx) }) // a driver's version may come from a command
	}
}

// Machine returns the machine that the runtimes are on.
func (s *Set) Machine() *Machine { return s.machine }

// Watched returns how changes are noticed: "inotify", "polled: REASON", or "" if they are not.
func (s *Set) Watched(rt *Runtime) string { return s.watcher.Mode(rt.subject) }

// Reassess has each runtime assessed again, because the rules or policies for judging builds have
// changed.
func (s *Set) Reassess() {
	for _, rt := range s.All() {
		s.noteChanged(rt)
	}
}

// All returns the runtimes, the registered ones first.
func (s *Set) All() []*Runtime {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list)
}

// IsCurrent reports whether the runtime is still in the set.
func (s *Set) IsCurrent(rt *Runtime) bool { return slices.Contains(s.All(), rt) }

// ByName returns the runtime of that name that has the build's EPs, nil if none is known.
func (s *Set) ByName(name string, b *index.Build) *Runtime {
	for _, rt := range s.All() {
		if rc := rt.LastContent(); rt.Name == name && rc != nil && rc.HasEvery(b) {
			return rt
		}
	}
	return nil
}

// MaxNamed bounds the runtimes that clients have named; the oldest is dropped first.
const MaxNamed = 64

func directoryRuntime(dir string, registered bool) *Runtime {
	return newRuntime(dir, registered, func() (compilers.Runtime, error) {
		return compilers.Find(dir)
	})
}

func explicitRuntime(spec compilers.Runtime, registered bool) *Runtime {
	rt := newRuntime(spec.ORTLibrary, registered, func() (compilers.Runtime, error) {
		return compilers.Complete(spec)
	})
	for _, l := range spec.EPs {
		rt.subject += " " + l.EP + "=" + l.Path
	}
	if spec.ORTVersion != "" {
		rt.subject += " " + spec.ORTVersion // as the client states; the file may have changed
	}
	return rt
}

func registeredRuntime(spec compilers.Runtime) *Runtime {
	rt := explicitRuntime(spec, true)
	if spec.ORTLibrary == "" {
		rt = directoryRuntime(filepath.Clean(spec.Directory), true)
	}
	rt.spec = spec
	return rt
}

// register makes these the registered runtimes, in this order. It keeps those that are registered
// already, and returns the new ones and the removed subjects.
func (s *Set) register(specs []compilers.Runtime) (added []*Runtime, gone []string) {
	var dropped []*Runtime
	defer func() {
		for _, rt := range dropped {
			rt.close()
		}
	}()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generation.Add(1)
	before := s.list
	s.list = nil
	for _, spec := range specs {
		same := func(rt *Runtime) bool { return rt.Registered && reflect.DeepEqual(rt.spec, spec) }
		if slices.ContainsFunc(s.list, same) {
			continue
		}
		if i := slices.IndexFunc(before, same); i >= 0 {
			s.list = append(s.list, before[i])
			continue
		}
		rt := registeredRuntime(spec)
		added = append(added, rt)
		s.list = append(s.list, rt)
	}
	for _, rt := range before {
		equal := func(now *Runtime) bool { return now.subject == rt.subject }
		switch {
		case slices.Contains(s.list, rt):
		case slices.ContainsFunc(s.list, equal): // a client's runtime with the same libraries stays
			dropped = append(dropped, rt)
		case rt.Registered:
			gone, dropped = append(gone, rt.subject), append(dropped, rt)
		default:
			s.list = append(s.list, rt)
		}
	}
	return added, gone
}

func (s *Set) forget(rt *Runtime) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generation.Add(1)
	s.list = slices.DeleteFunc(s.list, func(old *Runtime) bool { return old == rt })
}

// addNamed returns the runtime for which same is true, or adds a client's runtime and drops the
// oldest.
func (s *Set) addNamed(rt *Runtime, same func(*Runtime) bool) *Runtime {
	known, gone := s.add(rt, same)
	if gone == nil {
		return known
	}
	gone.close()
	if !slices.ContainsFunc(s.All(), func(rt *Runtime) bool { return rt.subject == gone.subject }) {
		s.watcher.Set(gone.subject, nil)
	}
	return known
}

func (s *Set) add(rt *Runtime, same func(*Runtime) bool) (known, gone *Runtime) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.IndexFunc(s.list, same); i >= 0 {
		return s.list[i], nil
	}
	s.generation.Add(1)
	s.list = append(s.list, rt)
	// registered ones come first
	first := slices.IndexFunc(s.list, func(old *Runtime) bool { return !old.Registered })
	if len(s.list)-first > MaxNamed {
		gone = s.list[first]
		s.list = slices.Delete(s.list, first, first+1)
	}
	return rt, gone
}

// Runtime is one libonnxruntime with the EP libraries used with it, as it is on this machine.
type Runtime struct {
	// Name is the directory, or the path of libonnxruntime if the files were named singly.
	Name string
	// subject distinguishes it from runtimes of the same name with other execution providers.
	subject string
	// Registered by the administrator; otherwise a client of the daemon's own user has named it.
	Registered bool
	spec       compilers.Runtime // as it was registered
	find       func() (compilers.Runtime, error)

	looking chan struct{}           // holds one token while the files are checked
	facts   atomic.Pointer[Content] // nil until the first check
	state   atomic.Pointer[string]
	pending atomic.Bool // an assessment is due soon
	// due: an assessment has begun, and none has ended since.
	due atomic.Bool
	// noticed is a digest of changes that only a probe can notice; nil: none.
	noticed atomic.Pointer[MachineID]
}

// machineID combines the machine with changes that only a probe of this runtime has noticed.
func (rt *Runtime) machineID(m MachineID) MachineID {
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

// LastContent returns the contents of the last check, nil before the first one.
func (rt *Runtime) LastContent() *Content { return rt.facts.Load() }

// State returns "ready", "changing" or "unusable".
func (rt *Runtime) State() string { return *rt.state.Load() }

// close is called after the runtime's removal from the set. Requests that use it continue.
func (rt *Runtime) close() {
	if rc := rt.LastContent(); rc != nil {
		rc.dirs.close()
	}
}

func newRuntime(name string, registered bool, find func() (compilers.Runtime, error)) *Runtime {
	rt := &Runtime{Name: name, subject: name, Registered: registered, find: find,
		looking: make(chan struct{}, 1)}
	rt.state.Store(&stateReady)
	return rt
}

// Content returns the runtime's current contents. It blocks while the files are changing.
func (s *Set) Content(ctx context.Context, rt *Runtime, progress func(string)) (*Content, error) {
	if rc := rt.LastContent(); rc != nil && rc.isCurrent(recently) {
		return rc, nil
	}
	progress("probing")
	select {
	case rt.looking <- struct{}{}:
		defer func() { <-rt.looking }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	before := rt.LastContent()
	if before != nil && before.isCurrent(0) {
		return before, nil
	}
	if before != nil && !before.filesUnchanged() {
		s.changing(rt)
	}
	rc, err := s.findContent(ctx, rt, before)
	if err != nil {
		return nil, s.noteUnusable(ctx, rt, before, err)
	}
	s.noteFound(rt, before, rc)
	return rc, nil
}

// isCurrent reports whether machine and files are unchanged. See dirs.unchanged for within.
func (rc *Content) isCurrent(within time.Duration) bool {
	return !rc.extended.Load() && rc.Machine == rc.now() && rc.dirs.unchanged(within)
}

func (s *Set) changing(rt *Runtime) {
	if rt.state.CompareAndSwap(&stateReady, &stateChanging) {
		s.options.Event(index.Event{Kind: event.Changing, Runtime: rt.Name,
			Text: "its files are being changed"})
	}
}

func (s *Set) noteUnusable(ctx context.Context, rt *Runtime, before *Content, err error) error {
	if ctx.Err() != nil {
		return err
	}
	if !rt.Registered && before == nil {
		s.forget(rt) // it never worked, and its client will name it again
	}
	if was := rt.state.Swap(&stateUnusable); was != &stateUnusable {
		s.log.Warn("runtime cannot be used", "runtime", rt.Name, "error", err)
		s.options.Event(index.Event{Kind: event.Unusable, Runtime: rt.Name, Text: err.Error()})
	}
	return apierr.New(apierr.Unavailable, err, "runtime %q cannot be used", rt.Name)
}

func (s *Set) noteFound(rt *Runtime, before, rc *Content) {
	rt.facts.Store(rc)
	s.generation.Add(1)
	if before != nil {
		before.dirs.close()
	}
	if !s.IsCurrent(rt) {
		rt.close() // it was removed from the set during the check
	}
	rt.state.Store(&stateReady)
	s.watch(rt, rc)
	if before == nil || !before.SameLibraries(rc) {
		if before != nil {
			s.log.Info("runtime changed", "runtime", rt.Name)
			before.removedLibraries.Store(true)
		}
		s.noteChanged(rt)
	} else if rt.due.Load() {
		s.noteChanged(rt) // the same libraries, but their files changed during the assessment
	}
}

// Attempts and pause while a package manager is at work on a runtime's files.
const (
	maxLooks     = 20
	lookPause    = 250 * time.Millisecond
	lookPatience = 30 * time.Second // for files that are complete but different at each check
)

// ErrFilesChanging says that a runtime's files keep changing, or changed while they were used.
var ErrFilesChanging = errors.New("its files keep changing")

// findContent identifies the runtime's libraries. It compares stamps before and after hashing.
// While they differ, a package manager is writing, and the digests are useless. After a change the
// files must also have been unchanged for a while, because half of an update may look like a whole
// runtime.
func (s *Set) findContent(ctx context.Context, rt *Runtime, before *Content) (*Content, error) {
	began := time.Now()
	// the runtime worked before, so an update is probably under way
	patient := before != nil && rt.state.Load() != &stateUnusable
	for attempt := 0; ; {
		rc, err := s.readContent(ctx, rt)
		pause := lookPause
		settled := err == nil && rc.dirs.unchanged(0)
		if settled {
			if pause = s.settlingTime(rc, before); pause <= 0 {
				return rc, nil
			}
		}
		if err == nil {
			rc.dirs.close()
		}
		if !settled {
			attempt++
		}
		if attempt == maxLooks || time.Since(began) > lookPatience {
			return nil, cmp.Or(err, ErrFilesChanging)
		}
		if err != nil && !errors.Is(err, ErrFilesChanging) && !patient {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause):
		}
	}
}

// settlingTime returns how much longer the files must stay unchanged before they count as complete.
func (s *Set) settlingTime(rc, before *Content) time.Duration {
	if before == nil || before.SameLibraries(rc) {
		return 0
	}
	since := time.Since(rc.newest())
	if since < 0 {
		return 0 // times in the future are ignored
	}
	return s.options.Quiet - since
}
