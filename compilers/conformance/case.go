//go:build linux && (amd64 || arm64)

package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
	"github.com/epcached/epcached/epmodel"
)

type set map[string]string

func (s set) String() string {
	text := ""
	for _, key := range slices.Sorted(maps.Keys(s)) {
		text += ", " + key + "=" + s[key]
	}
	return text
}

func (s set) with(key, value string) set {
	s[key] = value
	return s
}

// testCase is one guideline that is tried.
type testCase struct {
	env     *ort.Env
	ep      workerproto.EP
	devices []ort.Device
	family  family
	work    string // everything that the case writes is below it
	dir     string
	report  func(call string) error
	calls   []workerproto.Call

	expected       [][]byte // models: what sessions compute: each on the outputs of the one before
	held           []held
	model          *epmodel.Model // that was read last, of graph; binary is its sidecar
	graph          string
	binary, before string
	whole          []byte // the binary before it was damaged
	nodes          [][]byte
	outs           []string

	watched []string // directories of others
	written *watching
	listed  map[string]string
}

type held struct {
	session  *ort.Session
	expected [][]byte
}

// stopped ends a case: what was expected did not happen, or the guideline is not applicable.
type stopped struct{ notApplicable string }

func (c *testCase) skip(format string, args ...any) { panic(stopped{fmt.Sprintf(format, args...)}) }

// does makes a call, and ends the case where it gives an error.
func (c *testCase) does(call, expected string, do func() (happened string, err error)) {
	plain := strings.NewReplacer(c.dir+"/", "")
	call = plain.Replace(call)
	must(c.report(call)) // or the caller has gone
	happened, err := do()
	if err != nil {
		happened = err.Error()
	}
	c.calls = append(c.calls, workerproto.Call{Call: call, Expected: expected,
		Happened: brief(plain.Replace(happened)), OK: err == nil})
	if err != nil {
		panic(stopped{})
	}
}

func brief(text string) string {
	const most = 1 << 10
	text = strings.ToValidUTF8(text, "")
	if len(text) > most {
		return text[:most] + "..."
	}
	return text
}

func (c *testCase) check(what, expected, happened string, ok bool) {
	c.does(what, expected, func() (string, error) {
		if !ok {
			return "", errors.New(happened)
		}
		return happened, nil
	})
}

func (c *testCase) equal(what, expected, happened string) {
	c.check(what, expected, happened, expected == happened)
}

func (c *testCase) options(session set, devices []ort.Device) (*ort.SessionOptions, error) {
	o, err := c.env.NewSessionOptions()
	if err == nil && len(devices) > 0 {
		err = o.Append(devices, c.ep.Options)
	}
	for key, value := range session {
		err = cmp.Or(err, o.Set(key, value))
	}
	return o, err
}

func (c *testCase) session(name string, session set) (*ort.Session, error) {
	o, err := c.options(session, c.devices)
	if err != nil {
		return nil, err
	}
	defer o.Release()
	if from, is := strings.CutPrefix(name, "bytes:"); is {
		return o.OpenBytes(c.bytes(from))
	}
	return o.Open(c.path(name))
}

func call(name string, session set) string {
	return "CreateSession(" + name + session.String() + ")"
}

func (c *testCase) open(name string, session set) (s *ort.Session) {
	c.does(call(name, session), "a session", func() (happened string, err error) {
		s, err = c.session(name, session)
		return "a session", err
	})
	return s
}

// tried returns the error of a session that is released again.
func (c *testCase) tried(name string, session set) error {
	s, err := c.session(name, session)
	if err == nil {
		s.Release()
	}
	return err
}

const invalidGraph = "the error 10, INVALID_GRAPH"

func isInvalidGraph(err error) (string, error) {
	status, is := errors.AsType[*ort.Error](err)
	switch {
	case err == nil:
		return "", errors.New("a session")
	case is && status.Code == 10:
		return err.Error(), nil
	}
	return "", err
}

// expect adds a model to those that sessions compute.
func (c *testCase) expect(seed string, options set) {
	n, err := strconv.ParseUint(options.or("seed", seed), 10, 64)
	must(err)
	blocks, err := strconv.Atoi(options.or("blocks", "1"))
	must(err)
	m, _ := c.family.model(n, blocks, options["parts"] != "", "")
	c.expected = append(c.expected, m)
}

func (s set) or(key, value string) string {
	if has, is := s[key]; is {
		return has
	}
	return value
}

func (c *testCase) computes(s *ort.Session, expected [][]byte) {
	c.does("Run", "the outputs of the source model on the CPU", func() (string, error) {
		return c.outputs(s, expected)
	})
}

// outputs compares a session's outputs with those that models have on the CPU.
func (c *testCase) outputs(s *ort.Session, expected [][]byte) (string, error) {
	tolerance := 0.05 // for fewer bits
	if c.family.element == int8Type {
		tolerance = 2 * quantum
	}
	inputs := []ort.Tensor{c.family.input()}
	got, err := s.Run(inputs)
	if err != nil {
		return "", err
	}
	for _, m := range expected {
		if inputs, err = c.onCPU(m, inputs); err != nil {
			return "", fmt.Errorf("on the CPU: %w", err)
		}
		inputs[0].Name = "x"
	}
	got[0].Name = "x"
	difference, err := ort.Compare(got, inputs, tolerance)
	if err == nil && difference != "" {
		err = errors.New(difference)
	}
	return fmt.Sprintf("they are, within %g", tolerance), err
}

