package identity

import (
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/portable"
)

// FactsOf returns the facts that a portable build states about its execution providers.
func FactsOf(c *portable.Config) (out []index.EPFacts) {
	for _, ep := range c.EPs {
		out = append(out, index.EPFacts{Name: ep.Name, Version: ep.Version,
			LibraryDigest: cas.Digest(ep.LibraryDigest), SDKVersion: ep.SDKVersion,
			HardwareArchitecture: ep.Hardware, CompatibilityString: ep.CompatibilityString,
			DriverVersion: ep.DriverVersion, Devices: ep.Devices, TookNone: ep.TookNone})
	}
	return out
}
