//go:build linux && (amd64 || arm64)

package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
)

// A step is a line "VERB ARGUMENTS". Of the arguments, those with "=" are options, mostly of the
// session. Names are of files below the case's directory: "bytes:NAME" is a model that is loaded
// from memory, "./NAME" one below the working directory. In all of them "@" at the beginning of a
// value stands for the case's directory, $ep for the EP's name, $binary for the binary of the
// EPContext model that was read last, and $before for that of the one before it.
var verbs = map[string]func(c *testCase, args []string, options set){
	// source writes a model that computes chains of blocks, and expects its outputs from now on.
	"source": func(c *testCase, args []string, options set) {
		c.expected = nil
		c.expect("1", options)
		c.writeFile(args[0], c.expected[0])
	},
	"expect": func(c *testCase, args []string, options set) {
		c.expected = nil
		for _, seed := range args {
			c.expect(seed, options)
		}
	},
	// external writes the source model with its weights in a file beside it.
	"external": func(c *testCase, args []string, _ set) {
		model, data := c.family.model(1, 1, false, "m.data")
		c.writeFile(filepath.Join(filepath.Dir(args[0]), "m.data"), data)
		c.writeFile(args[0], model)
	},
	"mkdir": func(c *testCase, args []string, _ set) { must(os.MkdirAll(c.path(args[0]), 0o700)) },
	"cd":    func(c *testCase, args []string, _ set) { must(os.Chdir(c.path(args[0]))) },
	"move": func(c *testCase, args []string, _ set) {
		must(os.Rename(c.path(args[0]), c.path(args[1])))
	},

	"open": func(c *testCase, args []string, options set) { c.open(args[0], options).Release() },
	"compile": func(c *testCase, args []string, options set) {
		c.open(args[0], options.with("ep.context_enable", "1")).Release()
	},
	"load": func(c *testCase, args []string, options set) {
		s := c.open(args[0], options)
		defer s.Release()
		c.computes(s, c.expected)
	},
	"refuse": func(c *testCase, args []string, options set) {
		c.does(call(args[0], options), "an error", func() (string, error) {
			err := c.tried(args[0], options)
			if err == nil {
				return "", errors.New("a session")
			}
			return err.Error(), nil
		})
	},
	"invalid": func(c *testCase, args []string, options set) {
		c.does(call(args[0], options), invalidGraph, func() (string, error) {
			return isInvalidGraph(c.tried(args[0], options))
		})
	},
	// maybe compiles with an option that may be refused.
	"maybe": func(c *testCase, args []string, options set) {
		if err := c.tried(args[0], options); err != nil {
			c.skip("it is refused: %s", brief(err.Error()))
		}
	},
	// api compiles by the compile API, from a file to a file or from bytes to bytes.
	"api": func(c *testCase, args []string, options set) {
		k := ort.Compilation{Embed: options["embed"] == "1", ModelPath: c.path(args[0]),
			OutputPath: c.path(args[1])}
		from, buffer := strings.CutPrefix(args[0], "bytes:")
		if buffer {
			k = ort.Compilation{Embed: k.Embed, Model: c.bytes(from), Buffer: true}
		}
		c.does("CompileModel("+args[0]+" to "+args[1]+options.String()+")", "success",
			func() (string, error) {
				o, err := c.options(nil, c.devices)
				if err != nil {
					return "", err
				}
				defer o.Release()
				made, err := o.Compile(k)
				if to, ok := strings.CutPrefix(args[1], "bytes:"); ok && err == nil {
					c.writeFile(to, made)
				}
				return "success", err
			})
	},

	// hold opens a session that stays; compute runs all of these, release ends the latest first,
	// and drop the first one.
	"hold": func(c *testCase, args []string, options set) {
		c.held = append(c.held, held{c.open(args[0], options), c.expected})
	},
	"compute": func(c *testCase, _ []string, _ set) {
		for _, h := range c.held {
			c.computes(h.session, h.expected)
		}
	},
	"drop": func(c *testCase, _ []string, _ set) {
		c.held[0].session.Release()
		c.held = c.held[1:]
	},
	"release": func(c *testCase, _ []string, _ set) {
		for _, h := range slices.Backward(c.held) {
			h.session.Release()
		}
		c.held = nil
	},

	// alone compiles one block to DIR/m_ctx.onnx, which is to be one node, and reads it.
	"alone": func(c *testCase, args []string, options set) {
		dir := strings.Join(append(args, "m"), "")
		c.expected = nil
		c.expect("1", options)
		c.writeFile(dir+".onnx", c.expected[0])
		delete(options, "seed")
		c.open(dir+".onnx", options.with("ep.context_enable", "1")).Release()
		c.read(dir + "_ctx.onnx")
		if len(c.model.Contexts) != 1 || c.model.Nodes != 1 || c.model.Contexts[0].Inputs != 1 {
			c.skip("the compiled model has %d nodes", c.model.Nodes)
		}
	},
	"read": func(c *testCase, args []string, _ set) { c.read(args[0]) },
	// is holds the values of a name to an expression.
	"is": func(c *testCase, args []string, _ set) {
		expression := strings.Join(args[1:], " ")
		for _, value := range c.values(args[0]) {
			c.check(args[0], "a text that fits "+expression, value,
				regexp.MustCompile(expression).MatchString(value))
		}
	},
	// node writes the EPContext node that was read again, between two values and with attributes of
	// the options, for join; "-" leaves one out. relu adds another node.
	"node": func(c *testCase, args []string, options set) {
		c.nodes = append(c.nodes, c.rebuilt(args[0], args[1], options))
		c.outs = append(c.outs, args[1])
	},
	"relu": func(c *testCase, args []string, _ set) {
		c.nodes = append(c.nodes, node("Relu", "relu", args[:1], args[1], nil))
		c.outs = append(c.outs, args[1])
	},
	"join": func(c *testCase, args []string, _ set) {
		c.writeFile(args[0], c.family.encode(c.nodes, nil, c.outs, c.model.Metadata))
		c.nodes, c.outs = nil, nil
	},
	// binary damages the binary, or removes it.
	"binary": func(c *testCase, args []string, _ set) {
		if c.whole == nil {
			c.whole = c.bytes(c.binary)
		}
		flipped := bytes.Clone(c.whole)
		flipped[len(flipped)/2] ^= 1 << 6
		content := map[string][]byte{"half": c.whole[:len(c.whole)/2], "empty": {},
			"flipped": flipped, "text": []byte("this is no context binary\n")}[args[0]]
		if c.writeFile(c.binary, content); content == nil {
			must(os.Remove(c.path(c.binary)))
		}
	},

	"has": func(c *testCase, args []string, _ set) { c.has(strings.Join(args, "")) },
	"files": func(c *testCase, args []string, _ set) {
		c.equal(fmt.Sprintf("files of directory %q", args[0]), strings.Join(args[1:], ", "),
			strings.Join(c.files(args[0]), ", "))
	},
	"count": func(c *testCase, args []string, _ set) {
		c.equal(fmt.Sprintf("number of files in directory %q", args[0]), args[1],
			strconv.Itoa(len(c.files(args[0]))))
	},
	// binaries checks that there are not more than primary nodes, which name them all.
	"binaries": func(c *testCase, _ []string, _ set) {
		primary := 0
		for _, n := range c.model.Contexts {
			if n.MainContext == 0 {
				c.equal("ep_cache_context of a node with main_context=0", "", n.CacheContext)
				continue
			}
			primary++
			c.has(n.CacheContext)
		}
		files := slices.DeleteFunc(c.files(""),
			func(name string) bool { return strings.HasSuffix(name, ".onnx") })
		c.check("binaries", "not more than primary nodes", strings.Join(files, ", "),
			len(files) <= primary)
	},

	// plain, weights and several skip the guideline without what it needs.
	"plain": func(c *testCase, _ []string, _ set) {
		if c.family.element != ort.Float || c.family.op == "Conv" {
			c.skip("there are no such models of %s", c.family.name)
		}
	},
	"weights": func(c *testCase, _ []string, _ set) {
		if c.family.op == "Relu" {
			c.skip("a model that the EP takes has no weights")
		}
	},
	"several": func(c *testCase, _ []string, _ set) {
		if len(c.model.Contexts) < 2 {
			c.skip("of a model in parts the EP makes one node")
		}
	},

	"register": func(c *testCase, args []string, _ set) {
		c.does("RegisterExecutionProviderLibrary("+args[0]+"), GetEpDevices", "success",
			func() (string, error) { return "success", c.register(args[0]) })
	},
	"unregister": func(c *testCase, args []string, _ set) {
		c.does("UnregisterExecutionProviderLibrary("+args[0]+")", "success",
			func() (string, error) { return "success", c.env.Unregister(args[0]) })
	},
	"devices": func(c *testCase, _ []string, _ set) {
		c.does("GetEpDevices", "devices under the name "+c.ep.Name, func() (string, error) {
			all, err := c.env.Devices()
			var others []string
			for _, d := range all {
				others = append(others, d.EP)
			}
			c.devices = slices.DeleteFunc(all, func(d ort.Device) bool { return d.EP != c.ep.Name })
			if err == nil && len(c.devices) == 0 {
				err = fmt.Errorf("none; there are those of %s", strings.Join(others, ", "))
			}
			return strconv.Itoa(len(c.devices)), err
		})
	},
	"virtual": func(c *testCase, _ []string, _ set) {
		all, err := c.env.Devices()
		must(err)
		virtual := workerproto.DeviceSelector{}
		virtual.Metadata = map[string]string{workerproto.IsVirtual: "1"}
		if !slices.ContainsFunc(ort.Facts(all), virtual.Fits) {
			c.skip("it lists none")
		}
	},

	"judge": func(c *testCase, args []string, _ set) {
		info, expected := args[0], strings.Join(args[1:], " ")
		if info == "own" {
			info = c.values("compatibility")[0]
		}
		c.does("GetModelCompatibilityForEpDevices("+brief(info)+")", expected,
			func() (string, error) {
				verdict, err := c.verdict(info)
				if err == nil && !slices.Contains(strings.Split(expected, " or "), verdict) {
					err = errors.New(verdict)
				}
				return verdict, err
			})
	},
	// other loads the build that another version left in the directory.
	"other": func(c *testCase, _ []string, _ set) {
		c.does(call("m_ctx.onnx", nil)+", Run", "the outputs of the source model on the CPU, or "+
			invalidGraph, func() (string, error) {
			_, happened, err := c.other()
			return happened, err
		})
	},
	"graded": func(c *testCase, _ []string, _ set) {
		c.read("m_ctx.onnx")
		info := c.values("compatibility")[0]
		verdict, err := c.verdict(info)
		if info == "" || err != nil || verdict == verdicts[0] {
			c.skip("the EP gives no verdict on %q (%v)", info, err)
		}
		loads, _, _ := c.other()
		c.check("GetModelCompatibilityForEpDevices("+brief(info)+")", map[bool]string{
			false: "unsupported: it does not load",
			true:  "optimal or prefer recompilation: it loads and computes right"}[loads], verdict,
			(verdict != "unsupported") == loads)
	},
	// same compares files with those of the same names in another directory.
	"same": func(c *testCase, args []string, _ set) {
		for _, name := range args[1:] {
			first, _ := os.ReadFile(c.path(args[0] + "/" + name)) // without, they differ from 0 on
			again := c.bytes(name)
			at := 0
			for at < min(len(first), len(again)) && first[at] == again[at] {
				at++
			}
			c.check("compare "+name+" with that of another process", "equal bytes",
				fmt.Sprintf("they differ from byte %d of %d on", at, len(again)),
				bytes.Equal(first, again))
		}
	},
	"clean": func(c *testCase, _ []string, _ set) {
		for _, name := range c.files("") {
			content := c.bytes(name)
			at := bytes.Index(content, []byte(filepath.Base(c.work)))
			c.check("look for the directory's path in "+name, "it is not there",
				fmt.Sprintf("at byte %d: %q", at, content[max(0, at-64):][:min(128, len(content))]),
				at < 0)
		}
	},
	"watch": func(c *testCase, _ []string, _ set) {
		c.written, c.listed = watch(append(c.watched, filepath.Dir(c.ep.Library))), c.listing()
	},
	// written checks that only one directory has other files than when watch began.
	"written": func(c *testCase, args []string, _ set) {
		for name, state := range c.listing() {
			if c.listed[name] != state && !strings.HasPrefix(name, c.path(args[0])+"/") {
				c.written.names = append(c.written.names, name)
			}
		}
		c.equal("files written outside of the output directory: beside the model, in the working "+
			"directory, HOME and TMPDIR"+c.written.where, "", strings.Join(c.written.stop(), ", "))
	},
}

// run takes a step.
func run(c *testCase, step string) {
	var args []string
	options := set{}
	verb, rest, _ := strings.Cut(step, " ")
	for word := range strings.FieldsSeq(strings.NewReplacer("$ep", c.ep.Name, "$binary", c.binary,
		"$before", c.before).Replace(rest)) {
		if key, value, is := strings.Cut(word, "="); is && verb != "is" {
			if at, is := strings.CutPrefix(value, "@"); is {
				value = c.path(at)
			}
			options[key] = value
		} else {
			args = append(args, word)
		}
	}
	verbs[verb](c, args, options)
}
