package compilers

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/compilers/workerproto"
)

// Tool is a vendor's own compiler: a program that compiles an ONNX model to an EPContext model.
//
// Arguments may hold placeholders:
//
//	{model} {output} {folder}  absolute paths: the source model, the graph to write, the directory
//	                           that takes all output
//	{ep}                       the EP's name
//	{embed}                    1 for a context inside the graph, else 0
//	{level}                    graph optimization level
//	{option:NAME}              a provider option; {session:NAME} a session config entry;
//	                           {dim:NAME} the size of a free dimension
//	{options} {sessions} {dims} all of them: an argument NAME=VALUE for each, in the order of the
//	                           names; the whole argument is this placeholder
//
// An argument is left out if the request has no value for its placeholder. A request with a value
// that has no placeholder is refused, because no option may be ignored. "{{" is a brace.
type Tool struct {
	// EP is the canonical name of the EP that loads its contexts. The tool compiles all of that
	// EP's models.
	EP      string
	Program string   // absolute path
	Args    []string // with placeholders
	// Version has the arguments with which the program prints its version in the first line; empty:
	// it has none.
	Version []string
	Files   []string // absolute paths of more files that identify it, such as its libraries
	Read    []string // absolute paths that it may read, besides its own directory
	Device  string   // type of the device that it compiles for: "CPU", "GPU" or "NPU"; empty: NPU
	// Alone uses the tool also for runtimes without the EP's library, which only applications have.
	// Its builds are not loaded by the daemon.
	Alone bool
}

var placeholder = regexp.MustCompile(`\{\{|\{([a-z]+)(?::([^{}]*))?\}|[{}]`)

// The placeholders: plain ones, those with a name (named), and those for all values of a kind
// (plural).
var (
	plain  = []string{"model", "output", "folder", "ep", "embed", "level"}
	named  = []string{"option", "session", "dim"}
	plural = []string{"options", "sessions", "dims"}
)

// Check validates a tool's description.
func (t Tool) Check() error {
	if t.EP == "" {
		return errors.New("no execution provider named")
	}
	for _, path := range slices.Concat([]string{t.Program}, t.Files, t.Read) {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("%q is not an absolute path", path)
		}
	}
	if !slices.Contains([]string{"", "CPU", "GPU", "NPU"}, t.Device) {
		return fmt.Errorf("device %q: it must be CPU, GPU or NPU", t.Device)
	}
	takes := map[string]bool{}
	for _, arg := range t.Args {
		for _, m := range placeholder.FindAllStringSubmatch(arg, -1) {
			if err := checkPlaceholder(arg, m); err != nil {
				return err
			}
			takes[m[1]] = true
		}
	}
	if !takes["model"] || !takes["output"] && !takes["folder"] {
		return errors.New("its arguments need {model}, and {output} or {folder}")
	}
	return nil
}

func checkPlaceholder(arg string, m []string) error {
	whole, kind, name := m[0], m[1], m[2]
	switch {
	case whole == "{{", whole == "}":
		return nil
	case slices.Contains(plain, kind) && !strings.Contains(whole, ":"):
		return nil
	case slices.Contains(named, kind) && name != "":
		return nil
	case slices.Contains(plural, kind) && arg == whole && !strings.Contains(whole, ":"):
		return nil
	case slices.Contains(plural, kind):
		return fmt.Errorf("%q: {%s} becomes several arguments, so it must be an argument of its "+
			"own", arg, kind)
	}
	return fmt.Errorf("%q: unknown placeholder %q", arg, whole)
}

// identity returns a digest of the tool's arguments, on which its output depends as on its files.
func (t Tool) identity() string {
	return fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "%q %q", t.Args, t.Version)))
}

func (t Tool) files() []string {
	return slices.Compact(slices.Sorted(slices.Values(append([]string{t.Program}, t.Files...))))
}

func (t Tool) device() DeviceFacts {
	return DeviceFacts{Type: cmp.Or(t.Device, "NPU"), Vendor: t.EP,
		EPMetadata: map[string]string{"compiler": t.Program}}
}

