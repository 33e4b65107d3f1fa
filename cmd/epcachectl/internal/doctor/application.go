package doctor

import (
	"context"
	_ "embed"
	"encoding/hex"
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

func (x *Examination) python(ctx context.Context, path string) {
	subject := "python " + path
	facts := &pythonFacts{}
	if err := runPython(ctx, facts, path); err != nil {
		x.problem(subject, fmt.Sprintf("it cannot be run: %v", err), "name the Python program "+
			"that starts the application")
		return
	}
	if facts.Epcache {
		if found, err := askEpcache(ctx, path, x.socket); err == nil {
			x.List = append(x.List, found...)
			return
		}
	}
	if len(facts.Cores) > 1 {
		x.problem(subject, "several packages contain ONNX Runtime, and overwrite each other: "+
			""+strings.Join(facts.Cores, ", "), "uninstall all of them, and install one again")
	}
	r, err := compilers.Find(facts.Site)
	switch {
	case facts.Error != "":
		x.problem(subject, "ONNX Runtime cannot be imported: "+term.KeepEnd(facts.Error),
			"install it there: "+path+" -m pip install onnxruntime")
	case !facts.Plugins:
		x.problem(subject, fmt.Sprintf("ONNX Runtime %s does not support plugin execution "+
			"providers", facts.ORTVersion), "install onnxruntime 1.24 or later")
	case errors.Is(err, compilers.ErrNotFound):
		x.warning(subject, fmt.Sprintf("ONNX Runtime %s has no plugin execution provider; "+
			"sessions run on %s", facts.ORTVersion, strings.Join(facts.Providers, ", ")),
			"install one: "+path+" -m pip install onnxruntime-ep-openvino")
	case err != nil:
		x.problem(subject, err.Error(), "its directory must be readable")
	default:
		for _, ep := range r.EPs {
			if x.checkStarts(ctx, subject, path, facts, ep) {
				x.plainSessions(subject, facts, ep)
			}
		}
		x.CheckKnown(ctx, subject, r)
	}
}

func (x *Examination) checkStarts(ctx context.Context, subject, python string, facts *pythonFacts,
	ep compilers.EPLibrary) bool {
	version := packageVersion(ep)
	pair := fmt.Sprintf("%s %s starts with ONNX Runtime %s", ep.EP, term.TextOrDash(version),
		facts.ORTVersion)
	started, err := startPlugin(ctx, python, ep)
	switch {
	case err != nil:
		text, hint := incompatibility(ep.EP, version, facts.ORTVersion)
		if text == "" {
			text = strings.Replace(pair, " starts ", " does not start ", 1)
			hint = "its library may not fit this ONNX Runtime, or a library that it needs is " +
				"missing: install matching releases"
		}
		x.problem(subject, text+": "+term.KeepEnd(err.Error()), hint)
		return false
	case len(started.Devices) == 0:
		why, help := runtimes.WhyNoDevice(ep.EP)
		x.problem(subject, pair+" and lists no device, so sessions run on the CPU: "+why, help)
		return false
	}
	x.ok(subject, "%s: %s", pair, strings.Join(started.Devices, ", "))
	return true
}

// plainSessions warns of a silent fallback: a plain session that names a plugin EP without
// registering it runs on the CPU.
func (x *Examination) plainSessions(subject string, facts *pythonFacts, ep compilers.EPLibrary) {
	if slices.Contains(facts.Providers, ep.EP) {
		return
	}
	text := fmt.Sprintf("a session with providers=[%q] silently runs on the CPU: %s is a "+
		"plugin, which must be registered and whose devices must be added", ep.EP, ep.EP)
	hint := fmt.Sprintf("use epcache.InferenceSession(model, ep=%q)", ep.EP)
	if facts.Epcache {
		hint += ", which does that"
	} else {
		hint = "install epcache and " + hint +
			"; or call onnxruntime.register_execution_provider_library and " +
			"SessionOptions.add_provider_for_devices"
	}
	x.warning(subject, text, hint)
}

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

//go:embed doctor.py
var doctorScript string

const (
	// prefix of the result's line, because vendors' libraries print too
	pythonMark    = "epcachectl-doctor:"
	pythonTimeout = 60 * time.Second
	pythonOutput  = 1 << 20 // bytes kept of its output
)

type pythonFacts struct {
	Cores      []string `json:"cores"` // packages that contain onnxruntime
	Epcache    bool     `json:"epcache"`
	ORTVersion string   `json:"ort_version"`
	Site       string   `json:"site"` // the directory that contains onnxruntime
	Providers  []string `json:"providers"`
	Plugins    bool     `json:"plugins"` // it can register plugins
	Error      string   `json:"error"`
}

type pluginFacts struct {
	Devices []string `json:"devices"`
	Error   string   `json:"error"`
}

// startPlugin starts an execution provider in a process of its own, because it may crash.
func startPlugin(ctx context.Context, python string, ep compilers.EPLibrary) (*pluginFacts, error) {
	info, _ := compilers.EPByName(ep.EP)
	options, err := json.Marshal(info.Resolve(ep.Path, nil))
	if err != nil {
		return nil, err
	}
	var facts pluginFacts
	err = runPython(ctx, &facts, python, ep.EP, ep.Path,
		hex.EncodeToString(compilers.ProbeModels()[0]), string(options))
	if err == nil && facts.Error != "" {
		err = errors.New(facts.Error)
	}
	return &facts, err
}

// askEpcache runs the doctor of the Python's own epcache, so that both report the same. It fails if
// that is too old.
func askEpcache(ctx context.Context, python, socket string) ([]Finding, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*pythonTimeout)
	defer cancel()
	args := []string{"-m", "epcache", "doctor", "--application", "--json"}
	if socket != "" {
		args = append(args, "--socket", socket)
	}
	cmd := exec.CommandContext(ctx, python, args...)
	cmd.WaitDelay = time.Second // its children may keep its output open
	out := compilers.Tail{Limit: pythonOutput}
	cmd.Stdout = &out
	err := cmd.Run()
	var found Result
	if wrong := json.Unmarshal([]byte(out.String()), &found); wrong != nil ||
		len(found.Findings) == 0 {
		return nil, errors.Join(wrong, err)
	}
	return found.Findings, nil // the exit status is not 0 if there are problems
}

func runPython(ctx context.Context, to any, python string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, pythonTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, append([]string{"-c", doctorScript}, args...)...)
	cmd.WaitDelay = time.Second // its children may keep its output open
	out, errs := compilers.Tail{Limit: pythonOutput}, compilers.Tail{Limit: pythonOutput}
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if ctx.Err() != nil {
		return fmt.Errorf("it did not end within %v", pythonTimeout)
	}
	for line := range strings.Lines(out.String()) {
		if text, ok := strings.CutPrefix(line, pythonMark); ok {
			return json.Unmarshal([]byte(text), to)
		}
	}
	if err == nil {
		err = errors.New("it printed no answer")
	}
	lines := strings.Split(strings.TrimSpace(errs.String()), "\n")
	if last := strings.TrimSpace(lines[len(lines)-1]); last != "" {
		err = fmt.Errorf("%w: %s", err, last)
	}
	return err
}
