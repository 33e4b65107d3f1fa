package compilers_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

// newCommand makes a compiler with tools that is closed at the end of the test.
func newCommand(t *testing.T, o compilers.ORTOptions, tools ...compilers.Tool) *compilers.ORT {
	c := newORT(t, o)
	require.NoError(t, c.AddTools(tools))
	return c
}

// qnnTool is testdata/tools/qnn-compile, which really compiles.
func qnnTool(t *testing.T, r compilers.Runtime) compilers.Tool {
	python := os.Getenv("EPCACHED_PYTHON")
	if python == "" {
		t.Skip("NOT TESTED WITH A REAL TOOL: EPCACHED_PYTHON is not set; testdata/fetch-python " +
			"makes an environment")
	}
	script, err := filepath.Abs("../testdata/tools/qnn-compile")
	require.NoError(t, err)
	real, err := filepath.EvalSymlinks(python)
	require.NoError(t, err)
	environment := filepath.Dir(filepath.Dir(python))
	return compilers.Tool{EP: qnn, Program: python, Device: "NPU",
		Args: []string{script, "--runtime", r.Directory, "--embed={embed}", "{model}",
			"{output}", "--dims", "{dims}", "--options", "{options}"},
		Version: []string{script, "--runtime", r.Directory, "--version"},
		Files:   []string{script},
		Read:    []string{environment, filepath.Dir(filepath.Dir(real)), r.Directory}}
}

func TestCommand(t *testing.T) {
	r := compilertest.Runtime(t, "qnn-2.7.0")
	c := newCommand(t, compilers.ORTOptions{}, qnnTool(t, r))
	suite(t, subject{
		Compiler: c, Runtime: c.Equip(r), Tool: true,
		EP: compilers.EP{Name: qnn,
			Options: map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}},
		NoNodesModel: normalizer(),
		Verdict:      compilers.Unknown, // it judges only where an NPU is
		Loads:        true,
	})
}

// script is a tool of a few lines.
func script(t *testing.T, lines string) compilers.Tool {
	path := filepath.Join(t.TempDir(), "tool")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+lines+"\n"), 0o755))
	return compilers.Tool{EP: "ScriptExecutionProvider", Program: path,
		Args: []string{"{model}", "{output}"}, Alone: true}
}

func scriptJob(t *testing.T, tool compilers.Tool) compilers.Job {
	r := compilers.Runtime{ORTLibrary: "/nowhere/libonnxruntime.so.1.31.1", ORTVersion: "1.31.1"}
	return writeJob(t, r, compilers.EP{Name: tool.EP}, tinymodel.Relu())
}

// what a tool does wrong comes out as what a worker does wrong
func TestToolsThatFail(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	limits := compilers.DefaultLimits
	limits.Wall, limits.Output = 10*time.Minute, 1<<20
	for name, c := range map[string]struct {
		lines string
		check func(*testing.T, error)
	}{
		"says no": {"echo working; echo 'licence expired' >&2; exit 3",
			func(t *testing.T, err error) {
				var refused *compilers.RefusedError
				require.ErrorAs(t, err, &refused)
				require.Equal(t, "exit status 3: licence expired", refused.Text)
				require.Equal(t, "run tool", refused.Doing)
			}},
		"crashes": {"kill -SEGV $$", func(t *testing.T, err error) {
			var exit *compilers.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, "SIGSEGV", exit.Name)
			require.Equal(t, "ScriptExecutionProvider", exit.Compiler)
		}},
		"writes nothing": {"true",
			func(t *testing.T, err error) { require.ErrorIs(t, err, compilers.ErrOutput) }},
		"copies the model": {`cp "$1" "$2"`, func(t *testing.T, err error) {
			var none *compilers.NoNodesError
			require.ErrorAs(t, err, &none)
			require.Equal(t, []string{"ScriptExecutionProvider"}, none.EPs)
		}},
		"leaves a link": {`ln -s /etc/passwd "$2"`,
			func(t *testing.T, err error) { require.ErrorIs(t, err, compilers.ErrOutput) }},
		"writes too much": {`head -c 4000000 /dev/zero > "$2"`,
			func(t *testing.T, err error) { require.Error(t, err) }},
		"writes elsewhere": {"echo x > " + outside,
			func(t *testing.T, err error) { require.Error(t, err) }},
		"is not there": {"", func(t *testing.T, err error) {
			require.ErrorContains(t, err, "start tool")
		}},
		"does not end": {"sleep 600",
			func(t *testing.T, err error) { require.ErrorIs(t, err, compilers.ErrTimeout) }},
	} {
		t.Run(name, func(t *testing.T) {
			limits := limits
			if name == "does not end" {
				limits.Wall = time.Second
			}
			tool := script(t, c.lines)
			job := scriptJob(t, tool)
			if c.lines == "" {
				require.NoError(t, os.Remove(tool.Program))
			}
			_, err := newCommand(t, compilers.ORTOptions{Limits: limits}, tool).
				Compile(t.Context(), job, nil)
			require.Error(t, err)
			c.check(t, err)
		})
	}
	require.NoFileExists(t, outside, "a tool wrote outside of its directory")
}

