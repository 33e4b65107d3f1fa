package acquire

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Request is the request of a call without the model.
type Request struct {
	EPs             []*wire.ExecutionProvider
	optionsBeforeEP []optionFlag // options before the first --ep
	optionsWithEP   []optionFlag // options that name their EP
	sessionOptions  map[string]string
	dims            map[string]int64
	Denotations     map[string]int64
	Runtime         string
	embed           bool
	Verify          float64
	strictORT       bool
	ortVersion      string
	level           string
	route           string
	store           string
	output          *wire.Output
}

type optionFlag struct{ ep, key, value string }

// AddFlags adds the flags of a request.
func (r *Request) AddFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Var(cli.EachValue(r.AddEP, "EP[:DEVICE]"), "ep", "execution provider, such as "+
		"OpenVINOExecutionProvider:CPU; repeatable, in order of preference. To choose one of "+
		"several devices, give its ids and metadata from epcachectl probe --json: "+
		"EP:TYPE,vendor=0x8086,device=0x643e,KEY=VALUE; is_virtual=1 is a device that is not in "+
		"this machine")
	f.Var(cli.EachValue(r.AddOption, "K=V"), "option",
		"provider option of the --ep before it; EP/K=V names another; repeatable")
	f.Var(cli.EachValue(keyValue(&r.sessionOptions), "K=V"), "session-option", "session config "+
		"entry; entries that only affect running are ignored; repeatable")
	f.Var(cli.EachValue(dimension(&r.dims), "NAME=N"), "dim",
		"fix the free dimension NAME; repeatable")
	f.StringVar(&r.Runtime, "runtime", "",
		"`DIR` of the runtime that will load the model; default: the daemon's first")
	f.BoolVar(&r.embed, "embed", false, "write one file, with the context inside the graph; "+
		"loads more slowly, at most 2 GiB")
	f.BoolVar(&r.strictORT, "strict-ort", false, "only use builds compiled with exactly the "+
		"runtime's ONNX Runtime version")
	f.StringVar(&r.ortVersion, "ort-version", "", "the ONNX Runtime `VERSION` of the program "+
		"that will load the model, if it has another than the daemon's runtime")
	f.StringVar(&r.level, "optimization-level", "",
		"graph optimization `LEVEL`: disable_all, basic, extended, layout or all")
	f.StringVar(&r.route, "route", "", "compile by this `ROUTE`: compile_api or session_options")
	r.output = &wire.Output{}
	f.StringVar(&r.output.ExternalInitializersFile, "initializers-file", "",
		"`NAME` of a file of the build for initializers outside of contexts")
	f.Int64Var(&r.output.ExternalInitializersThreshold, "initializers-threshold", 0,
		"keep initializers below `BYTES` in the graph")
	f.BoolVar(&r.output.KeepInitializersInSource, "keep-initializers", false,
		"leave initializers in the model's external data, which becomes part of the build")
	f.BoolVar(&r.output.Complete, "complete", false, "fail if a node would run on the CPU")
	f.Float64Var(&r.Verify, "verify-output", 0,
		"run the compiled model once on zeros, and refuse it if a value differs from the source "+
			"model's by more than `TOLERANCE`, absolute and relative")
	f.StringVar(&r.store, "store", "", "store it as `SCOPE`: shared, user or none; can only narrow")
}

// FlagNames returns the names of the flags that AddFlags adds.
func (r *Request) FlagNames() []string {
	var names []string
	cmd := &cobra.Command{}
	(&Request{}).AddFlags(cmd)
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return names
}

// epForms has the syntax of an execution provider, for messages.
const epForms = "EP, EP:TYPE or EP:TYPE,vendor=N,device=N,K=V"

