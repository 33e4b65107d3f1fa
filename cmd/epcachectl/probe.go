package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newProbe(a *cli.Call) *cobra.Command {
	var find, refresh bool
	var runtime, library string
	asked := &acquire.Request{}
	cmd := &cobra.Command{
		Use:   "probe [--find] [--runtime DIR] [--conformance LIBRARY]",
		Short: "print runtimes, execution providers and devices",
		Long: `probe prints which runtimes the daemon has, with their execution providers, the devices that these can compile for, and
their drivers; what is different from the probe before; how changes are noticed; and what keeps the providers' code from doing
harm on this machine. --refresh looks again even if nothing
seems to have changed. --json prints a list of the runtimes; what workers are kept to is in status --json.

--find needs no daemon: it looks for runtimes in well-known places and in Python environments, loads nothing of
them, and prints configuration for epcached --config.

--conformance is for authors of execution providers, and needs no daemon: it holds the plugin LIBRARY to
the guidelines of ONNX Runtime's pages on EPContext models and plugin libraries. Where one does not hold
it tells which call was made, what was expected and what happened. The exit status is 1 where a
guideline is broken that is required.

Every call is made in a worker process (epcached-ort). ONNX Runtime is the one in --runtime DIR, else
the nearest in a folder above LIBRARY that not all users may write. --ep EP[:DEVICE] and
--option K=V say what to try.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl probe
  epcachectl probe --find >> epcached.toml
  epcachectl probe --conformance ./libmy_ep.so --runtime venv --option target=sim`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if library != "" {
				if find || refresh {
					return exit.Usagef("--conformance goes with --runtime, --ep and --option")
				}
				return conformance(cmd.Context(), a, library, runtime, asked)
			}
			if asked.Given() {
				return exit.Usagef("--ep and --option go with --conformance")
			}
			if find {
				return findRuntimes(cmd.Context(), a, runtime)
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return probe(ctx, a, c, &wire.Probe{Refresh: refresh}, runtime)
			})
		},
	}
	cmd.Flags().BoolVar(&find, "find", false, "look for runtimes on this machine, and print configuration")
	cmd.Flags().BoolVar(&refresh, "refresh", false, "probe again")
	cmd.Flags().StringVar(&runtime, "runtime", "", "only the runtime in `DIR`")
	cmd.Flags().StringVar(&library, "conformance", "", "hold the plugin `LIBRARY` of an execution provider to ONNX Runtime's guidelines")
	cmd.Flags().Var(cli.Each(asked.AddEP, "EP[:DEVICE]"), "ep", "with --conformance: the execution provider's name, if the library has several, and the device")
	cmd.Flags().Var(cli.Each(asked.AddOption, "K=V"), "option", "with --conformance: provider option; repeatable")
	return cmd
}

func probe(ctx context.Context, a *cli.Call, c *unixsock.Client, p *wire.Probe, runtime string) error {
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
		a.Print.Hint("the daemon has no runtime; find some with: epcachectl probe --find")
	}
	return nil
}

// tomlString spells a path as people write it, and leaves the odd ones to those who know all rules.
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
		a.Print.Failure(exit.Hint(errors.New("probe: no runtime with a known execution provider found"),
			"install one: pip install --no-deps --target runtime onnxruntime onnxruntime-ep-openvino, and look again with --runtime runtime"))
		return exit.Status(exit.NotFound)
	}
	for _, r := range runtimes {
		a.Print.Line("# ONNX Runtime %s", term.OrDash(r.ORTVersion))
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
	state := term.After(", ", r.GetState()) + term.After(", watched: ", r.GetWatched())
	if r.GetProbedMs() != 0 {
		state += ", probed " + term.Time(r.GetProbedMs())
	}
	p.Line("%s: ONNX Runtime %s%s", term.OrDash(r.GetDirectory()), term.OrDash(r.GetOrtVersion()), state)
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
		if version := ep.GetDriverVersion(); version != "" {
			if source := ep.GetDriverSource(); source != "" {
				version += " (from " + source + ")"
			}
			p.Line("    driver %s", term.Printable(version))
		}
		for _, d := range ep.GetDevices() {
			p.Line("    %s %s (vendor %04x, device %04x)%s", term.OrDash(d.GetType()), term.OrDash(d.GetVendor()), d.GetVendorId(), d.GetDeviceId(), fingerprint(d))
		}
	}
}

