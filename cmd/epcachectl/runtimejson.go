package main

import "github.com/epcached/epcached/unixsock/wire"

// runtimeResult is a runtime as probe and status print it with --json.
type runtimeResult struct {
	Directory  string     `json:"directory"`
	ORTVersion string     `json:"ort_version"`
	ORTLibrary string     `json:"ort_library"`
	Registered bool       `json:"registered"`
	ProbedMs   int64      `json:"probed_ms,omitempty"`
	Error      string     `json:"error,omitempty"`
	ORTBuild   string     `json:"ort_build,omitempty"`
	State      string     `json:"state,omitempty"`       // "ready", "changing", "probing", "unusable"
	Watched    string     `json:"watched,omitempty"`     // "inotify", or "polled: why"
	Changes    []string   `json:"changes,omitempty"`     // since the probe before
	PreviousMs int64      `json:"previous_ms,omitempty"` // when that was
	EPs        []epResult `json:"eps"`
}

type epResult struct {
	Name          string         `json:"name"`
	Library       string         `json:"library"`
	LibraryDigest string         `json:"library_digest,omitempty"`
	Version       string         `json:"version,omitempty"`
	Error         string         `json:"error,omitempty"`
	DriverVersion string         `json:"driver_version,omitempty"`
	DriverSource  string         `json:"driver_source,omitempty"` // where the version is from
	Devices       []deviceResult `json:"devices"`
}

type deviceResult struct {
	Type                 string            `json:"type"`
	VendorID             uint32            `json:"vendor_id"`
	Vendor               string            `json:"vendor"`
	DeviceID             uint32            `json:"device_id"`
	EPMetadata           map[string]string `json:"ep_metadata,omitempty"`
	DeviceMetadata       map[string]string `json:"device_metadata,omitempty"`
	SDKVersion           string            `json:"sdk_version,omitempty"`
	HardwareArchitecture string            `json:"hardware_architecture,omitempty"`
	CompatibilityString  string            `json:"compatibility_string,omitempty"`
	Error                string            `json:"error,omitempty"`
}

func runtimesOf(runtimes []*wire.RuntimeFacts) []runtimeResult {
	out := make([]runtimeResult, len(runtimes))
	for i, r := range runtimes {
		out[i] = runtimeResult{
			Directory: r.GetDirectory(), ORTVersion: r.GetOrtVersion(), ORTLibrary: r.GetOrtLibrary(), Registered: r.GetRegistered(),
			ProbedMs: r.GetProbedMs(), Error: r.GetError(), ORTBuild: r.GetOrtBuild(), State: r.GetState(), Watched: r.GetWatched(),
			Changes: r.GetChanges(), PreviousMs: r.GetPreviousMs(), EPs: make([]epResult, len(r.GetEps())),
		}
		for j, ep := range r.GetEps() {
			out[i].EPs[j] = epOf(ep)
		}
	}
	return out
}

func epOf(ep *wire.EpFacts) epResult {
	out := epResult{Name: ep.GetName(), Library: ep.GetLibrary(), LibraryDigest: ep.GetLibraryDigest(), Version: ep.GetVersion(),
		Error: ep.GetError(), DriverVersion: ep.GetDriverVersion(), DriverSource: ep.GetDriverSource(), Devices: make([]deviceResult, len(ep.GetDevices()))}
	for i, d := range ep.GetDevices() {
		out.Devices[i] = deviceResult{d.GetType(), d.GetVendorId(), d.GetVendor(), d.GetDeviceId(), d.GetEpMetadata(), d.GetDeviceMetadata(),
			d.GetSdkVersion(), d.GetHardwareArchitecture(), d.GetCompatibilityString(), d.GetError()}
	}
	return out
}
