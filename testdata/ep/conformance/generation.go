//go:build linux && (amd64 || arm64)

package main

import (
	"bytes"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
)

var generation = []guideline{
	required("ep.context_enable=1: ONNX Runtime creates the model, with the EPContext nodes that "+
		"the EP made", func(c *testCase) {
		m := c.alone("m", 1, nil)
		c.check("nodes of m_ctx.onnx", "EPContext nodes and no others", m.NodeSummary(8),
			m.Nodes == len(m.Contexts))
		c.loads(c.dir+"/m_ctx.onnx", nil, c.source)
	}),
	required("lifetime: the session that made the model goes on", func(c *testCase) {
		s := c.open(c.write("m.onnx", c.source), set{"ep.context_enable": "1"})
		defer s.Release()
		c.computes(s, c.source)
	}),
	required("ep.context_enable=0 (default): the standard workflow, without a "+
		"model", func(c *testCase) {
		for _, session := range []set{nil, {"ep.context_enable": "0"}} {
			c.loads(c.write("m.onnx", c.source), session, c.source)
			c.equal("files beside the model", "m.onnx", list(c.files("")))
		}
	}),
	required("ep.context_file_path is not provided: .onnx becomes _ctx.onnx", func(c *testCase) {
		c.compile(c.write("some.name.onnx", c.source), nil)
		c.has("", "some.name_ctx.onnx")
	}),
	required("ep.context_file_path is specified: the model goes there, and the binary into its "+
		"directory", func(c *testCase) {
		c.write("to/nothing.onnx", c.source) // the directory
		c.compile(c.write("from/m.onnx", c.source),
			set{"ep.context_file_path": c.dir + "/to/other.onnx"})
		c.equal("files beside the c.source model", "m.onnx", list(c.files("from")))
		c.has("to", "other.onnx")
		c.loads(c.dir+"/to/other.onnx", nil, c.source)
	}),
	required("ep.context_file_path is required when the model comes from a memory "+
		"buffer", func(c *testCase) {
		c.refuses("m.onnx", c.source.Encode(), set{"ep.context_enable": "1"})
		at := set{"ep.context_enable": "1", "ep.context_file_path": c.dir + "/m_ctx.onnx"}
		c.openAs("m.onnx", c.source.Encode(), at).Release()
		c.loads(c.dir+"/m_ctx.onnx", nil, c.source)
	}),
	required("ep.context_embed_mode=1: the content stands in the model", func(c *testCase) {
		m := c.alone("m", 1, set{"ep.context_embed_mode": "1"})
		c.equal("embed_mode", "1", fmt.Sprint(m.Contexts[0].EmbedMode))
		c.equal("files", "m.onnx, m_ctx.onnx", list(c.files("")))
		c.loads(c.dir+"/m_ctx.onnx", nil, c.source)
	}),
	required("ep.context_embed_mode=0 (default): the content is a separate "+
		"file", func(c *testCase) {
		for i, session := range []set{nil, {"ep.context_embed_mode": "0"}} {
			m := c.alone(fmt.Sprint("m", i), 1, session)
			c.equal("embed_mode", "0", fmt.Sprint(m.Contexts[0].EmbedMode))
			c.has("", m.Contexts[0].CacheContext)
		}
	}),
	required("ep_cache_context is relative to the model, and names a file in its directory or "+
		"below", func(c *testCase) {
		m := c.alone("m", 1, nil)
		name := m.Contexts[0].CacheContext
		c.check("ep_cache_context", "a relative path without ..", name, filepath.IsLocal(name))
		c.has("", name)
	}),
	recommended("the binary's name is [model_name]_[ep].bin", func(c *testCase) {
		m := c.alone("name", 1, nil)
		name := m.Contexts[0].CacheContext
		c.check("ep_cache_context", "name_[ep].bin", name, strings.HasPrefix(name, "name_") &&
			path.Ext(name) == ".bin")
	}),
	required("a single binary, even if there are several partitioned subgraphs, or one for each "+
		"primary node", func(c *testCase) {
		source, m := c.inParts()
		secondary := 0
		for _, n := range m.Contexts {
			if n.MainContext == 0 {
				secondary++
				c.equal("ep_cache_context of a node with main_context=0", "", n.CacheContext)
			} else {
				c.has("", n.CacheContext)
			}
		}
		binaries := slices.DeleteFunc(c.files(""),
			func(name string) bool { return strings.HasSuffix(name, ".onnx") })
		c.check("binaries", "not more than primary nodes", list(binaries),
			len(binaries) <= len(m.Contexts)-secondary)
		c.loads(c.dir+"/m_ctx.onnx", nil, source)
	}),
	recommended("several subgraphs, embedded", func(c *testCase) {
		source, _ := c.inParts()
		c.compile(c.dir+"/m.onnx", set{"ep.context_embed_mode": "1",
			"ep.context_file_path": c.dir + "/e_ctx.onnx"})
		c.loads(c.dir+"/e_ctx.onnx", nil, source)
	}),
	recommended("ep.context_node_name_prefix: in the partition's name", func(c *testCase) {
		m := c.alone("m", 1, set{"ep.context_node_name_prefix": "left_"})
		n := m.Contexts[0]
		c.check("partition_name", "left_...", n.PartitionName,
			strings.HasPrefix(n.PartitionName, "left_") || strings.HasPrefix(n.Node, "left_"))
		c.loads(c.dir+"/m_ctx.onnx", nil, c.source)
	}),
	recommended("contexts of several models can be merged and connected in one "+
		"model", func(c *testCase) {
		var nodes []tinymodel.Node
		var from *epmodel.Model
		for i, name := range []string{"one", "two"} {
			m := c.alone(name, uint64(10*i+1), set{"ep.context_node_name_prefix": name + "_"})
			n := c.rebuilt(m, name+"_ctx.onnx", []string{"x", "between"}[i],
				[]string{"between", "y"}[i], nil)
			n.Name = name
			from, nodes = m, append(nodes, n)
		}
		path := c.write("merged.onnx", c.contextModel(from, nodes...))
		c.loads(path, nil, joined(c.source, c.family.model(11, 1, false)))
	}),
	required("attributes: source is the EP's name, and partition_name is not "+
		"empty", func(c *testCase) {
		m := c.alone("m", 1, nil)
		c.equal("source", c.ep.Name, m.Contexts[0].Source)
		c.check("partition_name", "a name", m.Contexts[0].PartitionName,
			m.Contexts[0].PartitionName != "")
	}),
	recommended("attributes: ep_sdk_version and hardware_architecture state what it is "+
		"for", func(c *testCase) {
		m := c.alone("m", 1, nil)
		c.check("ep_sdk_version", "a version", m.Contexts[0].SDKVersion,
			m.Contexts[0].SDKVersion != "")
		c.check("hardware_architecture", "an architecture", m.Contexts[0].HardwareArchitecture,
			m.Contexts[0].HardwareArchitecture != "")
	}),
	required("the new model does not rely on the old external data file", func(c *testCase) {
		moved, data := c.externalized("m.data")
		c.write("to/nothing.onnx", c.source) // the directory
		c.writeFile("from/m.data", data)
		c.compile(c.write("from/m.onnx", moved),
			set{"ep.context_file_path": c.dir + "/to/m_ctx.onnx"})
		c.loads(c.dir+"/to/m_ctx.onnx", nil, c.source)
	}),
	required("session.model_external_initializers_file_folder_path: a model from memory finds "+
		"its external data", func(c *testCase) {
		moved, data := c.externalized("m.data")
		c.writeFile("data/m.data", data)
		c.openAs("m.onnx", moved.Encode(), set{"ep.context_enable": "1",
			"ep.context_file_path":                                 c.dir + "/m_ctx.onnx",
			"session.model_external_initializers_file_folder_path": c.dir + "/data"}).Release()
		c.loads(c.dir+"/m_ctx.onnx", nil, c.source)
	}),
	required("the compile API makes the same from file to file, embedded or "+
		"not", func(c *testCase) {
		for _, embed := range []bool{false, true} {
			k := ort.Compilation{ModelPath: c.write("m.onnx", c.source),
				OutputPath: fmt.Sprintf("%s/to%v/x_ctx.onnx", c.dir, embed), Embed: embed}
			c.write(fmt.Sprintf("to%v/nothing.onnx", embed), c.source) // the directory
			c.compileBy(fmt.Sprintf("m.onnx to x_ctx.onnx, embed mode %v", embed), k, nil)
			m := c.contexts(fmt.Sprintf("to%v/x_ctx.onnx", embed))
			c.equal("embed_mode", map[bool]string{false: "0", true: "1"}[embed],
				fmt.Sprint(m.Contexts[0].EmbedMode))
			c.loads(k.OutputPath, nil, c.source)
		}
	}),
	required("the compile API, from a buffer into a buffer", func(c *testCase) {
		made := c.compileBy("a buffer to a buffer, embed mode true",
			ort.Compilation{Model: c.source.Encode(), Buffer: true, Embed: true}, nil)
		c.check("the buffer", "a model", fmt.Sprintf("%d bytes", len(made)), len(made) > 0)
		s := c.openAs("the buffer", bytes.Clone(made), nil)
		defer s.Release()
		c.computes(s, c.source)
	}),
}

func (c *testCase) inParts() (tinymodel.Model, *epmodel.Model) {
	if c.family.element != tinymodel.Float || c.family.op == "Conv" {
		c.skip("there are no models in parts of %s", c.family)
	}
	source := c.family.model(1, 3, true)
	c.compile(c.write("m.onnx", source), nil)
	m := c.contexts("m_ctx.onnx")
	if len(m.Contexts) < 2 {
		c.skip("of a model in parts the EP makes one node")
	}
	return source, m
}

func (c *testCase) has(dir, name string) {
	files := c.files(filepath.Join(dir, filepath.Dir(name)))
	c.check("files of directory \""+dir+"\"", "\""+name+"\" among them", list(files), name != "" &&
		slices.Contains(files, filepath.Base(name)))
}

func list(names []string) string { return strings.Join(names, ", ") }
