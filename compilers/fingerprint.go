package compilers

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"

	"github.com/epcached/epcached/epmodel"
)

// Fingerprint implements Compiler.
func (o *ORT) Fingerprint(ctx context.Context, r Runtime, eps []EP, own *Job) ([]Fingerprint, error) {
	var prints []Fingerprint
	for _, ep := range eps {
		t, isTool := o.tools[ep.Name]
		print, err := o.fingerprint(ctx, r, ep, t, own)
		if err != nil {
			name := ep.Name
			if isTool {
				name += " with " + t.Program
			}
			return nil, fmt.Errorf("fingerprint of %s: %w", name, err)
		}
		prints = append(prints, print)
	}
	return prints, nil
}

func (o *ORT) fingerprint(ctx context.Context, r Runtime, ep EP, t Tool, own *Job) (Fingerprint, error) {
	version, err := o.version(ctx, t)
	if err != nil {
		return Fingerprint{}, err
	}
	folder, err := o.scratch()
	if err != nil {
		return Fingerprint{}, err
	}
	defer o.drop(folder)
	job, done, err := smallestTaken(ctx, o, probeJob(r, ep, folder), own)
	if err != nil {
		return Fingerprint{}, err
	}
	graph, err := readGraph(ctx, filepath.Join(job.Folder, done.Graph))
	if err != nil {
		return Fingerprint{}, err
	}
	stated, _, _ := StatedBy(ep.Name, true, graph) // of a contradiction the first part counts
	print := Fingerprint{SDKVersion: cmp.Or(stated.SDKVersion, version),
		HardwareArchitecture: stated.HardwareArchitecture,
		CompatibilityString:  stated.CompatibilityString, Seconds: done.Seconds}
	info, _ := EPByName(ep.Name)
	for _, used := range done.EPs {
		print.describe(used, info)
	}
	print.EPVersion = cmp.Or(print.EPVersion, version)
	return print, nil
}

// ProbeModel is the base name of the models that fingerprints and controls compile.
const ProbeModel = "probe.onnx"

// probeJob compiles in the folder what an EP is probed with, by options that fingerprints need.
func probeJob(r Runtime, ep EP, folder string) Job {
	info, _ := EPByName(ep.Name)
	ep.Options = info.ForFingerprint(ep.Options)
	return Job{Runtime: r, EPs: []EP{ep}, Folder: folder, Output: "probe_ctx.onnx"}
}

const driverMetadata = "os_driver_version"

func (p *Fingerprint) describe(used EPUsed, info EPInfo) {
	p.EPVersion, p.Devices = used.Version, used.Devices
	for i, d := range used.Devices {
		if i == 0 {
			p.Device = d
		}
		for _, key := range append([]string{driverMetadata}, info.DriverMetadata...) {
			p.DriverVersion = cmp.Or(p.DriverVersion, d.DeviceMetadata[key], d.EPMetadata[key])
		}
	}
}

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
