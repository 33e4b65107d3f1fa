//go:build linux && (amd64 || arm64)

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/tinymodel"
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
	out := maps.Clone(s)
	if out == nil {
		out = set{}
	}
	out[key] = value
	return out
}

type testCase struct {
	env     *ort.Env
	ep      workerproto.EP
	devices []ort.Device
	family  family
	source  tinymodel.Model // one block of the family
	dir     string
	report  func(call string) error
	calls   []Call
}

// stopped ends a case: what was expected did not happen, or the guideline is not applicable.
type stopped struct{ notApplicable string }

func (c *testCase) skip(format string, args ...any) { panic(stopped{fmt.Sprintf(format, args...)}) }

// does makes a call, and ends the case where it gives an error.
func (c *testCase) does(call, expected string, do func() (happened string, err error)) {
	call = strings.ReplaceAll(call, c.dir+"/", "")
	if err := c.report(call); err != nil {
		panic(err) // the caller has gone
	}
	happened, err := do()
	if err != nil {
		happened = err.Error()
	}
	c.calls = append(c.calls, Call{Call: call, Expected: expected,
		Happened: brief(strings.ReplaceAll(happened, c.dir+"/", "")), OK: err == nil})
	if err != nil {
		panic(stopped{})
	}
}

func (c *testCase) succeeds(call string, do func() error) {
	c.does(call, "success", func() (string, error) { return "success", do() })
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

func (c *testCase) options(session set) (*ort.SessionOptions, error) {
	o, err := c.env.NewSessionOptions()
	if err != nil {
		return nil, err
	}
	for key, value := range session {
		if err := o.Set(key, value); err != nil {
			return nil, err
		}
	}
	return o, o.Append(c.devices, c.ep.Options)
}

func (c *testCase) session(path string, bytes []byte, session set) (*ort.Session, error) {
	o, err := c.options(session)
	if err != nil {
		return nil, err
	}
	defer o.Release()
	if bytes != nil {
		return o.OpenBytes(bytes)
	}
	return o.Open(path)
}

func sessionCall(path string, bytes []byte, session set) string {
	if bytes != nil {
		return "CreateSessionFromArray(" + path + session.String() + ")"
	}
	return "CreateSession(" + path + session.String() + ")"
}

func (c *testCase) open(path string, session set) *ort.Session {
	return c.openAs(path, nil, session)
}

func (c *testCase) openAs(path string, bytes []byte, session set) (s *ort.Session) {
	c.does(sessionCall(path, bytes, session), "a session", func() (string, error) {
		var err error
		s, err = c.session(path, bytes, session)
		return "a session", err
	})
	return s
}

func (c *testCase) refuses(path string, bytes []byte, session set) {
	c.does(sessionCall(path, bytes, session), "an error", func() (string, error) {
		s, err := c.session(path, bytes, session)
		if err == nil {
			s.Release()
			return "", errors.New("a session")
		}
		return err.Error(), nil
	})
}

func (c *testCase) compile(path string, session set) {
	c.open(path, session.with("ep.context_enable", "1")).Release()
}

func (c *testCase) compileBy(call string, k ort.Compilation, session set) (made []byte) {
	c.succeeds("CompileModel("+call+session.String()+")", func() error {
		o, err := c.options(session)
		if err != nil {
			return err
		}
		defer o.Release()
		made, err = o.Compile(k)
		return err
	})
	return made
}

func (c *testCase) loads(path string, session set, source tinymodel.Model) {
	s := c.open(path, session)
	defer s.Release()
	c.computes(s, source)
}

const tolerance = 0.05 // the part of the largest output that one may differ by, for fewer bits

func (c *testCase) computes(s *ort.Session, source tinymodel.Model) {
	expected := fmt.Sprintf("the outputs of the source model on the CPU, within %g %%",
		100*tolerance)
	c.does("Run", expected, func() (string, error) {
		x := c.family.tensor("x", 100, c.family.outside(), c.family.shape())
		inputs := []ort.Tensor{{Name: x.Name, Type: x.Type, Shape: x.Shape, Data: x.Raw}}
		got, err := s.Run(inputs)
		if err != nil {
			return "", err
		}
		want, err := c.onCPU(source, inputs)
		if err != nil {
			return "", fmt.Errorf("on the CPU: %w", err)
		}
		if len(got) != 1 || got[0].Name != want[0].Name {
			return "", fmt.Errorf("%d outputs", len(got))
		}
		return c.compare(floats(got[0].Data, got[0].Type), floats(want[0].Data, want[0].Type))
	})
}

func (c *testCase) onCPU(source tinymodel.Model, inputs []ort.Tensor) ([]ort.Tensor, error) {
	o, err := c.env.NewSessionOptions()
	if err != nil {
		return nil, err
	}
	defer o.Release()
	s, err := o.OpenBytes(source.Encode())
	if err != nil {
		return nil, err
	}
	defer s.Release()
	return s.Run(inputs)
}

func (c *testCase) compare(got, want []float32) (string, error) {
	if len(got) != len(want) {
		return "", fmt.Errorf("%d numbers in place of %d", len(got), len(want))
	}
	var largest, differs float64
	for i := range want {
		largest = max(largest, float64(want[i]), -float64(want[i]))
		difference := float64(got[i]) - float64(want[i])
		if difference != difference { // NaN
			return "", fmt.Errorf("output %d is %v", i, got[i])
		}
		differs = max(differs, difference, -difference)
	}
	limit := tolerance * largest
	if c.family.element == tinymodel.Int8 {
		limit = max(limit, 2*quantum)
	}
	if differs > limit {
		return "", fmt.Errorf("they differ by %.3g, where the largest is %.3g", differs, largest)
	}
	return fmt.Sprintf("they differ by %.3g", differs), nil
}

func (c *testCase) write(name string, m tinymodel.Model) string {
	return c.writeFile(name, m.Encode())
}

func (c *testCase) writeFile(name string, data []byte) string {
	path := filepath.Join(c.dir, name)
	must(os.MkdirAll(filepath.Dir(path), 0o700))
	must(os.WriteFile(path, data, 0o600))
	return path
}

// must is for what the case itself does: that the disk is full says nothing of the EP.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

func (c *testCase) files(dir string) []string {
	entries, err := os.ReadDir(filepath.Join(c.dir, dir))
	must(err)
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (c *testCase) bytes(name string) []byte {
	data, err := os.ReadFile(filepath.Join(c.dir, name))
	must(err)
	return data
}

func (c *testCase) contexts(name string) (m *epmodel.Model) {
	c.does("read "+name, "a model with EPContext nodes", func() (string, error) {
		f, err := os.Open(filepath.Join(c.dir, name))
		if err != nil {
			return "", err
		}
		defer f.Close() // only read
		src, err := epmodel.FileSource(f)
		if err != nil {
			return "", err
		}
		if m, err = epmodel.Read(context.Background(), filepath.Base(name), src); err != nil {
			return "", err
		}
		if len(m.Contexts) == 0 {
			return "", fmt.Errorf("none: %s", m.UncompiledSummary(8))
		}
		return fmt.Sprintf("%d EPContext nodes", len(m.Contexts)), nil
	})
	return m
}

// alone compiles one block and gives its node. name has no ".onnx"; the source is for seed 1.
func (c *testCase) alone(name string, seed uint64, session set) *epmodel.Model {
	c.compile(c.write(name+".onnx", c.family.model(seed, 1, false)), session)
	m := c.contexts(name + "_ctx.onnx")
	if len(m.Contexts) != 1 || m.Nodes != 1 || m.Contexts[0].Inputs != 1 {
		c.skip("the compiled model has %d nodes", m.Nodes)
	}
	return m
}

// rebuilt writes a node again between two values, with attributes of edit; "-" leaves one out.
func (c *testCase) rebuilt(m *epmodel.Model, graph string, in, out string,
	edit set) tinymodel.Node {
	n := m.Contexts[0]
	content := []byte(n.CacheContext)
	if n.Inline.Length > 0 {
		content = c.bytes(graph)[n.Inline.Offset:][:n.Inline.Length]
	}
	attributes := map[string]any{"ep_cache_context": content, "main_context": n.MainContext,
		"embed_mode": n.EmbedMode}
	for name, text := range map[string]string{"source": n.Source, "partition_name": n.PartitionName,
		"ep_sdk_version": n.SDKVersion, "hardware_architecture": n.HardwareArchitecture,
		"onnx_model_filename": n.ONNXModelFilename, "notes": n.Notes} {
		if text != "" {
			attributes[name] = text
		}
	}
	if n.MaxSize != 0 {
		attributes["max_size"] = n.MaxSize
	}
	for name, value := range edit {
		if attributes[name] = value; value == "-" {
			delete(attributes, name)
		}
	}
	return tinymodel.Node{Name: n.Node, Op: "EPContext", Domain: "com.microsoft",
		Inputs: []string{in}, Outputs: []string{out}, Attributes: attributes}
}

func (c *testCase) contextModel(from *epmodel.Model, nodes ...tinymodel.Node) tinymodel.Model {
	m := tinymodel.Model{Opsets: map[string]int64{"": 17, "com.microsoft": 1}, Nodes: nodes,
		Metadata: from.Metadata,
		Inputs:   []tinymodel.Value{c.family.value("x")},
		Outputs:  []tinymodel.Value{c.family.value("y")}}
	for _, n := range nodes {
		if n.Outputs[0] != "y" {
			m.Values = append(m.Values, c.family.value(n.Outputs[0]))
		}
	}
	return m
}
