package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newProbe(a *cli.Call) *cobra.Command {
	var find, refresh bool
	var runtime string
	cmd := &cobra.Command{
		Use:   "probe [--find] [--runtime DIR]",
		Short: "list runtimes, execution providers and devices",
		Long: `probe prints the daemon's runtimes with their execution providers, the devices that
these compile for, and their drivers; what changed since the last probe; how changes are noticed;
and which parts of the sandbox are in effect. --refresh probes again even if nothing seems to have
changed.

--find needs no daemon: it searches well-known places and Python environments for runtimes, loads
nothing, and prints configuration for epcached --config.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl probe
  epcachectl probe --find >> epcached.toml`,
		Args: cli.UsageArgs(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if find && refresh {
				return exit.Usagef("probe: --find and --refresh exclude each other: --find asks " +
					"no daemon")
			}
			if find {
				return findRuntimes(cmd.Context(), a, runtime)
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return probe(ctx, a, c, &wire.Probe{Refresh: refresh}, runtime)
			})
		},
	}
	cmd.Flags().BoolVar(&find, "find", false, "search this machine for runtimes, and print "+
		"configuration")
	cmd.Flags().BoolVar(&refresh, "refresh", false, "probe again")
	cmd.Flags().StringVar(&runtime, "runtime", "",
		"only the runtime in `DIR`, which the daemon then knows until it restarts")
	return cmd
}

func probe(ctx context.Context, a *cli.Call, c *unixsock.Client, p *wire.Probe,
	runtime string) error {
	var err error
	if p.Runtime, err = acquire.RuntimeAt(runtime); err != nil {
		return err
	}
	reply, err := unixsock.Ask[wire.ProbeReply](ctx, c, p, nil)
	if err != nil {
		return err
	}
	if a.JSON {
		return a.Print.JSON(jsonout.List(reply.GetRuntimes()))
	}
	if runtime == "" {
		for i, line := range reply.GetSandbox() {
			if i == 0 {
				a.Print.Line("workers:")
			}
			a.Print.Line("  %s", term.Printable(line))
		}
	}
	for _, r := range reply.GetRuntimes() {
		printRuntime(a.Print, r)
	}
	status, err := unixsock.Ask[wire.StatusReply](ctx, c, &wire.Status{}, nil)
	if line := sourcelessLine(status.GetSourceless()); err == nil && line != "" {
		a.Print.Hint(line)
	}
	if len(reply.GetRuntimes()) == 0 {
		a.Print.Hint("the daemon has no runtime; find one with: epcachectl probe --find")
	}
	return nil
}

// tomlString quotes a path simply if possible, and otherwise by the TOML library.
func tomlString(path string) (string, error) {
	if term.Printable(path) == path && !strings.ContainsAny(path, `"\`) {
		return `"` + path + `"`, nil
	}
	text, err := toml.Marshal(map[string]string{"directory": path})
	return strings.TrimSpace(strings.TrimPrefix(string(text), "directory = ")), err
}

func findRuntimes(ctx context.Context, a *cli.Call, dir string) error {
	runtimes, err := lookFor(ctx, dir)
	if err != nil {
		return err
	}
	if a.JSON {
		out := make([]*wire.RuntimeFacts, len(runtimes))
		for i, r := range runtimes {
			out[i] = &wire.RuntimeFacts{Directory: r.Directory, OrtVersion: r.ORTVersion,
				OrtLibrary: r.ORTLibrary}
			for _, ep := range r.EPs {
				out[i].Eps = append(out[i].Eps, &wire.EpFacts{Name: ep.EP, Library: ep.Path})
			}
		}
		if err := a.Print.JSON(jsonout.List(out)); err != nil || len(runtimes) > 0 {
			return err
		}
	}
	if len(runtimes) == 0 {
		a.Print.Failure(exit.Hint(
			errors.New("probe: no runtime with a known execution provider found"),
			"install one: pip install --no-deps --target runtime onnxruntime "+
				"onnxruntime-ep-openvino, and look again with --runtime runtime"))
		return exit.Status(exit.NotFound)
	}
	for _, r := range runtimes {
		a.Print.Line("# ONNX Runtime %s", term.TextOrDash(r.ORTVersion))
		for _, ep := range r.EPs {
			a.Print.Line("# %s: %s", term.Printable(ep.EP), term.Printable(ep.Path))
		}
		text, err := tomlString(r.Directory)
		if err != nil {
			return err
		}
		a.Print.Line("[[runtime]]\ndirectory = %s\n", text)
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

func printRuntime(p *term.Printer, r *wire.RuntimeFacts) {
	state := term.WithPrefix(", ", r.GetState()) + term.WithPrefix(", watched: ", r.GetWatched())
	if r.GetProbedMs() != 0 {
		state += ", probed " + p.When(r.GetProbedMs())
	}
	p.Line("%s: ONNX Runtime %s%s", term.TextOrDash(r.GetDirectory()),
		term.TextOrDash(r.GetOrtVersion()), state)
	if r.GetError() != "" {
		p.Line("  not usable: %s", term.Printable(r.GetError()))
	}
	for i, change := range r.GetChanges() {
		if i == 0 {
			p.Line("  changed since the probe before it, %s:", p.When(r.GetPreviousMs()))
		}
		p.Line("    %s", term.Printable(change))
	}
	for _, ep := range r.GetEps() {
		p.Line("  %s %s", term.Printable(ep.GetName()), term.Printable(ep.GetVersion()))
		if ep.GetError() != "" {
			p.Line("    not usable: %s", term.Printable(ep.GetError()))
		}
		if version := ep.GetDriverVersion(); version != "" {
			if source := ep.GetDriverSource(); source != "" {
				version += " (from " + source + ")"
			}
			p.Line("    driver %s", term.Printable(version))
		}
		if ep.GetError() == "" && len(ep.GetDevices()) == 0 {
			p.Line("    no device on this machine; epcachectl doctor says why")
		}
		for _, d := range ep.GetDevices() {
			p.Line("    %s %s (vendor %04x, device %04x)%s", term.TextOrDash(d.GetType()),
				term.TextOrDash(d.GetVendor()), d.GetVendorId(), d.GetDeviceId(), fingerprint(d))
		}
	}
}

func sandboxSummary(lines []string) string {
	var missing []string
	for _, line := range lines {
		if name, _, is := strings.Cut(line, ": NOT IN EFFECT: "+
			""); is { // the system does not support it
			missing = append(missing, name)
		}
	}
	switch {
	case len(lines) == 0:
		return "-"
	case len(missing) == 0:
		return "all in effect"
	}
	return term.Printable("not in effect: " + strings.Join(missing, ", ") + " (epcachectl probe " +
		"says more)")
}

func fingerprint(d *wire.DeviceFacts) string {
	switch {
	case d.GetError() != "":
		return ": cannot compile: " + term.Printable(d.GetError())
	case d.GetSdkVersion() != "":
		return fmt.Sprintf(": SDK %s, %s", term.Printable(d.GetSdkVersion()),
			term.TextOrDash(d.GetHardwareArchitecture()))
	}
	return ""
}

// sourcelessLine returns how many builds only a request can recompile, and why; "" for none.
func sourcelessLine(s *wire.Sourceless) string {
	if s.GetBuilds() == 0 {
		return ""
	}
	var why []string
	for _, one := range s.GetWhy() {
		why = append(why, fmt.Sprintf("%d: %s", one.GetBuilds(), term.Printable(one.GetText())))
	}
	return fmt.Sprintf("%d of %s cannot be recompiled in the background (%s)", s.GetBuilds(),
		term.Count(s.GetLooked(), "build"), strings.Join(why, "; "))
}
