package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cmd/epcachectl/internal/daemon"
	"github.com/epcached/epcached/cmd/epcachectl/internal/program"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Examination examines the libraries that an application loads.
type Examination struct {
	Client    *unixsock.Client // nil: no daemon
	ownDaemon bool             // the daemon runs as this user
	socket    string           // that --socket names
	findings
}

// runtime examines a directory without loading its libraries.
func (x *Examination) runtime(ctx context.Context, dir string) {
	subject := "runtime " + dir
	r, err := compilers.Find(dir)
	if err != nil {
		x.problem(subject, err.Error()+"; an application finds no execution provider there either",
			"install one: pip install --no-deps --target DIR onnxruntime onnxruntime-ep-openvino")
		return
	}
	for _, ep := range r.EPs {
		v := packageVersion(ep)
		if text, hint := incompatibility(ep.EP, v, r.ORTVersion); text != "" {
			x.problem(subject, text, hint)
			continue
		}
		x.ok(subject, "%s %s with ONNX Runtime %s", ep.EP, term.TextOrDash(v),
			term.TextOrDash(r.ORTVersion))
	}
	x.CheckKnown(ctx, subject, r)
}

// CheckKnown checks that the daemon has the application's libraries, because it serves builds only
// for runtimes that it can judge.
func (x *Examination) CheckKnown(ctx context.Context, subject string, r compilers.Runtime) {
	if x.Client == nil {
		return
	}
	reply, err := unixsock.Ask[wire.ProbeReply](ctx, x.Client, &wire.Probe{}, nil)
	if err != nil {
		x.warning(subject, fmt.Sprintf("the daemon does not list its runtimes: %v", err), "see "+
			""+daemon.LogOf(unixsock.DefaultSocket()))
		return
	}
	for _, ep := range r.EPs {
		at := daemonsRuntime(ctx, reply.GetRuntimes(), ep)
		switch {
		case at != nil && at.GetError() != "":
			x.problem(subject, fmt.Sprintf("the daemon has its %s, and cannot use it: "+
				"%s", ep.EP, term.KeepEnd(at.GetError())), "see epcachectl probe")
		case at != nil:
			x.ok(subject, "the daemon has its %s", ep.EP)
		case x.ownDaemon:
			x.ok(subject, "the daemon does not know its %s yet, but uses it when a request "+
				"names it", ep.EP)
		default:
			x.ok(subject, "the daemon has no equal %s: applications compile their models "+
				"themselves, once, and the daemon stores the builds for this user; to compile "+
				"for all users, add [[runtime]] with directory = %q to the daemon's "+
				"configuration", ep.EP, r.Directory)
		}
	}
}

// daemonsRuntime finds the runtime with the library, or with an equal one.
func daemonsRuntime(ctx context.Context, all []*wire.RuntimeFacts,
	ep compilers.EPLibrary) *wire.RuntimeFacts {
	digest, err := runtimes.LibraryDigest(ctx, ep)
	own, statErr := os.Stat(ep.Path)
	for _, r := range all {
		for _, has := range r.GetEps() {
			its, err2 := os.Stat(has.GetLibrary())
			same := has.GetLibrary() == ep.Path || statErr == nil && err2 == nil &&
				os.SameFile(own, its)
			if has.GetName() == ep.EP &&
				(same || err == nil && has.GetLibraryDigest() == digest.String()) {
				return r
			}
		}
	}
	return nil
}

// packageVersion returns the version of the Python package of a library; "" if pip did not install
// it.
func packageVersion(ep compilers.EPLibrary) string {
	info, _ := compilers.EPByName(ep.EP)
	for dir := filepath.Dir(ep.Path); filepath.Dir(dir) != dir; dir = filepath.Dir(dir) {
		if !slices.Contains(info.Packages, filepath.Base(dir)) {
			continue
		}
		found, err := filepath.Glob(dir + "-*.dist-info")
		if err != nil || len(found) == 0 {
			return ""
		}
		version := strings.TrimPrefix(found[0], dir+"-")
		return strings.TrimSuffix(version, ".dist-info")
	}
	return ""
}

