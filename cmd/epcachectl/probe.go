package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/spf13/cobra"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// runtimeResult is a runtime as probe and status print it with --json.
type runtimeResult struct {
	Directory  string     `json:"directory"`
	ORTVersion string     `json:"ort_version"`
	ORTLibrary string     `json:"ort_library"`
	Registered bool       `json:"registered"`
	ProbedMs   int64      `json:"probed_ms,omitempty"`
	Error      string     `json:"error,omitempty"`
	EPs        []epResult `json:"eps"`
}

type epResult struct {
	Name          string         `json:"name"`
	Library       string         `json:"library"`
	LibraryDigest string         `json:"library_digest,omitempty"`
	Version       string         `json:"version,omitempty"`
	Error         string         `json:"error,omitempty"`
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

func (a *app) probeCommand() *cobra.Command {
	var find, refresh bool
	var runtime string
	cmd := &cobra.Command{
		Use:   "probe [--find] [--runtime DIR]",
		Short: "print runtimes, execution providers and devices",
		Long: `probe prints which runtimes the daemon has, with their execution providers and the devices that these can compile
for. --refresh looks again even if nothing seems to have changed.

--find needs no daemon: it looks for runtimes in well-known places and in Python environments, loads nothing of
them, and prints configuration for epcached --config.` + statusHelp(askingCodes...),
		Example: `  epcachectl probe
  epcachectl probe --find >> epcached.toml`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if find {
				return a.findRuntimes(cmd.Context(), runtime)
			}
			return a.withDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return a.probe(ctx, c, &wire.Probe{Refresh: refresh}, runtime)
			})
		},
	}
	cmd.Flags().BoolVar(&find, "find", false, "look for runtimes on this machine, and print configuration")
	cmd.Flags().BoolVar(&refresh, "refresh", false, "probe again")
	cmd.Flags().StringVar(&runtime, "runtime", "", "only the runtime in `DIR`")
	return cmd
}

func (a *app) probe(ctx context.Context, c *unixsock.Client, p *wire.Probe, runtime string) error {
	if runtime != "" {
		dir, err := filepath.Abs(runtime)
		if err != nil {
			return err
		}
		p.Runtime = &wire.Runtime{Directory: dir}
	}
	reply, err := c.Probe(ctx, p)
	if err != nil {
		return err
	}
	if a.json {
		return a.print.json(runtimesOf(reply.GetRuntimes()))
	}
	for _, r := range reply.GetRuntimes() {
		a.print.runtime(r)
	}
	if len(reply.GetRuntimes()) == 0 {
		a.print.hint("the daemon has no runtime; find some with: epcachectl probe --find")
	}
	return nil
}

func runtimesOf(runtimes []*wire.RuntimeFacts) []runtimeResult {
	out := make([]runtimeResult, len(runtimes))
	for i, r := range runtimes {
		out[i] = runtimeResult{
			Directory: r.GetDirectory(), ORTVersion: r.GetOrtVersion(), ORTLibrary: r.GetOrtLibrary(), Registered: r.GetRegistered(),
			ProbedMs: r.GetProbedMs(), Error: r.GetError(), EPs: make([]epResult, len(r.GetEps())),
		}
		for j, ep := range r.GetEps() {
			out[i].EPs[j] = epOf(ep)
		}
	}
	return out
}

func epOf(ep *wire.EpFacts) epResult {
	out := epResult{Name: ep.GetName(), Library: ep.GetLibrary(), LibraryDigest: ep.GetLibraryDigest(), Version: ep.GetVersion(),
		Error: ep.GetError(), Devices: make([]deviceResult, len(ep.GetDevices()))}
	for i, d := range ep.GetDevices() {
		out.Devices[i] = deviceResult{d.GetType(), d.GetVendorId(), d.GetVendor(), d.GetDeviceId(), d.GetEpMetadata(), d.GetDeviceMetadata(),
			d.GetSdkVersion(), d.GetHardwareArchitecture(), d.GetCompatibilityString(), d.GetError()}
	}
	return out
}

func (p *printer) runtime(r *wire.RuntimeFacts) {
	p.line("%s: ONNX Runtime %s", orDash(r.GetDirectory()), orDash(r.GetOrtVersion()))
	if r.GetError() != "" {
		p.line("  not usable: %s", printable(r.GetError()))
	}
	for _, ep := range r.GetEps() {
		p.line("  %s %s", printable(ep.GetName()), printable(ep.GetVersion()))
		if ep.GetError() != "" {
			p.line("    not usable: %s", printable(ep.GetError()))
		}
		for _, d := range ep.GetDevices() {
			p.line("    %s %s (vendor %04x, device %04x)%s", orDash(d.GetType()), orDash(d.GetVendor()), d.GetVendorId(), d.GetDeviceId(), fingerprint(d))
		}
	}
}

func fingerprint(d *wire.DeviceFacts) string {
	switch {
	case d.GetError() != "":
		return ": cannot compile: " + printable(d.GetError())
	case d.GetSdkVersion() != "":
		return fmt.Sprintf(": SDK %s, %s", printable(d.GetSdkVersion()), orDash(d.GetHardwareArchitecture()))
	}
	return ""
}

// tomlString spells a path as people write it, and leaves the odd ones to those who know all rules.
func tomlString(path string) (string, error) {
	if printable(path) == path && !strings.ContainsAny(path, `"\`) {
		return `"` + path + `"`, nil
	}
	text, err := toml.Marshal(map[string]string{"directory": path})
	return strings.TrimSpace(strings.TrimPrefix(string(text), "directory = ")), err
}

func (a *app) findRuntimes(ctx context.Context, dir string) error {
	runtimes, err := lookFor(ctx, dir)
	if err != nil {
		return err
	}
	if a.json {
		out := make([]runtimeResult, len(runtimes))
		for i, r := range runtimes {
			out[i] = runtimeResult{Directory: r.Directory, ORTVersion: r.ORTVersion, ORTLibrary: r.ORTLibrary, EPs: make([]epResult, len(r.EPs))}
			for j, ep := range r.EPs {
				out[i].EPs[j] = epResult{Name: ep.EP, Library: ep.Path, Devices: []deviceResult{}}
			}
		}
		return a.print.json(out)
	}
	if len(runtimes) == 0 {
		a.print.failure(&hintedError{errors.New("probe: no runtime with a known execution provider found"),
			"install one: pip install --no-deps --target runtime onnxruntime onnxruntime-ep-openvino, and look again with --runtime runtime"})
		return exitError(exitNotFound)
	}
	for _, r := range runtimes {
		a.print.line("# ONNX Runtime %s", orDash(r.ORTVersion))
		for _, ep := range r.EPs {
			a.print.line("# %s: %s", printable(ep.EP), printable(ep.Path))
		}
		text, err := tomlString(r.Directory)
		if err != nil {
			return err
		}
		a.print.line("[[runtime]]\ndirectory = %s\n", text)
	}
	return nil
}

func lookFor(ctx context.Context, dir string) ([]compilers.Runtime, error) {
	if dir == "" {
		return compilers.FindAll(ctx), nil
	}
	r, err := compilers.Find(dir)
	if errors.Is(err, compilers.ErrNotFound) {
		err = &unixsock.Error{Class: wire.ErrorClass_NOT_FOUND, Text: err.Error()}
	}
	return []compilers.Runtime{r}, err
}
