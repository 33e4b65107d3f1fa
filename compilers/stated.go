package compilers

import (
	"fmt"

	"github.com/epcached/epcached/epmodel"
)

// Stated is what compiled graphs say of themselves about one EP.
type Stated struct {
	SDKVersion           string // attribute ep_sdk_version of the EP's nodes
	HardwareArchitecture string // attribute hardware_architecture, else a part of CompatibilityString
	CompatibilityString  string // metadata ep_compatibility_info.<EP>
}

// StatedBy reads what the graphs of one build state about an EP. took is false, and nothing is
// stated, if the EP took no node. writes tells whether the EP writes compatibility strings: the
// metadata of the source model survive a compile, so that another's string may be left over from
// there. The error says that nodes or graphs contradict each other; the first statement is returned
// with it.
func StatedBy(ep string, writes bool, graphs ...*epmodel.Model) (s Stated, took bool, err error) {
	for _, graph := range graphs {
		took, err = s.add(ep, graph, took, err)
	}
	if !writes {
		s.CompatibilityString = ""
	}
	if info, known := EPByName(ep); known && s.HardwareArchitecture == "" {
		s.HardwareArchitecture = info.HardwareOf(s.CompatibilityString)
	}
	return s, took, err
}

// add reads one more graph.
func (s *Stated) add(ep string, graph *epmodel.Model, took bool, err error) (bool, error) {
	for _, node := range graph.Contexts {
		if node.Source != ep && node.Source != "" {
			continue
		}
		said := graph.Metadata["ep_compatibility_info."+ep]
		one := Stated{node.SDKVersion, node.HardwareArchitecture, said}
		if took && *s != one && err == nil {
			err = fmt.Errorf("nodes of %s are of two SDK versions, hardware architectures or "+
				"compatibility strings", ep)
		}
		if !took {
			*s, took = one, true
		}
	}
	return took, err
}
