//go:build linux && (amd64 || arm64)

package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/tinymodel"
)

var noFallback = set{"session.disable_cpu_ep_fallback": "1"}

var inference = []guideline{
	required("no EPContext nodes: the normal inference workflow", func(c *testCase) {
		c.loads(c.write("m.onnx", c.source), noFallback, c.source)
	}),
	required("the compiled model runs on the EP alone", func(c *testCase) {
		c.alone("m", 1, nil)
		c.loads(c.dir+"/m_ctx.onnx", noFallback, c.source)
	}),
	required("the EP inspects c.source, and takes only its own nodes", func(c *testCase) {
		m := c.alone("m", 1, nil)
		c.loads(c.write("own.onnx", c.contextModel(m, c.rebuilt(m, "m_ctx.onnx", "x", "y",
			nil))), nil, c.source)
		other := c.contextModel(m, c.rebuilt(m, "m_ctx.onnx", "x", "y",
			set{"source": "AnotherExecutionProvider"}))
		c.refuses(c.write("other.onnx", other), nil, nil)
	}),
	recommended("the EP partitions nothing but EPContext nodes where there are "+
		"some", func(c *testCase) {
		if c.family.op == "Conv" || c.family.element != tinymodel.Float {
			c.skip("a Relu may be none that the EP takes")
		}
		m := c.alone("m", 1, nil)
		model := c.contextModel(m, c.rebuilt(m, "m_ctx.onnx", "x", "y", nil),
			tinymodel.Node{Op: "Relu", Inputs: []string{"y"}, Outputs: []string{"z"}})
		model.Outputs = []tinymodel.Value{c.family.value("z")}
		model.Values = []tinymodel.Value{c.family.value("y")}
		path := c.write("both.onnx", model)
		c.open(path, nil).Release()
		c.refuses(path, nil, noFallback)
	}),
	recommended("attributes that are left out have the schema's defaults: main_context is "+
		"1", func(c *testCase) {
		m := c.alone("m", 1, nil)
		c.loads(c.write("short.onnx", c.contextModel(m, c.rebuilt(m, "m_ctx.onnx", "x", "y",
			set{"main_context": "-"}))), nil, c.source)
	}),
	required("loaded from a path: the binary is found in the model's directory, "+
		"also after that was "+
		"moved", func(c *testCase) {
		c.alone("at/m", 1, nil)
		must(os.Chdir("/")) // not in the working directory
		c.loads(c.dir+"/at/m_ctx.onnx", nil, c.source)
		must(os.Rename(c.dir+"/at", c.dir+"/moved"))
		c.loads(c.dir+"/moved/m_ctx.onnx", nil, c.source)
		must(os.Chdir(c.dir + "/moved"))
		c.loads("m_ctx.onnx", nil, c.source)
	}),
	required("loaded from memory: ep.context_file_path gives the directory", func(c *testCase) {
		c.alone("m", 1, nil)
		model := c.bytes("m_ctx.onnx")
		must(os.Remove(c.dir + "/m_ctx.onnx")) // only its path counts
		must(os.Chdir("/"))
		s := c.openAs("m_ctx.onnx", model, set{"ep.context_file_path": c.dir + "/m_ctx.onnx"})
		defer s.Release()
		c.computes(s, c.source)
	}),
	required("loaded from memory: what is embedded needs no path", func(c *testCase) {
		c.alone("m", 1, set{"ep.context_embed_mode": "1"})
		s := c.openAs("m_ctx.onnx", c.bytes("m_ctx.onnx"), nil)
		defer s.Release()
		c.computes(s, c.source)
	}),
	recommended("the binary may stand in a subdirectory", func(c *testCase) {
		m := c.alone("m", 1, nil)
		c.writeFile("sub/b.bin", c.bytes(m.Contexts[0].CacheContext))
		node := c.rebuilt(m, "m_ctx.onnx", "x", "y", set{"ep_cache_context": "sub/b.bin"})
		c.loads(c.write("moved.onnx", c.contextModel(m, node)), nil, c.source)
	}),
	required("the binary stands nowhere else: absolute paths and .. are "+
		"refused", func(c *testCase) {
		m := c.alone("in/m", 1, nil)
		binary := filepath.Join(c.dir, "in", m.Contexts[0].CacheContext)
		for i, name := range []string{binary, "../in/" + filepath.Base(binary)} {
			node := c.rebuilt(m, "in/m_ctx.onnx", "x", "y", set{"ep_cache_context": name})
			c.refuses(c.write(fmt.Sprintf("in/bad%d.onnx", i), c.contextModel(m, node)), nil, nil)
		}
	}),
	required("a binary that is missing, empty, cut in half or of something else is an error, and "+
		"no crash", func(c *testCase) {
		m := c.alone("m", 1, nil)
		binary := m.Contexts[0].CacheContext
		whole := c.bytes(binary)
		for _, content := range [][]byte{whole[:len(whole)/2], {},
			[]byte("this is no context binary\n")} {
			c.writeFile(binary, content)
			c.refuses(c.dir+"/m_ctx.onnx", nil, nil)
		}
		must(os.Remove(filepath.Join(c.dir, binary)))
		c.refuses(c.dir+"/m_ctx.onnx", nil, nil)
	}),
	recommended("a compiled model is not compiled again", func(c *testCase) {
		c.alone("m", 1, nil)
		c.refuses(c.dir+"/m_ctx.onnx", nil, set{"ep.context_enable": "1",
			"ep.context_file_path": c.dir + "/twice.onnx"})
	}),
	optional("ep.enable_weightless_ep_context_nodes: weights stay in the model, or the option is "+
		"refused", func(c *testCase) {
		c.hasWeights()
		path := c.write("m.onnx", c.source)
		session := set{"ep.context_enable": "1", "ep.enable_weightless_ep_context_nodes": "1"}
		s, err := c.session(path, nil, session)
		if err != nil {
			c.skip("it is refused: %s", brief(err.Error()))
		}
		s.Release()
		m := c.contexts("m_ctx.onnx")
		c.check(sessionCall("m.onnx", nil, session),
			"weights that are inputs of the EPContext node", fmt.Sprintf("%d inputs",
				m.Contexts[0].Inputs), m.Contexts[0].Inputs > 1)
		c.loads(c.dir+"/m_ctx.onnx", nil, c.source)
	}),
}

