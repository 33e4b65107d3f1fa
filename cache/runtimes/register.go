package runtimes

import (
	"path/filepath"
	"reflect"
	"slices"

	"github.com/epcached/epcached/compilers"
)

// MaxNamed bounds the runtimes that clients can bring; the oldest is dropped first.
const MaxNamed = 64

func directoryRuntime(dir string, registered bool) *Runtime {
	return newRuntime(dir, registered, func() (compilers.Runtime, error) { return compilers.Find(dir) })
}

// explicitRuntime is a runtime that was given library by library.
func explicitRuntime(spec compilers.Runtime, registered bool) *Runtime {
	rt := newRuntime(spec.ORTLibrary, registered, func() (compilers.Runtime, error) { return compilers.Complete(spec) })
	for _, l := range spec.EPs {
		rt.subject += " " + l.EP + "=" + l.Path
	}
	if spec.ORTVersion != "" {
		rt.subject += " " + spec.ORTVersion // as a client says; the file may be another by now
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

// register makes these the registered runtimes, in this order. Those that are registered already stay what they are. It
// gives the new ones, and the subjects that are none any more.
func (s *Set) register(specs []compilers.Runtime) (added []*Runtime, gone []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.list
	s.list = nil
	for _, spec := range specs {
		same := func(rt *Runtime) bool { return rt.Registered && reflect.DeepEqual(rt.spec, spec) }
		if slices.ContainsFunc(s.list, same) {
			continue
		}
		i := slices.IndexFunc(before, same)
		if i >= 0 {
			s.list = append(s.list, before[i])
			continue
		}
		rt := registeredRuntime(spec)
		added = append(added, rt)
		s.list = append(s.list, rt)
	}
	for _, rt := range before {
		stays := slices.ContainsFunc(s.list, func(now *Runtime) bool { return now.subject == rt.subject })
		switch {
		case stays: // or another of the same libraries does
		case rt.Registered:
			gone = append(gone, rt.subject)
		default:
			s.list = append(s.list, rt)
		}
	}
	return added, gone
}

func (s *Set) forget(rt *Runtime) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = slices.DeleteFunc(s.list, func(old *Runtime) bool { return old == rt })
}

// add gives the runtime that is the same, or else registers this one; evicted is one that went for it.
func (s *Set) add(rt *Runtime, same func(*Runtime) bool) (added, evicted *Runtime) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.IndexFunc(s.list, same); i >= 0 {
		return s.list[i], nil
	}
	// Registered ones come first.
	first := slices.IndexFunc(s.list, func(old *Runtime) bool { return !old.Registered })
	if first >= 0 && len(s.list)-first >= MaxNamed {
		evicted = s.list[first]
		s.list = slices.Delete(s.list, first, first+1)
	}
	s.list = append(s.list, rt)
	return rt, evicted
}

// addNamed is add for what a client names. What goes for it is not watched any longer.
func (s *Set) addNamed(rt *Runtime, same func(*Runtime) bool) *Runtime {
	added, evicted := s.add(rt, same)
	if evicted != nil && !slices.ContainsFunc(s.All(), func(other *Runtime) bool { return other.subject == evicted.subject }) {
		s.watcher.Set(evicted.subject, nil)
	}
	return added
}
