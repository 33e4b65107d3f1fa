package epmodel_test

import (
	"bytes"
	"context"
	"crypto/sha1"
	"encoding/hex"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/epmodel"
)

// The fields that testdata/compare.py prints of a model, named as in the onnx package.
type (
	modelFacts struct {
		IR              int64             `json:"ir"`
		Opsets          [][2]any          `json:"opsets"`
		Producer        string            `json:"producer"`
		ProducerVersion string            `json:"producer_version"`
		Graph           string            `json:"graph"`
		Metadata        map[string]string `json:"metadata"`
		Inputs          []valueFacts      `json:"inputs"`
		Outputs         []valueFacts      `json:"outputs"`
		Tensors         []tensorFacts     `json:"tensors"`
		Contexts        []contextFacts    `json:"contexts"`
		Ops             map[string]int    `json:"ops"`
		Nodes           int               `json:"nodes"`
	}
	valueFacts struct {
		Name  string   `json:"name"`
		Kind  string   `json:"kind"`
		Type  int32    `json:"type"`
		Shape [][2]any `json:"shape"`
	}
	tensorFacts struct {
		Name      string  `json:"name"`
		Graph     string  `json:"graph"`
		Node      string  `json:"node"`
		Attribute string  `json:"attribute"`
		Part      string  `json:"part"`
		Type      int32   `json:"type"`
		Shape     []int64 `json:"shape"`
		Location  string  `json:"location,omitempty"`
		Offset    int64   `json:"offset,omitempty"`
		Length    int64   `json:"length,omitempty"`
		// of the bytes in the graph file, where they stand in one piece
		SHA1 string `json:"sha1,omitempty"`
	}
	contextFacts struct {
		Node         string            `json:"node"`
		Graph        string            `json:"graph"`
		Domain       string            `json:"domain"`
		Inputs       int               `json:"inputs"`
		Outputs      int               `json:"outputs"`
		EmbedMode    int64             `json:"embed_mode"`
		MainContext  int64             `json:"main_context"`
		MaxSize      int64             `json:"max_size"`
		Source       string            `json:"source"`
		Partition    string            `json:"partition_name"`
		SDK          string            `json:"ep_sdk_version"`
		Architecture string            `json:"hardware_architecture"`
		ONNXModel    string            `json:"onnx_model_filename"`
		Notes        string            `json:"notes"`
		DLC          string            `json:"ep_dlc_context"`
		Cache        string            `json:"cache"`
		InlineSHA1   string            `json:"inline_sha1"`
		Weights      []string          `json:"weights"`
		Others       map[string]string `json:"others"`
		Long         []string          `json:"long"`
	}
)

// The onnx package and Read must report the same of the same files: generated models of all kinds,
// those in testdata, and the ones under EPCACHED_MODELS, if that is set.
func TestReadAgreesWithTheOnnxPackage(t *testing.T) {
	python := os.Getenv("EPCACHED_PYTHON")
	if python == "" {
		t.Skip("NOT COMPARED WITH THE ONNX PACKAGE: set EPCACHED_PYTHON to a Python with onnx " +
			"and numpy, as make test does")
	}
	models := append([]string{"testdata/compare.py", t.TempDir()}, realModels(t)...)
	var stderr bytes.Buffer
	cmd := exec.Command(python, models...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, "%s", &stderr)
	var want map[string]modelFacts
	require.NoError(t, json.Unmarshal(out, &want))
	require.Greater(t, len(want), 40)
	for path, w := range want {
		t.Run(filepath.Base(path), func(t *testing.T) {
			require.JSONEq(t, encode(t, w), encode(t, describe(t, path)))
		})
	}
}

func encode(t *testing.T, f modelFacts) string {
	t.Helper()
	// sparse values and indices of one name, and constants, come in another order from Python:
	// compare as a set
	var all []string
	for _, x := range f.Tensors {
		b, err := json.Marshal(x)
		require.NoError(t, err)
		all = append(all, string(b))
	}
	slices.Sort(all)
	f.Tensors = nil
	b, err := json.Marshal(struct {
		modelFacts
		AllTensors []string
	}{f, all})
	require.NoError(t, err)
	return string(b)
}

