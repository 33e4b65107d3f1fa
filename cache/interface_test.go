package cache

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
)

// description are fields of ModelProto: producer_name, producer_version, domain, model_version and
// doc_string.
func description() (b []byte) {
	for num, text := range []string{2: "pytorch", 3: "2.9", 4: "org.acme", 6: "a model"} {
		if num == 5 {
			b = protowire.AppendVarint(protowire.AppendTag(b, 5, protowire.VarintType), 7)
		} else if text != "" {
			b = protowire.AppendString(protowire.AppendTag(b, protowire.Number(num),
				protowire.BytesType), text)
		}
	}
	return b
}

// described writes a model with a description, and opens it. An overridable initializer is also an
// input.
func (b *bench) described(overridable bool) *os.File {
	value := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: tinymodel.Float, Shape: []any{1}}
	}
	m := tinymodel.Model{Inputs: []tinymodel.Value{value("x")},
		Outputs: []tinymodel.Value{value("y")}, Metadata: map[string]string{"labels": "a,b"},
		Initializers: []tinymodel.Tensor{{Name: "k", Type: tinymodel.Float, Shape: []int64{1},
			Raw: make([]byte, 4)}},
		Nodes: []tinymodel.Node{{Name: "add", Op: "Add", Inputs: []string{"x", "k"},
			Outputs: []string{"y"}}}}
	if overridable {
		m.Inputs = append(m.Inputs, value("k"))
	}
	path := filepath.Join(b.TempDir(), "described.onnx")
	require.NoError(b, os.WriteFile(path, append(m.Encode(), description()...), 0o644))
	return b.openFile(path)
}

// requireDescribed requires that the served graph ends with its source's description.
func (b *bench) requireDescribed(a *request.Answer) {
	b.Helper()
	path := filepath.Join(fmt.Sprintf("/proc/self/fd/%d", a.View.Fd()), a.Graph)
	content, err := os.ReadFile(path)
	require.NoError(b, err)
	require.Contains(b, string(content),
		string(description())+"\x72\x0d\x0a\x06labels\x12\x03a,b")
	m, err := epmodel.Read(context.Background(), a.Graph, bytes.NewReader(content))
	require.NoError(b, err)
	require.Equal(b, "pytorch 2.9", m.Producer+" "+m.ProducerVersion)
	require.Equal(b, "a,b", m.Metadata["labels"])
}

func TestBuildsKeepTheDescriptionOfTheirModel(t *testing.T) {
	b := newBench(t)
	graph := b.described(false)
	compiled := b.acquire(b.request(graph))
	require.Equal(t, request.Compiled, compiled.Outcome)
	b.requireDescribed(compiled)
	r := b.request(graph)
	r.Embed = true
	converted := b.acquire(r)
	require.Equal(t, request.Hit, converted.Outcome, converted.Why)
	b.requireDescribed(converted)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

func TestSubmittedBuildsKeepTheDescriptionOfTheirModel(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	r := app.ask(b.described(false))
	claim := app.claim(r).Claim
	a, err := b.cache.Claims.Put(context.Background(), r.Peer, app.compile(r, claim), nil)
	require.NoError(t, err)
	b.Cleanup(func() { a.View.Close() })
	b.requireDescribed(a)
}

// The stand-in compiles all initializers into its context.
func TestAModelThatLosesAnOverridableInitializerIsNotServedCompiled(t *testing.T) {
	b := newBench(t)
	graph := b.described(true)
	first := b.refused(b.request(graph))
	require.Contains(t, first.Text, `the compiled model differs from its source: the `+
		`initializer "k", which a program may override in the source model, is compiled into it`)
	require.Equal(t, failure.Invalid, failure.FromError(first).Reason)
	require.True(t, failure.FromError(first).Reason.BlamesProvider(),
		"an application does not compile it either")
	again := b.refused(b.request(graph))
	require.Contains(t, again.Text, "failed once")
	require.EqualValues(t, 1, b.compiler.Compiles.Load(), "nothing is compiled again")
	require.Empty(t, b.list())
}

// The stand-in refuses, as ONNX Runtime does, a model whose body reads a constant of the outer
// graph.
func TestBodiesMayReadConstantsOfTheOuterGraph(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.requestOf(bodyReads()))
	require.Equal(t, request.Compiled, a.Outcome)
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
	path := filepath.Join(fmt.Sprintf("/proc/self/fd/%d", a.View.Fd()), a.Graph)
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	m, err := epmodel.Read(context.Background(), a.Graph, bytes.NewReader(content))
	require.NoError(t, err)
	require.Len(t, m.Outputs, 1)
	require.Equal(t, "y", m.Outputs[0].Name)
}

func TestACopyOfTheSourceIsTheSourceThoughAnotherOneWasCompiled(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.KeepSource = build.KeepCopy })
	b.acquire(b.requestOf(bodyReads()))
	kept := b.list()[0].Build.Source
	require.Equal(t, cas.SumBytes(bodyReads().Encode()), kept.Files[0].Digest)
}

// bodyReads is a model with a node whose body reads an initializer of the graph around it.
func bodyReads() tinymodel.Model {
	value := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: tinymodel.Float, Shape: []any{1}}
	}
	body := tinymodel.Model{Outputs: []tinymodel.Value{value("z")},
		Nodes: []tinymodel.Node{{Op: "Add", Inputs: []string{"x", "w"}, Outputs: []string{"z"}}}}
	return tinymodel.Model{Inputs: []tinymodel.Value{value("x")},
		Outputs: []tinymodel.Value{value("y")},
		Initializers: []tinymodel.Tensor{{Name: "w", Type: tinymodel.Float, Shape: []int64{1},
			Raw: make([]byte, 4)}},
		Nodes: []tinymodel.Node{{Op: "If", Inputs: []string{"x"}, Outputs: []string{"y"},
			Attributes: map[string]any{"then_branch": body}}}}
}
