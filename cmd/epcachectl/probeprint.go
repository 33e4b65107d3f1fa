package main

import (
	"fmt"
	"strings"

	"github.com/epcached/epcached/unixsock/wire"
)

func (p *printer) runtime(r *wire.RuntimeFacts) {
	p.line("%s: ONNX Runtime %s%s", orDash(r.GetDirectory()), orDash(r.GetOrtVersion()), condition(r))
	if r.GetError() != "" {
		p.line("  not usable: %s", printable(r.GetError()))
	}
	for i, change := range r.GetChanges() {
		if i == 0 {
			p.line("  changed since the probe of %s:", timeOf(r.GetPreviousMs()))
		}
		p.line("    %s", printable(change))
	}
	for _, ep := range r.GetEps() {
		p.line("  %s %s", printable(ep.GetName()), printable(ep.GetVersion()))
		if ep.GetError() != "" {
			p.line("    not usable: %s", printable(ep.GetError()))
		}
		if ep.GetDriverVersion() != "" {
			p.line("    driver %s%s", printable(ep.GetDriverVersion()), from(ep.GetDriverSource()))
		}
		for _, d := range ep.GetDevices() {
			p.line("    %s %s (vendor %04x, device %04x)%s", orDash(d.GetType()), orDash(d.GetVendor()), d.GetVendorId(), d.GetDeviceId(), fingerprint(d))
		}
	}
}

// sandbox lists what keeps the workers from doing harm.
func (p *printer) sandbox(lines []string) {
	for i, line := range lines {
		if i == 0 {
			p.line("workers:")
		}
		p.line("  %s", printable(line))
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
	return printable("not in force: " + strings.Join(missing, ", ") + " (epcachectl probe says more)")
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

// condition is a runtime's state and how changes of it are noticed.
func condition(r *wire.RuntimeFacts) string {
	text := ""
	if r.GetState() != "" {
		text += ", " + printable(r.GetState())
	}
	if r.GetWatched() != "" {
		text += ", watched: " + printable(r.GetWatched())
	}
	if r.GetProbedMs() != 0 {
		text += ", probed " + timeOf(r.GetProbedMs())
	}
	return text
}

func from(source string) string {
	if source == "" {
		return ""
	}
	return " (from " + printable(source) + ")"
}
