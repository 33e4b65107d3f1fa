//go:build linux && (amd64 || arm64)

// Command conformance holds an execution provider (EP) to ONNX Runtime's guidelines, and prints a
// certificate. It is for authors of EPs:
//
//	go run ./testdata/ep/conformance --older ./1.0/libmy_ep.so --option target=sim ./libmy_ep.so
//
// The guidelines are in compilers/conformance/certificate. Each is tried in a process of its own,
// of this program. These processes are not kept from anything, because the library is the caller's
// own: do not run the command on a library that you do not trust.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"unicode"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/conformance"
	"github.com/epcached/epcached/compilers/conformance/certificate"
	"github.com/epcached/epcached/compilers/workerproto"
)

// Exit statuses, besides 0 and 1: by the highest level of which a guideline does not hold.
var statuses = map[string]int{certificate.Required: 9, certificate.Recommended: 10,
	certificate.Optional: 11}

func main() {
	if len(os.Args) == 2 && os.Args[1] == "conformance" {
		work()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	c, err := run(ctx, os.Stdout, os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	default:
		os.Exit(statuses[c.BrokenLevel()])
	}
}

// work is the part that loads the library. It ends without destructors of C, because libraries
// crash in them.
func work() {
	runtime.LockOSThread() // some vendors' code keeps state per thread
	defaultSignals()
	syscall.CloseOnExec(answersFD)
	if err := conformance.Serve(os.Stdin, os.NewFile(answersFD, "answers")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

const answersFD = 3

// defaultSignals lets the kernel end the process on a crash, without a dump. Go's handlers would
// end it with a status that does not show the signal.
func defaultSignals() {
	var action [64]byte // struct sigaction of the kernel, all zero: SIG_DFL
	const sizeOfSigset = 8
	for _, s := range []syscall.Signal{unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL,
		unix.SIGABRT, unix.SIGTRAP, unix.SIGSYS} {
		_, _, _ = syscall.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(s),
			uintptr(unsafe.Pointer(&action)), 0, sizeOfSigset, 0, 0)
	}
	_ = syscall.Setrlimit(unix.RLIMIT_CORE, &syscall.Rlimit{Cur: 1, Max: 1})
}

func run(ctx context.Context, w io.Writer, args []string) (certificate.Certificate, error) {
	flags := flag.NewFlagSet("conformance [flags] LIBRARY", flag.ContinueOnError)
	dir := flags.String("runtime", "", "the `directory` that has ONNX Runtime; otherwise the "+
		"nearest above LIBRARY that not all users may write")
	name := flags.String("ep", "", "the execution provider, if the library has several: "+
		"`EP[:TYPE]`")
	inJSON := flags.Bool("json", false, "print the certificate as JSON")
	j := certificate.Job{Limit: certificate.TimeLimit, Suite: suite()}
	flags.StringVar(&j.Older, "older", "", "`library` of an older version, to try builds of each "+
		"with the other")
	options := map[string]string{}
	flags.Func("option", "provider option `K=V`; repeatable", func(text string) error {
		key, value, ok := strings.Cut(text, "=")
		if !ok || key == "" {
			return fmt.Errorf("%q is not K=V", text)
		}
		options[key] = value
		return nil
	})
	if err := flags.Parse(args); err != nil {
		return certificate.Certificate{}, err
	}
	if flags.NArg() != 1 {
		return certificate.Certificate{}, fmt.Errorf("accepts 1 library, received %d: "+
			"flags stand before it", flags.NArg())
	}
	var err error
	ep, device, narrowed := strings.Cut(*name, ":")
	j.EP = workerproto.EP{Name: ep, Library: flags.Arg(0), Options: options}
	if narrowed {
		j.EP.Devices = []workerproto.DeviceSelector{{Type: device}}
	}
	for _, path := range []*string{&j.EP.Library, &j.Older} {
		if *path == "" {
			continue
		}
		if *path, err = filepath.Abs(*path); err == nil {
			_, err = os.Stat(*path)
		}
		if err != nil {
			return certificate.Certificate{}, err
		}
	}
	r, err := runtimeFor(j.EP.Library, *dir)
	if err != nil {
		return certificate.Certificate{}, fmt.Errorf("%w\nname a directory that has ONNX "+
			"Runtime: --runtime DIR", err)
	}
	j.ORTLibrary = r.ORTLibrary
	if j.Worker, err = os.Executable(); err != nil {
		return certificate.Certificate{}, err
	}
	return certify(ctx, w, j, *inJSON)
}

// suite is the commit that this program was built from.
func suite() string {
	info, _ := debug.ReadBuildInfo()
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return info.Main.Version
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

func certify(ctx context.Context, w io.Writer, j certificate.Job, inJSON bool) (
	certificate.Certificate, error) {
	section := ""
	if !inJSON {
		j.Found = func(f certificate.Finding) {
			if f.Section != section {
				section = f.Section
				fmt.Fprintln(w, section)
			}
			printFinding(w, f)
		}
	}
	c, err := certificate.Examine(ctx, j)
	switch {
	case err != nil:
	case inJSON:
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		enc.SetEscapeHTML(false)
		err = enc.Encode(c)
	default:
		printSummary(w, c)
	}
	return c, err
}

func printFinding(w io.Writer, f certificate.Finding) {
	text := f.Name
	if f.Level != certificate.Required {
		text += " (" + f.Level + ")"
	}
	if f.Reason != "" && f.Outcome == workerproto.NotApplicable {
		text += ": " + printable(f.Reason)
	}
	fmt.Fprintf(w, "  %-15s %s\n", f.Outcome, text)
	if f.Outcome != workerproto.Broken {
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
	fmt.Fprintf(w, "      says: %s\n", f.Says)
	if f.Page != "" {
		fmt.Fprintf(w, "      see %s\n", f.Page)
	}
}

func printSummary(w io.Writer, c certificate.Certificate) {
	for _, row := range [][2]string{{"execution provider", c.EP + " " + c.Library.Version},
		{"library", c.Library.Path}, {"sha256", c.Library.SHA256}, {"vendor", c.Library.Vendor},
		{"options", strings.TrimPrefix(fmt.Sprint(c.Options), "map")}, {"SDK", c.Library.SDK},
		{"hardware", c.Hardware}, {"compatibility string", c.Compatibility},
		{"device", c.Device}, {"driver", c.Driver}, {"ONNX Runtime", c.ORTVersion},
		{"models", c.Model}, {"host", c.Host}, {"suite", c.Suite}, {"date", c.Date}} {
		if row[1] == "" {
			row[1] = "-"
		}
		fmt.Fprintf(w, "%-20s %s\n", row[0], printable(row[1]))
	}
	if c.Older != nil {
		fmt.Fprintf(w, "%-20s %s, SDK %s, sha256 %s\n", "older version", printable(c.Older.Path),
			printable(c.Older.SDK), c.Older.SHA256)
	}
	for _, level := range certificate.Levels {
		n := c.Summary[level]
		fmt.Fprintf(w, "%-20s %d hold, %d broken, %d not applicable\n", level,
			n[workerproto.Holds], n[workerproto.Broken], n[workerproto.NotApplicable])
	}
}

// printable quotes a text of the library's that would not stay on its line.
func printable(text string) string {
	if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(text)
	}
	return text
}