var compatibility = []guideline{
	recommended("GetCompiledModelCompatibilityInfo: the compiled model has the EP's "+
		"compatibility string", func(c *testCase) {
		c.ownString()
	}),
	recommended("ValidateCompiledModelCompatibilityInfo: its own string is "+
		"optimal", func(c *testCase) {
		info := c.ownString()
		c.judges(info, "optimal", func(v int) bool { return v == 1 })
	}),
	recommended("ValidateCompiledModelCompatibilityInfo: what is no string of the EP is not "+
		"supported", func(c *testCase) {
		c.judges("this is of no execution provider", "unsupported or not applicable",
			func(v int) bool { return v == 0 || v == 3 })
	}),
}

func (c *testCase) ownString() string {
	m := c.alone("m", 1, nil)
	key := "ep_compatibility_info." + c.ep.Name
	info := m.Metadata[key]
	c.check("metadata "+key, "a string", info, info != "")
	return info
}

func (c *testCase) judges(info, expected string, ok func(int) bool) {
	c.does("GetModelCompatibilityForEpDevices("+brief(info)+")", expected, func() (string, error) {
		verdict, err := c.env.Compatibility(c.devices, info)
		if err != nil {
			return "", err
		}
		said := []string{"not applicable", "optimal", "prefer recompilation", "unsupported"}
		text := fmt.Sprint(verdict)
		if verdict >= 0 && verdict < len(said) {
			text = said[verdict]
		}
		if !ok(verdict) {
			return "", fmt.Errorf("%s", text)
		}
		return text, nil
	})
}

var (
	share = set{"ep.share_ep_contexts": "1"}
	last  = set{"ep.share_ep_contexts": "1", "ep.stop_share_ep_contexts": "1"}
)

var sharing = []guideline{
	optional("the first session decides the binary's name, the last one writes it, each creates "+
		"a model: N+1 files", func(c *testCase) {
		c.group("at", 1, 2)
		c.equal("files", "3", fmt.Sprint(len(c.files("at"))-2)) // but for the sources
		var binaries []string
		for _, name := range []string{"at/model1_ctx.onnx", "at/model2_ctx.onnx"} {
			binaries = append(binaries, c.contexts(name).Contexts[0].CacheContext)
		}
		c.equal("the second model's binary", binaries[0], binaries[1])
	}),
	optional("the last session clears the workspace: the next one is the first of another "+
		"group", func(c *testCase) {
		c.group("first", 1, 2)
		c.group("second", 9, 1)
		c.loads(c.dir+"/second/model1_ctx.onnx", nil, c.member(9, 0))
	}),
	optional("a group loads in order in one process, computes right, and is destroyed in "+
		"reverse", func(c *testCase) {
		compiled := c.group("at", 1, 3)
		var sessions []*ort.Session
		for _, path := range compiled {
			sessions = append(sessions, c.open(path, share))
		}
		for i, s := range sessions {
			c.computes(s, c.member(1, i))
		}
		for i := len(sessions) - 1; i >= 0; i-- {
			sessions[i].Release()
		}
	}),
	optional("a member alone loads without the option", func(c *testCase) {
		c.loads(c.group("at", 1, 2)[1], nil, c.member(1, 1))
	}),
}

// member is the i-th model of a group: the same weights, and one block more than the one before.
func (c *testCase) member(seed uint64, i int) tinymodel.Model {
	return c.family.model(seed, i+1, false)
}

// group returns the paths of compiled models. All sessions live to the last, as OpenVINO wants it.
func (c *testCase) group(dir string, seed uint64, count int) (compiled []string) {
	var sessions []*ort.Session
	for i := range count {
		session := share
		if i == count-1 {
			session = last
		}
		name := fmt.Sprintf("%s/model%d", dir, i+1)
		sessions = append(sessions, c.open(c.write(name+".onnx", c.member(seed, i)),
			session.with("ep.context_enable", "1")))
		compiled = append(compiled, c.dir+"/"+name+"_ctx.onnx")
	}
	for i := len(sessions) - 1; i >= 0; i-- {
		sessions[i].Release()
	}
	return compiled
}
