package runtimes

import (
	"slices"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/compilers"
)

// Rename returns execution providers and libraries under their canonical names, and the given names
// of those that it renamed. Some libraries take the name of their execution provider from the name
// under which the application registers them, so the library says which one is meant: by its file's
// name, or because a runtime of the set has the same file. s may be nil.
func (s *Set) Rename(eps []identity.EP, ref Ref) (_ []identity.EP, _ Ref,
	given map[string]string) {
	for i, ep := range eps {
		lib := ref.Library(ep.Name)
		if _, known := compilers.EPByName(ep.Name); known || lib == nil {
			continue
		}
		name := nameOf(s, lib)
		if name == "" || needs(eps, name) {
			continue
		}
		if given == nil {
			eps, given = slices.Clone(eps), make(map[string]string)
		}
		given[name], eps[i].Name = ep.Name, name
		ref.EPLibraries = slices.Clone(ref.EPLibraries)
		ref.Library(ep.Name).EP = name
	}
	return eps, ref, given
}

// nameOf returns the canonical name of a library's execution provider if the library has no name of
// its own, "" otherwise.
func nameOf(s *Set, lib *LibraryRef) string {
	if name, known := compilers.EPOfLibrary(lib.Path); known {
		return nameIfRegistered(name)
	}
	if s == nil {
		return ""
	}
	for _, rt := range s.All() {
		if rc := rt.LastContent(); rc != nil {
			for _, l := range rc.Spec.EPs {
				if lib.matches(l.Path, rc.files, false) {
					return nameIfRegistered(l.EP)
				}
			}
		}
	}
	return ""
}

func nameIfRegistered(name string) string {
	if info, _ := compilers.EPByName(name); info.NamedByRegistration {
		return name
	}
	return ""
}