func (t Tool) values(job Job) map[string]map[string]string {
	dims := map[string]string{}
	for name, size := range job.FreeDimensions {
		dims[name] = strconv.FormatInt(size, 10)
	}
	return map[string]map[string]string{"option": job.EPs[0].Options, "session": job.SessionOptions,
		"dim": dims}
}

func (t Tool) refuse(job Job) error {
	takes := map[string]bool{}
	for _, arg := range t.Args {
		for _, m := range placeholder.FindAllStringSubmatch(arg, -1) {
			takes[strings.Trim(m[0], "{}")] = true
		}
	}
	values := t.values(job)
	for _, kind := range named {
		for _, name := range slices.Sorted(maps.Keys(values[kind])) {
			if !takes[kind+"s"] && !takes[kind+":"+name] {
				return fmt.Errorf("%w: %s %q: %s does not accept "+
					"one", ErrOption, kind, name, t.Program)
			}
		}
	}
	level, route := cmp.Or(job.GraphOptimizationLevel, "basic"), cmp.Or(job.Route, RouteCompileAPI)
	for what, asked := range map[string]bool{
		"embedding":                         job.Embed && !takes["embed"],
		"graph optimization level " + level: level != "basic" && !takes["level"],
		"free dimensions by denotation":     len(job.FreeDimensionsByDenotation) > 0,
		"route " + route:                    route != RouteCompileAPI,
		"a file for initializers":           job.Initializers != Initializers{},
		"a group with one shared context":   len(job.Share) > 0,
	} {
		if asked {
			return fmt.Errorf("%w: %s: %s cannot be passed on", ErrOption, what, t.Program)
		}
	}
	return nil
}

func (t Tool) arguments(job Job, model string) []string {
	values := t.values(job)
	fixed := map[string]string{"model": model, "output": filepath.Join(job.Dir, job.Output),
		"folder": job.Dir, "ep": t.EP, "embed": "0", "level": job.GraphOptimizationLevel}
	if job.Embed {
		fixed["embed"] = "1"
	}
	out := []string{t.Program}
	for _, arg := range t.Args {
		if kind := strings.Trim(arg, "{}"); slices.Contains(plural, kind) && arg == "{"+kind+"}" {
			all := values[strings.TrimSuffix(kind, "s")]
			for _, name := range slices.Sorted(maps.Keys(all)) {
				out = append(out, name+"="+all[name])
			}
			continue
		}
		if filled, ok := fill(arg, fixed, values); ok {
			out = append(out, filled)
		}
	}
	return out
}

func fill(arg string, fixed map[string]string, values map[string]map[string]string) (string, bool) {
	whole := true
	filled := placeholder.ReplaceAllStringFunc(arg, func(text string) string {
		m := placeholder.FindStringSubmatch(text)
		switch {
		case text == "{{":
			return "{"
		case m[1] == "":
			return text
		case slices.Contains(named, m[1]):
			v, there := values[m[1]][m[2]]
			whole = whole && there
			return v
		}
		v := fixed[m[1]]
		whole = whole && v != ""
		return v
	})
	return filled, whole
}

// RouteCommand is the route of builds that a vendor's tool compiled.
const RouteCommand = "command"

// ToolCompiler is a Compiler that can use Tools.
type ToolCompiler interface {
	// Equip returns the runtime as this compiler uses it: a tool that replaces an EP's library
	// becomes part of that library's identity, and so of build keys.
	Equip(r Runtime) Runtime
}

// AddTools has the models of some EPs compiled by vendors' tools instead of ONNX Runtime. Tools run
// as workers do, with the same limits and access to files. The options in the tools' arguments
// become known options. Call it before the first use of the compiler.
func (o *ORT) AddTools(tools []Tool) error {
	for _, t := range tools {
		if err := t.Check(); err != nil {
			return fmt.Errorf("compiler for %s: %w", t.EP, err)
		}
		if _, twice := o.tools[t.EP]; twice {
			return fmt.Errorf("two compilers for %s", t.EP)
		}
		o.tools[t.EP] = t
		t.registerEP()
	}
	return nil
}

