package compilers

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
)

// Fingerprint implements Compiler.
func (o *ORT) Fingerprint(ctx context.Context, r Runtime, eps []EP) ([]Fingerprint, error) {
	var prints []Fingerprint
	for _, ep := range eps {
		print, err := o.fingerprint(ctx, r, ep)
		if err != nil {
			return nil, fmt.Errorf("fingerprint of %s: %w", ep.Name, err)
		}
		prints = append(prints, print)
	}
	return prints, nil
}

func (o *ORT) fingerprint(ctx context.Context, r Runtime, ep EP) (Fingerprint, error) {
	folder, err := o.scratch()
	if err != nil {
		return Fingerprint{}, err
	}
	defer o.drop(folder)
	info, known := EPByName(ep.Name)
	if known {
		// Other options may ask for things that make no sense for this model, and do not change what is read from it.
		ep.Options = info.ForFingerprint(ep.Options)
	}
	job, err := fingerprintJob(r, ep, folder)
	if err != nil {
		return Fingerprint{}, err
	}
	done, err := o.Compile(ctx, job, nil)
	if err != nil {
		return Fingerprint{}, err
	}
	print, err := fingerprintOf(ctx, job, done, info)
	if err != nil {
		return Fingerprint{}, err
	}
	for _, used := range done.EPs {
		print.describe(used, info)
	}
	return print, nil
}

// fingerprintJob compiles the smallest model there is, which is written into the folder.
func fingerprintJob(r Runtime, ep EP, folder string) (Job, error) {
	model := filepath.Join(folder, "fingerprint.onnx")
	if err := os.WriteFile(model, tinymodel.Relu(), 0o600); err != nil {
		return Job{}, err
	}
	return Job{Runtime: r, EPs: []EP{ep}, Model: model, Folder: folder, Output: "fingerprint_ctx.onnx"}, nil
}

// fingerprintOf reads what came of such a job.
func fingerprintOf(ctx context.Context, job Job, done Result, info EPInfo) (Fingerprint, error) {
	graph, err := readGraph(ctx, filepath.Join(job.Folder, done.Graph))
	if err != nil {
		return Fingerprint{}, err
	}
	print := readFingerprint(graph, job.EPs[0].Name, info)
	print.Seconds = done.Seconds
	return print, nil
}

// readFingerprint takes what the compiled model says of itself.
func readFingerprint(graph *epmodel.Model, ep string, info EPInfo) Fingerprint {
	var p Fingerprint
	for _, c := range graph.Contexts {
		if c.Source == ep || c.Source == "" {
			p.SDKVersion, p.HardwareArchitecture = c.SDKVersion, c.HardwareArchitecture
			break
		}
	}
	p.CompatibilityString = graph.Metadata["ep_compatibility_info."+ep]
	if p.HardwareArchitecture == "" {
		p.HardwareArchitecture = info.HardwareOf(p.CompatibilityString)
	}
	return p
}

func (p *Fingerprint) describe(used EPUsed, info EPInfo) {
	p.EPVersion, p.Devices = used.Version, used.Devices
	for i, d := range used.Devices {
		if i == 0 {
			p.Device = d
		}
		for _, key := range info.DriverMetadata {
			for _, metadata := range []map[string]string{d.DeviceMetadata, d.EPMetadata} {
				if p.DriverVersion == "" {
					p.DriverVersion = metadata[key]
				}
			}
		}
	}
}