// AddEP adds an execution provider, as --ep names it.
func (r *Request) AddEP(v string) error {
	name, device, narrowed := strings.Cut(v, ":")
	if name == "" || narrowed && device == "" {
		return fmt.Errorf("%q is not %s", term.Brief(v), epForms)
	}
	ep := &wire.ExecutionProvider{Name: name}
	if narrowed {
		d := &wire.Device{}
		for i, part := range strings.Split(device, ",") {
			if i == 0 && !strings.Contains(part, "=") {
				d.Type = strings.ToUpper(part)
				continue
			}
			if err := restrictDevice(d, part); err != nil {
				return fmt.Errorf("%q is not %s: %w", term.Brief(v), epForms, err)
			}
		}
		ep.Devices = []*wire.Device{d}
	}
	r.EPs = append(r.EPs, ep)
	return nil
}

// restrictDevice adds one restriction of --ep to a device: an id, or metadata.
func restrictDevice(d *wire.Device, part string) error {
	key, value, _ := strings.Cut(part, "=")
	id, isID := map[string]*uint32{"vendor": &d.VendorId, "device": &d.DeviceId}[key]
	if !isID {
		return keyValue(&d.Metadata)(part)
	}
	n, err := strconv.ParseUint(value, 0, 32)
	if err != nil || n == 0 {
		return fmt.Errorf("%s=%s is not an id, such as 0x8086", key, term.Brief(value))
	}
	*id = uint32(n)
	return nil
}

// AddOption adds a provider option, as --option names it.
func (r *Request) AddOption(v string) error {
	key, value, ok := strings.Cut(v, "=")
	if !ok || key == "" {
		return fmt.Errorf("%q is not K=V", term.Brief(v))
	}
	if ep, rest, named := strings.Cut(key, "/"); named {
		r.optionsWithEP = append(r.optionsWithEP, optionFlag{ep, rest, value})
		return nil
	}
	if len(r.EPs) == 0 {
		r.optionsBeforeEP = append(r.optionsBeforeEP, optionFlag{"", key, value})
		return nil
	}
	return setOption(r.EPs[len(r.EPs)-1], key, value)
}

func setOption(ep *wire.ExecutionProvider, key, value string) error {
	if old, twice := ep.Options[key]; twice && old != value {
		return fmt.Errorf("option %q of %s is given twice, as %q and %q", term.Brief(key), ep.Name,
			term.Brief(old), term.Brief(value))
	}
	ep.Options = merged(ep.Options, map[string]string{key: value})
	return nil
}

func keyValue(to *map[string]string) func(string) error {
	return func(v string) error {
		key, value, ok := strings.Cut(v, "=")
		if !ok || key == "" {
			return fmt.Errorf("%q is not K=V", term.Brief(v))
		}
		*to = merged(*to, map[string]string{key: value})
		return nil
	}
}

func dimension(to *map[string]int64) func(string) error {
	return func(v string) error {
		name, text, ok := strings.Cut(v, "=")
		n, err := strconv.ParseInt(text, 10, 64)
		if !ok || name == "" || err != nil || n < 1 {
			return fmt.Errorf("%q is not NAME=N with N of 1 or more", term.Brief(v))
		}
		*to = merged(*to, map[string]int64{name: n})
		return nil
	}
}

// Complete checks the flags together.
func (r *Request) Complete() error {
	if len(r.EPs) == 0 {
		return exit.Hint(exit.Usagef("no --ep: name the execution provider"), "list execution "+
			"providers: epcachectl probe")
	}
	for _, o := range r.optionsBeforeEP {
		if len(r.EPs) > 1 {
			return exit.Usage(exit.Hint(fmt.Errorf("--option %s comes before the first of "+
				"several --ep", term.Brief(o.key)), "put it after its --ep, or write "+
				"EP/"+term.Brief(o.key)))
		}
		if err := setOption(r.EPs[0], o.key, o.value); err != nil {
			return exit.Usage(err)
		}
	}
	for _, o := range r.optionsWithEP {
		i := slices.IndexFunc(r.EPs, func(ep *wire.ExecutionProvider) bool {
			return ep.Name == o.ep
		})
		if i < 0 {
			return exit.Usagef("--option %s/%s: there is no --ep %s", term.Brief(o.ep),
				term.Brief(o.key), term.Brief(o.ep))
		}
		if err := setOption(r.EPs[i], o.key, o.value); err != nil {
			return exit.Usage(err)
		}
	}
	return r.checkValues()
}

