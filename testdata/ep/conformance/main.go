//go:build linux && (amd64 || arm64)

// Command conformance holds an execution provider (EP) to ONNX Runtime's guidelines: those for
// EPContext models and those for plugin libraries. It is for authors of EPs:
//
//	go run ./testdata/ep/conformance ./libmy_ep.so --runtime venv --option target=sim
//
// Each guideline is a few calls of ONNX Runtime's C API with what is expected of them, and a record
// of what happened. Each is proved in a process of its own, so that a crash or a hang is a result.
// These processes are not kept from anything, because the library is the caller's own: do not run
// the command on a library that you do not trust.
//
// Start reading at examine and at the rows in generation.go.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/workerproto"
)

var errBroken = errors.New("a guideline is broken that is required")

func main() {
	if os.Getenv(childVariable) != "" {
		child()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		if !errors.Is(err, errBroken) { // the report has said so
			fmt.Fprintln(os.Stderr, "conformance:", err)
		}
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	var runtime, ep string
	var options []string
	var inJSON bool
	cmd := &cobra.Command{
		Use:   "conformance LIBRARY [--runtime DIR] [--ep EP[:DEVICE]] [--option K=V]...",
		Short: "hold an execution provider to ONNX Runtime's guidelines",
		Long: `conformance holds the plugin LIBRARY of an execution provider to the guidelines of
ONNX Runtime's pages on EPContext models and plugin libraries. Where one does not hold it prints
which call was made, what was expected and what happened. The exit status is 1 where a required
guideline is broken.

ONNX Runtime is the one in --runtime DIR, else the nearest in a directory above LIBRARY that not all
users may write.`,
		Example: "  go run ./testdata/ep/conformance ./libmy_ep.so --runtime venv --option " +
			"target=sim",
		Args:          cobra.ExactArgs(1),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			j, err := newJob(args[0], runtime, ep, options)
			if err != nil {
				return err
			}
			return run(cmd.Context(), cmd.OutOrStdout(), j, inJSON)
		},
	}
	cmd.Flags().StringVar(&runtime, "runtime", "", "the directory `DIR` that has ONNX Runtime")
	cmd.Flags().StringVar(&ep, "ep", "",
		"the execution provider's name, if the library has several, and the device: `EP[:DEVICE]`")
	cmd.Flags().StringArrayVar(&options, "option", nil, "provider option `K=V`; repeatable")
	cmd.Flags().BoolVar(&inJSON, "json", false, "print the report as JSON")
	return cmd
}

func newJob(library, runtime, ep string, options []string) (job, error) {
	library, err := filepath.Abs(library)
	if err != nil {
		return job{}, err
	}
	if _, err := os.Stat(library); err != nil {
		return job{}, err
	}
	j := job{limit: timeLimit}
	if j.ep, err = parseEP(ep); err != nil {
		return job{}, err
	}
	j.ep.Library, j.ep.Options = library, map[string]string{}
	for _, o := range options {
		key, value, ok := strings.Cut(o, "=")
		if !ok || key == "" {
			return job{}, fmt.Errorf("--option: %q is not K=V", o)
		}
		j.ep.Options[key] = value
	}
	r, err := runtimeFor(library, runtime)
	if err != nil {
		return job{}, fmt.Errorf("%w\nname a directory that has ONNX Runtime: --runtime DIR", err)
	}
	j.ortLibrary = r.ORTLibrary
	return j, nil
}

// parseEP reads EP[:DEVICE], as epcachectl get --ep has it. No text is an EP without a name.
func parseEP(text string) (workerproto.EP, error) {
	name, device, narrowed := strings.Cut(text, ":")
	ep := workerproto.EP{Name: name}
	if !narrowed {
		return ep, nil
	}
	d := workerproto.DeviceSelector{Metadata: map[string]string{}}
	for i, part := range strings.Split(device, ",") {
		key, value, pair := strings.Cut(part, "=")
		id, isID := map[string]*uint32{"vendor": &d.VendorID, "device": &d.DeviceID}[key]
		switch {
		case isID:
			n, err := strconv.ParseUint(value, 0, 32)
			if err != nil || n == 0 {
				return ep, fmt.Errorf("--ep: %q is not an id such as 0x8086", part)
			}
			*id = uint32(n)
		case pair && key != "":
			d.Metadata[key] = value
		case i == 0 && part != "":
			d.Type = part
		default:
			return ep, fmt.Errorf("--ep: %q is not EP[:DEVICE]", text)
		}
	}
	ep.Devices = []workerproto.DeviceSelector{d}
	return ep, nil
}

// runtimeFor finds the ONNX Runtime in dir, or in the nearest directory above the library that has
// one. It skips directories such as /tmp, because any user may have put a library there.
func runtimeFor(library, dir string) (compilers.Runtime, error) {
	if dir != "" {
		return compilers.FindORT(dir)
	}
	for directory := filepath.Dir(library); ; directory = filepath.Dir(directory) {
		r, err := compilers.FindORT(directory)
		if err == nil && !allMayWrite(directory) && !allMayWrite(filepath.Dir(r.ORTLibrary)) {
			return r, nil
		}
		if directory == filepath.Dir(directory) {
			return r, fmt.Errorf("%q: libonnxruntime.so*: %w in any directory above it",
				library, compilers.ErrNotFound)
		}
	}
}

func allMayWrite(dir string) bool {
	info, err := os.Stat(dir)
	return err != nil || info.Mode().Perm()&0o002 != 0
}

func run(ctx context.Context, w io.Writer, j job, inJSON bool) error {
	if !inJSON {
		section := ""
		j.found = func(f Finding) {
			if f.Section != section {
				section = f.Section
				fmt.Fprintln(w, section)
			}
			printFinding(w, f)
		}
	}
	report, err := examine(ctx, j)
	if err != nil {
		return err
	}
	if inJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		enc.SetEscapeHTML(false)
		err = enc.Encode(report)
	} else {
		printSummary(w, report)
	}
	if err == nil && report.broken() {
		return errBroken
	}
	return err
}

func printFinding(w io.Writer, f Finding) {
	text := f.Name
	if f.Level != Required {
		text += " (" + f.Level + ")"
	}
	if f.Reason != "" {
		text += ": " + printable(f.Reason)
	}
	fmt.Fprintf(w, "  %-15s %s\n", f.Outcome, text)
	if f.Outcome != Broken {
		return
	}
	for _, call := range f.Calls {
		if call.OK {
			fmt.Fprintf(w, "      %s: %s\n", printable(call.Call), printable(call.Happened))
			continue
		}
		fmt.Fprintf(w, "      %s\n        expected: %s\n        happened: %s\n",
			printable(call.Call), printable(call.Expected), printable(call.Happened))
	}
	fmt.Fprintf(w, "      see %s\n", f.Page)
}

func printSummary(w io.Writer, r Report) {
	var holds, broken, required int
	for _, f := range r.Findings {
		switch {
		case f.Outcome == Holds:
			holds++
		case f.Outcome == Broken:
			broken++
			if f.Level == Required {
				required++
			}
		}
	}
	fmt.Fprintf(w, "%s in %s, on %s, with ONNX Runtime %s and models of %s:\n", printable(r.EP),
		printable(r.Library), printable(r.Device), printable(r.ORTVersion), r.Model)
	fmt.Fprintf(w, "%d guidelines: %d hold, %d broken (%d of them required), %d not applicable\n",
		len(r.Findings), holds, broken, required, len(r.Findings)-holds-broken)
}

// printable quotes a text of the library's that would not stay on its line.
func printable(text string) string {
	if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(text)
	}
	return text
}
