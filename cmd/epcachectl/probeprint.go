package main

import (
	"fmt"
	"strings"

	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock/wire"
)

func printRuntime(p *term.Printer, r *wire.RuntimeFacts) {
	p.Line("%s: ONNX Runtime %s%s", term.OrDash(r.GetDirectory()), term.OrDash(r.GetOrtVersion()), condition(r))
	if r.GetError() != "" {
		p.Line("  not usable: %s", term.Printable(r.GetError()))
	}
	for i, change := range r.GetChanges() {
		if i == 0 {
			p.Line("  changed since the probe of %s:", term.Time(r.GetPreviousMs()))
		}
		p.Line("    %s", term.Printable(change))
	}
	for _, ep := range r.GetEps() {
		p.Line("  %s %s", term.Printable(ep.GetName()), term.Printable(ep.GetVersion()))
		if ep.GetError() != "" {
			p.Line("    not usable: %s", term.Printable(ep.GetError()))
		}
		if ep.GetDriverVersion() != "" {
			p.Line("    driver %s%s", term.Printable(ep.GetDriverVersion()), from(ep.GetDriverSource()))
		}
		for _, d := range ep.GetDevices() {
			p.Line("    %s %s (vendor %04x, device %04x)%s", term.OrDash(d.GetType()), term.OrDash(d.GetVendor()), d.GetVendorId(), d.GetDeviceId(), fingerprint(d))
		}
	}
}

// printSandbox lists what keeps the workers from doing harm.
func printSandbox(p *term.Printer, lines []string) {
	for i, line := range lines {
		if i == 0 {
			p.Line("workers:")
		}
		p.Line("  %s", term.Printable(line))
	}
}

// notInForce is in the line of a measure that this system has no means for.
const notInForce = ": NOT IN FORCE: "

// sandboxSummary names what is not in force.
func sandboxSummary(lines []string) string {
	var missing []string
	for _, line := range lines {
		if name, _, is := strings.Cut(line, notInForce); is {
			missing = append(missing, name)
		}
	}
	switch {
	case len(lines) == 0:
		return "-"
	case len(missing) == 0:
		return "all in force"
	}
	return term.Printable("not in force: " + strings.Join(missing, ", ") + " (epcachectl probe says more)")
}

func fingerprint(d *wire.DeviceFacts) string {
	switch {
	case d.GetError() != "":
		return ": cannot compile: " + term.Printable(d.GetError())
	case d.GetSdkVersion() != "":
		return fmt.Sprintf(": SDK %s, %s", term.Printable(d.GetSdkVersion()), term.OrDash(d.GetHardwareArchitecture()))
	}
	return ""
}

// condition is a runtime's state and how changes of it are noticed.
func condition(r *wire.RuntimeFacts) string {
	text := ""
	if r.GetState() != "" {
		text += ", " + term.Printable(r.GetState())
	}
	if r.GetWatched() != "" {
		text += ", watched: " + term.Printable(r.GetWatched())
	}
	if r.GetProbedMs() != 0 {
		text += ", probed " + term.Time(r.GetProbedMs())
	}
	return text
}

func from(source string) string {
	if source == "" {
		return ""
	}
	return " (from " + term.Printable(source) + ")"
}