func TestToolsGetTheRequest(t *testing.T) {
	toolArguments := func(t *testing.T, args []string, change func(*compilers.Job)) string {
		tool := script(t, `printf '%s|' "$@" >&2; exit 1`)
		tool.Args = append([]string{"{model}", "{output}"}, args...)
		job := scriptJob(t, tool)
		change(&job)
		_, err := newCommand(t, compilers.ORTOptions{}, tool).Compile(t.Context(), job, nil)
		var refused *compilers.RefusedError
		require.ErrorAs(t, err, &refused)
		_, after, _ := strings.Cut(refused.Text, job.Dir+"/"+job.Output+"|")
		return after
	}
	options := func(j *compilers.Job) {
		j.EPs[0].Options = map[string]string{"b": "2 x",
			"a": "{model}"}
	}
	for name, c := range map[string]struct {
		args   []string
		change func(*compilers.Job)
		want   string
	}{
		"one option": {[]string{"--a={option:a}", "--b", "{option:b}"}, options,
			"--a={model}|--b|2 x|"},
		"all options": {[]string{"{options}"}, options, "a={model}|b=2 x|"},
		"an option that is absent": {[]string{"--a={option:a}", "end"}, func(*compilers.Job) {},
			"end|"},
		"dimensions": {[]string{"{dims}", "{dim:n}"},
			func(j *compilers.Job) { j.FreeDimensions = map[string]int64{"n": 4} }, "n=4|4|"},
		"embedded": {[]string{"{embed}"}, func(j *compilers.Job) { j.Embed = true }, "1|"},
		"level": {[]string{"-O{level}"},
			func(j *compilers.Job) { j.GraphOptimizationLevel = "all" }, "-Oall|"},
		"session": {[]string{"{sessions}"},
			func(j *compilers.Job) { j.SessionOptions = map[string]string{"k": "v"} }, "k=v|"},
		"a brace": {[]string{"{{ep} {ep}"}, func(*compilers.Job) {},
			"{ep} ScriptExecutionProvider|"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, toolArguments(t, c.args, c.change))
		})
	}
}

// nothing that was asked for is ignored
func TestToolsRefuseUnsupportedOptions(t *testing.T) {
	for name, change := range map[string]func(*compilers.Job){
		"option":  func(j *compilers.Job) { j.EPs[0].Options = map[string]string{"a": "1"} },
		"session": func(j *compilers.Job) { j.SessionOptions = map[string]string{"k": "v"} },
		"dim":     func(j *compilers.Job) { j.FreeDimensions = map[string]int64{"n": 1} },
		"denotation": func(j *compilers.Job) {
			j.FreeDimensionsByDenotation = map[string]int64{"n": 1}
		},
		"embedding":     func(j *compilers.Job) { j.Embed = true },
		"level all":     func(j *compilers.Job) { j.GraphOptimizationLevel = "all" },
		"route session": func(j *compilers.Job) { j.Route = compilers.RouteSessionOptions },
		"group":         func(j *compilers.Job) { j.Share = []compilers.ShareMember{{}} },
		"initializers":  func(j *compilers.Job) { j.Initializers.File = "w.bin" },
		"beside it":     func(j *compilers.Job) { j.EPs = append(j.EPs, compilers.EP{Name: qnn}) },
	} {
		t.Run(name, func(t *testing.T) {
			tool := script(t, "exit 9")
			job := scriptJob(t, tool)
			change(&job)
			_, err := newCommand(t, compilers.ORTOptions{}, tool).Compile(t.Context(), job, nil)
			require.ErrorIs(t, err, compilers.ErrOption)
		})
	}
}

