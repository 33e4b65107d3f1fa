package identity

import (
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/portable"
)

// FactsOf returns what a portable build says of the execution providers that made it.
func FactsOf(c *portable.Config) (out []index.EPFacts) {
	for _, ep := range c.EPs {
		out = append(out, index.EPFacts{Name: ep.Name, Version: ep.Version,
			LibraryDigest: cas.Digest(ep.LibraryDigest), SDKVersion: ep.SDKVersion,
			HardwareArchitecture: ep.Hardware, CompatibilityString: ep.CompatibilityString,
			DriverVersion: ep.DriverVersion, Devices: ep.Devices, TookNone: ep.TookNone})
	}
	return out
}