// Given reports whether the call has --ep or --option.
func (r *Request) Given() bool { return len(r.EPs)+len(r.optionsBeforeEP)+len(r.optionsWithEP) > 0 }

// CompleteOrEP is Complete for a call that OnlyEP may complete.
func (r *Request) CompleteOrEP() error {
	if len(r.EPs) == 0 {
		return r.checkValues()
	}
	return r.Complete()
}

func (r *Request) checkValues() error {
	oneOf := func(flag, value string, words ...string) error {
		if value == "" {
			return nil
		}
		return exit.OneOf(flag, value, words...)
	}
	tolerance := error(nil)
	if !(r.Verify >= 0 && r.Verify <= math.MaxFloat64) { // nor NaN
		tolerance = exit.Usagef("--verify-output %v: must be 0 or more", r.Verify)
	}
	return cmp.Or(
		oneOf("--optimization-level", r.level, "disable_all", "basic", "extended", "layout", "all"),
		oneOf("--route", r.route, "compile_api", "session_options"),
		tolerance,
		oneOf("--store", r.store, "shared", "user", "none"))
}

// message makes the request for one model. Options that name a file become descriptors of files
// that this process opens, because the daemon opens no file by a client's path. The caller closes
// the returned files: the model's own, and the others with closeExtra.
func (r *Request) message(m *modelfile.Model) (*wire.Acquire, []*os.File, error) {
	entries, dir := identity.ExternalDir(r.sessionOptions)
	if dir != "" {
		if err := m.SearchIn(dir); err != nil {
			return nil, nil, err
		}
	}
	a := &wire.Acquire{
		Model: &wire.Model{Name: m.Name(), Path: m.Absolute()}, SessionOptions: entries,
		FreeDimensions: r.dims, FreeDimensionsByDenotation: r.Denotations,
		GraphOptimizationLevel: r.level, Embed: r.embed, Route: r.route, Store: r.store,
		StrictOrt: r.strictORT, VerifyOutput: r.Verify,
	}
	if proto.Size(r.output) > 0 {
		a.Output = r.output
	}
	var err error
	if a.Runtime, err = RuntimeAt(r.Runtime); err != nil {
		return nil, nil, err
	}
	files := []*os.File{m.File}
	for _, ep := range r.EPs {
		ep = proto.CloneOf(ep)
		a.Eps = append(a.Eps, ep)
		if err == nil {
			files, err = openOptionFiles(ep, files)
		}
	}
	if err == nil && r.Runtime != "" {
		files, err = showLibraries(a, files)
	}
	if r.ortVersion != "" {
		a.Runtime = cmp.Or(a.Runtime, &wire.Runtime{})
		a.Runtime.OrtVersion = r.ortVersion
	}
	if err != nil {
		closeExtra(files)
		return nil, nil, err
	}
	return a, files, nil
}

// RuntimeAt returns the runtime in a directory, nil for "".
func RuntimeAt(dir string) (*wire.Runtime, error) {
	if dir == "" {
		return nil, nil
	}
	abs, err := filepath.Abs(dir)
	if err == nil {
		_, err = os.Stat(abs)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, exit.Missing(fmt.Sprintf("--runtime %s: no such directory", term.Brief(dir)))
	}
	return &wire.Runtime{Directory: abs}, nil
}

func openOptionFiles(ep *wire.ExecutionProvider, files []*os.File) ([]*os.File, error) {
	info, known := compilers.EPByName(ep.Name)
	if !known {
		return files, nil
	}
	for option, value := range ep.Options {
		if info.Options[option].Policy != compilers.FileName || value == "" {
			continue
		}
		f, err := modelfile.OpenRegular(value)
		if err != nil {
			return files, fmt.Errorf("option %s: file %q: %w", option, term.Brief(value), err)
		}
		ep.OptionFds = merged(ep.OptionFds, map[string]uint32{option: uint32(len(files))})
		files = append(files, f)
		delete(ep.Options, option)
	}
	return files, nil
}