func TestToolsAreCheckedBeforeTheyAreUsed(t *testing.T) {
	sound := compilers.Tool{EP: "ScriptExecutionProvider", Program: "/bin/true",
		Args: []string{"{model}", "{output}"}}
	require.NoError(t, sound.Check())
	for name, change := range map[string]func(*compilers.Tool){
		"no execution provider": func(x *compilers.Tool) { x.EP = "" },
		"relative program":      func(x *compilers.Tool) { x.Program = "tool" },
		"relative file":         func(x *compilers.Tool) { x.Files = []string{"lib.so"} },
		"no model":              func(x *compilers.Tool) { x.Args = []string{"{output}"} },
		"no output":             func(x *compilers.Tool) { x.Args = []string{"{model}"} },
		"unknown placeholder":   func(x *compilers.Tool) { x.Args = append(x.Args, "{modell}") },
		"option without a name": func(x *compilers.Tool) { x.Args = append(x.Args, "{option:}") },
		"model with a name":     func(x *compilers.Tool) { x.Args = append(x.Args, "{model:x}") },
		"all within one":        func(x *compilers.Tool) { x.Args = append(x.Args, "-o{options}") },
		"a lone brace":          func(x *compilers.Tool) { x.Args = append(x.Args, "{") },
		"device":                func(x *compilers.Tool) { x.Device = "TPU" },
	} {
		t.Run(name, func(t *testing.T) {
			tool := sound
			tool.Args = append([]string{}, sound.Args...)
			change(&tool)
			require.Error(t, tool.Check())
		})
	}
}

// the tool's file and its arguments are a part of the library's identity
func TestEquipMakesToolsPartOfTheIdentity(t *testing.T) {
	tool := script(t, "exit 0")
	r := compilers.Runtime{EPs: []compilers.EPLibrary{{EP: qnn, Path: "/qnn.so",
		Files: []string{"/qnn.so"}}}}
	alone := newCommand(t, compilers.ORTOptions{}, tool).Equip(r)
	require.Len(t, alone.EPs, 2)
	require.Equal(t, []string{tool.Program}, alone.EPs[1].Files)
	require.Len(t, r.EPs, 1, "the runtime itself is not changed")
	tool.Alone = false
	require.Len(t, newCommand(t, compilers.ORTOptions{}, tool).Equip(r).EPs, 1,
		"without a library and not alone")
	tool.EP = qnn
	beside := newCommand(t, compilers.ORTOptions{}, tool).Equip(r).EPs[0]
	require.Equal(t, "/qnn.so", beside.Path)
	require.ElementsMatch(t, []string{"/qnn.so", tool.Program}, beside.Files)
	tool.Args = append(tool.Args, "-O3")
	require.NotEqual(t, beside.Tool, newCommand(t, compilers.ORTOptions{}, tool).Equip(r).
		EPs[0].Tool)
}

// an ep with a library that only the applications have
func TestToolWithoutALibrary(t *testing.T) {
	tool := script(t, `[ "$1" = version ] && echo "tool 4.2" && exit 0; exit 1`)
	tool.Version = []string{"version"}
	c := newCommand(t, compilers.ORTOptions{}, tool)
	r := c.Equip(compilers.Runtime{ORTVersion: "1.31.1"})
	facts, err := c.Probe(t.Context(), r)
	require.NoError(t, err)
	require.Equal(t, "NPU", facts.EPs[0].Devices[0].Type)
	eps := []compilers.EP{{Name: tool.EP}}
	check, err := c.Check(t.Context(), compilers.CheckJob{Runtime: r, EPs: eps, Graph: "/x.onnx"})
	require.NoError(t, err)
	require.Equal(t, compilers.NotCheckable, check.Outcome)
	compared, err := c.VerifyOutput(t.Context(),
		compilers.VerifyJob{CheckJob: compilers.CheckJob{Runtime: r, EPs: eps, Graph: "/x.onnx"},
			Source: "/y.onnx", Most: 1})
	require.NoError(t, err)
	require.Equal(t, compilers.NotCheckable, compared.Outcome)
	verdicts, err := c.Compatibility(t.Context(), r, eps[0], []string{"a", "b"})
	require.NoError(t, err)
	require.Equal(t, []compilers.Verdict{compilers.Unknown, compilers.Unknown}, verdicts)
	_, err = c.Fingerprint(t.Context(), r, eps, nil)
	var refused *compilers.RefusedError
	require.ErrorAs(t, err, &refused, "the one-node model was refused")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.Fingerprint(ctx, r, eps, nil)
	require.ErrorIs(t, err, context.Canceled)
}

// what a tool starts ends with it, whatever it did to get away
func TestToolsLeaveNoProcesses(t *testing.T) {
	tool := script(t, `setsid sleep 86399.5 >/dev/null 2>&1 & exit 1`)
	_, err := newCommand(t, compilers.ORTOptions{}, tool).
		Compile(t.Context(), scriptJob(t, tool), nil)
	require.Error(t, err)
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, path := range commands {
		line, err := os.ReadFile(path)
		require.False(t, err == nil && strings.Contains(string(line), "86399.5"), "still there: %s",
			path)
	}
}