func (c *testCase) onCPU(source []byte, inputs []ort.Tensor) ([]ort.Tensor, error) {
	o, err := c.options(nil, nil)
	if err != nil {
		return nil, err
	}
	defer o.Release()
	s, err := o.OpenBytes(source)
	if err != nil {
		return nil, err
	}
	defer s.Release()
	return s.Run(inputs)
}

// path is where a name of a step is.
func (c *testCase) path(name string) string {
	if strings.HasPrefix(name, "./") || strings.HasPrefix(name, "/") {
		return name
	}
	return filepath.Join(c.dir, name)
}

func (c *testCase) writeFile(name string, data []byte) {
	path := c.path(name)
	must(os.MkdirAll(filepath.Dir(path), 0o700))
	must(os.WriteFile(path, data, 0o600))
}

// must is for what the case itself does: that the disk is full says nothing of the EP.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

func (c *testCase) files(dir string) []string {
	entries, err := os.ReadDir(c.path(dir))
	must(err)
	names := []string{}
	for _, e := range entries {
		if !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names
}

func (c *testCase) has(name string) {
	dir, name := filepath.Split(name)
	files := c.files(dir)
	c.check(fmt.Sprintf("files of directory %q", dir), fmt.Sprintf("%q among them", name),
		strings.Join(files, ", "), slices.Contains(files, name))
}

func (c *testCase) bytes(name string) []byte {
	data, err := os.ReadFile(c.path(name))
	must(err)
	return data
}

// read reads an EPContext model, for the steps that follow.
func (c *testCase) read(name string) {
	c.does("read "+name, "a model with EPContext nodes", func() (string, error) {
		f, err := os.Open(c.path(name))
		if err != nil {
			return "", err
		}
		defer f.Close() // only read
		src, err := epmodel.FileSource(f)
		if err != nil {
			return "", err
		}
		if c.model, err = epmodel.Read(context.Background(), filepath.Base(name), src); err != nil {
			return "", err
		}
		if len(c.model.Contexts) == 0 {
			return "", fmt.Errorf("none: %s", c.model.UncompiledSummary(8))
		}
		c.graph, c.before, c.binary = name, c.binary, c.model.Contexts[0].CacheContext
		return fmt.Sprintf("%d EPContext nodes", len(c.model.Contexts)), nil
	})
}

const infoKey = "ep_compatibility_info." // of metadata, before the EP's name

// values returns a property of the model that was read, or of each device.
func (c *testCase) values(name string) (values []string) {
	if slices.Contains([]string{"name", "vendor", "version"}, name) {
		for _, d := range c.devices {
			values = append(values, map[string]string{"name": d.EP, "vendor": d.EPVendor,
				"version": d.EPMetadata["version"]}[name])
		}
		return values
	}
	n := c.model.Contexts[0]
	return []string{map[string]string{"embed_mode": fmt.Sprint(n.EmbedMode),
		"ep_cache_context": n.CacheContext, "partition_name": n.PartitionName, "source": n.Source,
		"ep_sdk_version": n.SDKVersion, "hardware_architecture": n.HardwareArchitecture,
		"inputs": fmt.Sprint(n.Inputs), "compatibility": c.model.Metadata[infoKey+c.ep.Name]}[name]}
}

// rebuilt writes the node that was read again between two values, with attributes of edit; "-"
// leaves one out.
func (c *testCase) rebuilt(in, out string, edit set) []byte {
	n := c.model.Contexts[0]
	content := []byte(n.CacheContext)
	if n.Inline.Length > 0 {
		content = c.bytes(c.graph)[n.Inline.Offset:][:n.Inline.Length]
	}
	attributes := map[string]any{"ep_cache_context": content, "main_context": n.MainContext,
		"embed_mode": n.EmbedMode, "source": n.Source, "partition_name": n.PartitionName,
		"ep_sdk_version": n.SDKVersion, "hardware_architecture": n.HardwareArchitecture,
		"onnx_model_filename": n.ONNXModelFilename, "notes": n.Notes, "max_size": n.MaxSize}
	for name, value := range edit {
		if attributes[name] = value; value == "-" {
			delete(attributes, name)
		}
	}
	return node("EPContext", n.Node+strings.Repeat("_2", len(c.nodes)), []string{in}, out,
		attributes)
}

// Names of OrtCompiledModelCompatibility.
var verdicts = []string{"not applicable", "optimal", "prefer recompilation", "unsupported"}

func (c *testCase) verdict(info string) (string, error) {
	n, err := c.env.Compatibility(c.devices, info)
	if err != nil || n < 0 || n >= len(verdicts) {
		return fmt.Sprint(n), err
	}
	return verdicts[n], nil
}

// other reports whether the other version's build loads and computes right. The error is that of
// one that does neither, and is not refused with INVALID_GRAPH either.
func (c *testCase) other() (loads bool, happened string, err error) {
	// Without its compatibility string, because ONNX Runtime refuses by that itself, with FAIL.
	c.writeFile("other.onnx", []byte(strings.ReplaceAll(string(c.bytes("m_ctx.onnx")), infoKey,
		"no"+infoKey[2:])))
	s, err := c.session("other.onnx", nil)
	if err != nil {
		happened, err = isInvalidGraph(err)
		return false, happened, err
	}
	defer s.Release()
	happened, err = c.outputs(s, c.expected)
	return err == nil, happened, err
}

// listing has the state of each file below the working directory.
func (c *testCase) listing() map[string]string {
	all := map[string]string{}
	must(filepath.WalkDir(c.work, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			all[path] = fmt.Sprint(info.Size(), info.ModTime())
		}
		return err
	}))
	return all
}
