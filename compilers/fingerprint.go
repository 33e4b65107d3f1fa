package compilers

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
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

// probeJob compiles in the folder what an EP is probed with. Options that a fingerprint does not
// depend on may ask for things that make no sense for such a model.
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