func closeExtra(files []*os.File) { modelfile.CloseFiles(files[1:]) }

// commandLine spells the request as on a command line, with a space after each flag.
func (r *Request) commandLine() string {
	text := ""
	for _, ep := range r.EPs {
		text += "--ep " + term.Printable(ep.GetName())
		if len(ep.GetDevices()) > 0 {
			device := ep.GetDevices()[0]
			text += ":" + term.Printable(device.GetType())
			for _, key := range slices.Sorted(maps.Keys(device.GetMetadata())) {
				text += "," + term.Printable(term.Brief(key+"="+device.GetMetadata()[key]))
			}
		}
		text += " "
		for _, option := range slices.Sorted(maps.Keys(ep.GetOptions())) {
			text += "--option " + term.Printable(term.Brief(option+"="+ep.GetOptions()[option])) +
				" "
		}
	}
	add := func(flag, value string) {
		if value != "" {
			text += flag + " " + term.Printable(term.Brief(value)) + " "
		}
	}
	for _, key := range slices.Sorted(maps.Keys(r.sessionOptions)) {
		add("--session-option", key+"="+r.sessionOptions[key])
	}
	for _, name := range slices.Sorted(maps.Keys(r.dims)) {
		add("--dim", fmt.Sprintf("%s=%d", name, r.dims[name]))
	}
	add("--runtime", r.Runtime)
	add("--ort-version", r.ortVersion)
	add("--optimization-level", r.level)
	add("--route", r.route)
	add("--store", r.store)
	add("--initializers-file", r.output.GetExternalInitializersFile())
	if n := r.output.GetExternalInitializersThreshold(); n != 0 {
		add("--initializers-threshold", strconv.FormatInt(n, 10))
	}
	if r.Verify != 0 {
		add("--verify-output", strconv.FormatFloat(r.Verify, 'g', -1, 64))
	}
	on := func(on bool, flag string) {
		if on {
			text += flag + " "
		}
	}
	on(r.embed, "--embed")
	on(r.strictORT, "--strict-ort")
	on(r.output.GetKeepInitializersInSource(), "--keep-initializers")
	on(r.output.GetComplete(), "--complete")
	return text
}

// OnlyEP returns the only execution provider and device that can compile on this machine, for a
// call that names none, and prints it. If there are several it returns an error that lists them.
func (r *Request) OnlyEP(ctx context.Context, c *unixsock.Client, p *term.Printer) error {
	if len(r.EPs) > 0 {
		return nil
	}
	at, err := RuntimeAt(r.Runtime)
	if err != nil {
		return err
	}
	reply, err := unixsock.Ask[wire.ProbeReply](ctx, c, &wire.Probe{Runtime: at}, nil)
	if err != nil {
		return err
	}
	able := usableEPs(reply.GetRuntimes())
	switch len(able) {
	case 0:
		return exit.Hint(errors.New("no --ep, and no execution provider here can compile"),
			"see why: epcachectl probe")
	case 1:
		p.Note("no --ep: " + term.Printable(able[0]) + ", which is all that can compile here")
		if err := r.AddEP(able[0]); err != nil {
			return err
		}
		return r.Complete()
	}
	return exit.Usage(exit.Hint(fmt.Errorf("no --ep, and several execution providers can "+
		"compile here: %s", strings.Join(term.Printables(able), ", ")),
		"name one, such as --ep "+term.Printable(able[0])))
}

func usableEPs(runtimes []*wire.RuntimeFacts) []string {
	var able []string
	for _, rt := range runtimes {
		for _, ep := range rt.GetEps() {
			for _, d := range ep.GetDevices() {
				name := ep.GetName() + ":" + d.GetType()
				if ep.GetError() == "" && d.GetError() == "" && !slices.Contains(able, name) {
					able = append(able, name)
				}
			}
		}
	}
	return able
}