const (
	pythonTimeout = 2 * time.Minute
	pythonOutput  = 1 << 20 // bytes kept of its output
)

// python examines a Python with the doctor of epcache, so that both doctors report the same. A
// Python without epcache gets the one beside this program.
func (x *Examination) python(ctx context.Context, path string) {
	found, err := askEpcache(ctx, path, x.socket)
	if err != nil {
		x.problem("python "+path, fmt.Sprintf("it cannot be run: %v", err), "name the Python "+
			"program, 3.10 or later, that starts the application")
	}
	x.List = append(x.List, found...)
}

func askEpcache(ctx context.Context, python, socket string) ([]Finding, error) {
	ctx, cancel := context.WithTimeout(ctx, pythonTimeout)
	defer cancel()
	args := []string{"-m", "epcache", "doctor", "--application", "--json"}
	if socket != "" {
		args = append(args, "--socket", socket)
	}
	cmd := exec.CommandContext(ctx, python, args...)
	cmd.WaitDelay = time.Second // its children may keep its output open
	cmd.Env = os.Environ()
	if dir, err := program.PythonPackages(); err == nil { // otherwise it may have its own epcache
		path := dir + string(os.PathListSeparator) + os.Getenv("PYTHONPATH")
		cmd.Env = append(cmd.Env, "PYTHONPATH="+strings.TrimRight(path, ":"))
	}
	out, errs := compilers.Tail{Limit: pythonOutput}, compilers.Tail{Limit: pythonOutput}
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("it did not end within %v", pythonTimeout)
	}
	var found Result
	if wrong := json.Unmarshal([]byte(out.String()), &found); wrong == nil &&
		len(found.Findings) > 0 {
		return found.Findings, nil // the exit status is not 0 if there are problems
	}
	lines := strings.Split(strings.TrimSpace(errs.String()), "\n")
	if last := strings.TrimSpace(lines[len(lines)-1]); last != "" {
		return nil, fmt.Errorf("%w: %s", cmp.Or(err, errNoAnswer), last)
	}
	return nil, cmp.Or(err, errNoAnswer)
}

var errNoAnswer = errors.New("it printed no findings")

// incompatibleReleases are releases of EPs and ONNX Runtime that do not work together.
var incompatibleReleases = []struct {
	ep       string
	versions []string          // of the Python package
	broken   func([2]int) bool // by ONNX Runtime's major and minor version
	because  string
	hint     string
}{
	{"OpenVINOExecutionProvider", []string{"1.7.0", "1.8.0"},
		func(ort [2]int) bool { return slices.Compare(ort[:], []int{1, 31}) >= 0 },
		"it needs a function that only earlier ONNX Runtimes have",
		"install 1.8.1 or later of it, or onnxruntime 1.24.4 to 1.28.0 beside it"},
	{"QNNExecutionProvider", []string{"2.3.0"},
		func(ort [2]int) bool { return ort != [2]int{1, 24} },
		"it was built for ONNX Runtime 1.24.4",
		"install 2.4.0 or later of it, or onnxruntime 1.24.4 beside it"},
}

// incompatibility returns why an execution provider does not start with an ONNX Runtime, with the
// remedy; "" if no problem is known.
func incompatibility(ep, version, ort string) (text, hint string) {
	var numbers [2]int
	if _, err := fmt.Sscanf(ort, "%d.%d", &numbers[0], &numbers[1]); err != nil {
		return "", ""
	}
	for _, m := range incompatibleReleases {
		if m.ep == ep && slices.Contains(m.versions, version) && m.broken(numbers) {
			return fmt.Sprintf("%s %s does not start with ONNX Runtime %s: %s", ep, version, ort,
				m.because), m.hint
		}
	}
	return "", ""
}