// realModels are graphs of real EPs, and what EPCACHED_MODELS has.
func realModels(t *testing.T) []string {
	t.Helper()
	found, err := filepath.Glob("testdata/artefacts/*.onnx")
	require.NoError(t, err)
	if dir := os.Getenv("EPCACHED_MODELS"); dir != "" {
		require.NoError(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() && strings.HasSuffix(p, ".onnx") {
				found = append(found, p)
			}
			return err
		}))
	}
	return found
}

// describe puts what Read finds into Python's words.
func describe(t *testing.T, path string) modelFacts {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	src, err := epmodel.FileSource(f)
	require.NoError(t, err)
	tensors := []tensorFacts(nil)
	m, err := epmodel.Tensors(context.Background(), path, src, func(i *epmodel.Initializer) {
		tensors = append(tensors, tensor(t, *i, src))
	})
	require.NoError(t, err)
	facts := modelFacts{IR: m.IRVersion, Opsets: [][2]any{}, Producer: m.Producer,
		ProducerVersion: m.ProducerVersion, Graph: m.GraphName, Metadata: m.Metadata,
		Inputs: values(m.Inputs), Outputs: values(m.Outputs), Contexts: []contextFacts{},
		Ops: m.OpTypes, Nodes: m.Nodes}
	for _, o := range m.Opsets {
		facts.Opsets = append(facts.Opsets, [2]any{o.Domain, o.Version})
	}
	facts.Tensors = tensors
	for _, c := range m.Contexts {
		facts.Contexts = append(facts.Contexts, contextOf(t, c, src))
	}
	return facts
}

func values(vs []epmodel.Value) []valueFacts {
	out := []valueFacts{}
	for _, v := range vs {
		f := valueFacts{Name: v.Name, Kind: v.Kind, Type: v.Type, Shape: [][2]any{}}
		for _, d := range v.Shape {
			f.Shape = append(f.Shape, [2]any{d.Value, d.Param})
		}
		out = append(out, f)
	}
	return out
}

func tensor(t *testing.T, i epmodel.Initializer, src epmodel.Source) tensorFacts {
	t.Helper()
	f := tensorFacts{Name: i.Name, Graph: i.Graph, Node: i.Node, Attribute: i.Attribute,
		Part: i.Part, Type: i.Type, Shape: append([]int64{}, i.Shape...)}
	const float, double = 1, 11
	switch {
	case i.Location != "":
		f.Location, f.Offset, f.Length = i.Location, i.Offset, i.Length
	case !i.Typed && i.Offset > 0, i.Typed && i.Length > 0 && (i.Type == float || i.Type == double):
		f.SHA1 = sha(t, io.NewSectionReader(src, i.Offset, i.Length))
	}
	return f
}

func sha(t *testing.T, r io.Reader) string {
	t.Helper()
	h := sha1.New()
	_, err := io.Copy(h, r)
	require.NoError(t, err)
	return hex.EncodeToString(h.Sum(nil))
}

func contextOf(t *testing.T, c epmodel.Context, src epmodel.Source) contextFacts {
	t.Helper()
	f := contextFacts{c.Node, c.Graph, c.Domain, c.Inputs, c.Outputs, c.EmbedMode, c.MainContext,
		c.MaxSize, c.Source, c.PartitionName, c.SDKVersion,
		c.HardwareArchitecture, c.ONNXModelFilename, c.Notes, c.DLCContext, c.CacheContext, "",
		slices.Sorted(slices.Values(c.WeightLocations)), c.Attributes, []string{}}
	if f.Weights == nil {
		f.Weights = []string{}
	}
	if c.Inline.Length > 0 {
		f.InlineSHA1 = sha(t, c.Open(src))
	}
	for name := range c.Long {
		f.Long = append(f.Long, name)
	}
	slices.Sort(f.Long)
	return f
}