func sandboxSummary(lines []string) string {
	var missing []string
	for _, line := range lines {
		if name, _, is := strings.Cut(line, ": NOT IN FORCE: "); is { // this system has no means for it
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

// conform is replaced in tests.
var conform = func(ctx context.Context, job compilers.ConformanceJob) (compilers.Conformance,
	error) {
	worker := compilers.NewORT(compilers.ORTOptions{Worker: os.Getenv(acquire.WorkerVariable)})
	defer worker.Close() // its jobs have ended
	return worker.Conformance(ctx, job)
}

func conformance(ctx context.Context, a *cli.Call, library, dir string, asked *acquire.Request) error {
	library, err := filepath.Abs(library)
	if err != nil {
		return err
	}
	if _, err := os.Stat(library); err != nil {
		return exit.During("probe", fmt.Errorf("--conformance %q: %w", library, modelfile.PlainPathError(err)))
	}
	r, err := runtimeFor(library, dir)
	if err != nil {
		return exit.Hint(exit.During("probe", err),
			"name a folder that has ONNX Runtime: --runtime DIR")
	}
	ep, err := asked.OneEP()
	if err != nil {
		return err
	}
	ep.Library = library
	job := compilers.ConformanceJob{Runtime: r, EP: ep}
	if !a.JSON {
		section := ""
		job.Told = func(f compilers.Finding) {
			if f.Section != section {
				section = f.Section
				a.Print.Line("%s", term.Printable(section))
			}
			printGuideline(a.Print, f)
		}
	}
	result, err := conform(ctx, job)
	if err != nil {
		return err
	}
	if a.JSON {
		err = a.Print.JSON(result)
	} else {
		printConformance(a.Print, result)
	}
	if err == nil && result.Broken() {
		return exit.Status(exit.Failed)
	}
	return err
}

// runtimeFor finds the ONNX Runtime in dir, or in the nearest folder above the library that has
// one. It skips folders such as /tmp, because any user may have put a library there.
func runtimeFor(library, dir string) (compilers.Runtime, error) {
	if dir != "" {
		return compilers.FindORT(dir)
	}
	for folder := filepath.Dir(library); ; folder = filepath.Dir(folder) {
		r, err := compilers.FindORT(folder)
		if err == nil && !allMayWrite(folder) && !allMayWrite(filepath.Dir(r.ORTLibrary)) {
			return r, nil
		}
		if folder == filepath.Dir(folder) {
			return r, fmt.Errorf("--conformance %q: libonnxruntime.so*: %w in any folder above it",
				library, compilers.ErrNotFound)
		}
	}
}

func allMayWrite(dir string) bool {
	info, err := os.Stat(dir)
	return err != nil || info.Mode().Perm()&0o002 != 0
}

func printGuideline(p *term.Printer, f compilers.Finding) {
	text := term.Printable(f.Name)
	if f.Level != compilers.Required {
		text += " (" + f.Level + ")"
	}
	text += term.After(": ", f.Reason)
	p.Line("  %-15s %s", f.Outcome, text)
	if f.Outcome != compilers.GuidelineBroken {
		return
	}
	for _, call := range f.Calls {
		if call.OK {
			p.Line("      %s: %s", term.Printable(call.Call), term.Printable(call.Happened))
			continue
		}
		p.Line("      %s\n        expected: %s\n        happened: %s", term.Printable(call.Call),
			term.Printable(call.Expected), term.Printable(call.Happened))
	}
	p.Line("      see %s", f.Page)
}

func printConformance(p *term.Printer, c compilers.Conformance) {
	var holds, broken, required int
	for _, f := range c.Findings {
		switch {
		case f.Outcome == compilers.GuidelineHolds:
			holds++
		case f.Outcome == compilers.GuidelineBroken:
			broken++
			if f.Level == compilers.Required {
				required++
			}
		}
	}
	p.Line("%s in %s, on %s, with ONNX Runtime %s and models of %s:", term.Printable(c.EP),
		term.Printable(c.Library), term.Printable(c.Device), term.Printable(c.ORTVersion), c.Model)
	p.Line("%d guidelines: %d hold, %d broken (%d of them required), %d not applicable",
		len(c.Findings), holds, broken, required, len(c.Findings)-holds-broken)
}

// sourcelessLine says how many builds only a request can have compiled again, and why; "" for none.
func sourcelessLine(s *wire.Sourceless) string {
	if s.GetBuilds() == 0 {
		return ""
	}
	var why []string
	for _, one := range s.GetWhy() {
		why = append(why, fmt.Sprintf("%d: %s", one.GetBuilds(), term.Printable(one.GetText())))
	}
	return fmt.Sprintf("%d of %s cannot be compiled again without a request (%s)", s.GetBuilds(),
		term.Counted(s.GetLooked(), "build"), strings.Join(why, "; "))
}