func (t Tool) registerEP() {
	info := EPInfo{Name: t.EP, Options: map[string]EPOption{}}
	for _, arg := range t.Args {
		for _, m := range placeholder.FindAllStringSubmatch(arg, -1) {
			if m[1] == "option" {
				info.Options[m[2]] = EPOption{Policy: Allowed, Kind: "string"}
			}
		}
	}
	info.FingerprintOptions = slices.Sorted(maps.Keys(info.Options))
	epTable.Lock()
	defer epTable.Unlock()
	if old, known := epTable.eps[t.EP]; !known || len(old.Libraries) == 0 {
		epTable.eps[t.EP] = info
	}
}

// Equip implements ToolCompiler.
func (o *ORT) Equip(r Runtime) Runtime {
	r.EPs = slices.Clone(r.EPs)
	for _, name := range slices.Sorted(maps.Keys(o.tools)) {
		t := o.tools[name]
		i := slices.IndexFunc(r.EPs, func(l EPLibrary) bool { return l.EP == name })
		switch {
		case i >= 0:
			l := &r.EPs[i]
			l.Files, l.Tool = slices.Concat(l.Files, t.files()), t.identity()
			slices.Sort(l.Files)
			l.Files = slices.Compact(l.Files)
		case t.Alone:
			r.EPs = append(r.EPs, EPLibrary{EP: name, Path: t.Program, Files: t.files(),
				Tool: t.identity(), Absent: true})
		}
	}
	sortEPs(r.EPs)
	return r
}

func (o *ORT) toolFor(eps []EP) (Tool, bool, error) {
	for _, ep := range eps {
		t, ok := o.tools[ep.Name]
		switch {
		case ok && len(eps) > 1:
			return t, true, fmt.Errorf("%w: %s is compiled by %s, which supports no other "+
				"execution providers beside it", ErrOption, ep.Name, t.Program)
		case ok:
			return t, true, nil
		}
	}
	return Tool{}, false, nil
}

func (o *ORT) loadable(r Runtime, ep EP) bool {
	t, isTool := o.tools[ep.Name]
	if !isTool {
		return true
	}
	path := ep.Library
	if l, err := r.Library(ep.Name); path == "" && err == nil {
		path = l.Path
	}
	return path != "" && path != t.Program
}

// unloadable returns why builds for the EPs cannot be loaded on this machine, "" if they may be: an
// EP with a tool has no library here, or builds with one of the options crash the process if their
// device is absent.
func (o *ORT) unloadable(r Runtime, eps []EP) string {
	for _, ep := range eps {
		if !o.loadable(r, ep) {
			return "the library of " + ep.Name + " is not here: only applications can load its " +
				"builds"
		}
	}
	for _, ep := range eps {
		info, _ := EPByName(ep.Name)
		for name, value := range ep.Options {
			if info.Options[name].Unchecked && value == "1" && isTargetAbsent(nil, []EP{ep}) {
				return "builds with " + name + "=" + value + " do not load on a machine without " +
					"their device"
			}
		}
	}
	return ""
}

func (t Tool) compileRequest(job Job) (workerproto.Request, error) {
	req := t.request()
	req.Model, req.Output = job.Model, filepath.Join(job.Dir, job.Output)
	req.Route = RouteCommand
	req.Fill = func(model string) []string { return t.arguments(job, model) }
	return req, t.refuse(job)
}

func (t Tool) request() workerproto.Request {
	return workerproto.Request{Do: workerproto.Command, EPs: []EP{{Name: t.EP}},
		Readable: t.files(), Read: t.Read}
}

func (t Tool) outputError(err error, log string) error {
	var refused *RefusedError
	if line := LastLine(log); line != "" && errors.As(err, &refused) {
		refused.Text += ": " + line
	}
	return err
}

func (o *ORT) version(ctx context.Context, t Tool) (string, error) {
	if len(t.Version) == 0 {
		return "", nil
	}
	req := t.request()
	req.Args, req.CaptureOutput = append([]string{t.Program}, t.Version...), true
	done, err := o.scratchJob(ctx, req, Pace{}, nil)
	if err != nil {
		return "", fmt.Errorf("version: %w", t.outputError(err, done.log))
	}
	line, _, _ := strings.Cut(strings.TrimSpace(done.Printed), "\n")
	return strings.ToValidUTF8(strings.TrimSpace(line[:min(len(line), 200)]), ""), nil
}
