package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestMistypedWordsHaveASuggestion(t *testing.T) {
	newStandIn(t).serve()
	for line, want := range map[string]string{
		"lst":                              "did you mean list?",
		"lits":                             "did you mean list?",
		"help sohw":                        "did you mean show?",
		"completion bsh":                   "did you mean bash?",
		"show":                             "usage: epcachectl show",
		"jobs folow x":                     "did you mean follow?",
		"list --modl x":                    "did you mean --model?",
		"get m --ep E --on-miss backgrund": "did you mean background?",
		"pack":                             "list builds: epcachectl list",
		"frobnicate":                       "epcachectl --help",
	} {
		r := call(t, strings.Fields(line)...)
		require.Equal(t, exit.BadUsage, r.code, r.err)
		require.Contains(t, r.err, "hint: "+want, line)
	}
}

func TestFlagsThatWouldNotBeUsedAreRefused(t *testing.T) {
	newStandIn(t).serve()
	for line, want := range map[string]string{
		"get m --ep E --force":                        "--force needs --out",
		"status --every 1s":                           "--every needs --watch",
		"export --all --to x --not-after 2027-01-31":  "--not-after needs --key",
		"export --all --to x --builder ci":            "--builder needs --key",
		"run --option K=V -- true":                    "--option needs --ep",
		"run --verify-output 1 -- true":               "--verify-output needs --ep",
		"probe --find --refresh":                      "exclude each other",
		"import x --check --pin":                      "--pin cannot be combined with --check",
		"get m --ep E --build 12":                     "--build needs --state",
		"get m --ep E --unpack-to x":                  "--unpack-to needs --state",
		"get m --ep E --on-miss claim --share":        "two models or more",
		"get m n --ep E --share --embed":              "exclude each other",
		"check --quick --deep":                        "one of --quick, --deep",
		"get m n --ep E --share --on-miss claim":      "takes one model",
		"export --all --model-package x --for f.toml": "cannot be combined",
	} {
		r := call(t, strings.Fields(line)...)
		require.Equal(t, exit.BadUsage, r.code, line+": "+r.err)
		require.Contains(t, r.err, want, line)
	}
}

// A script that asks for JSON gets it of every error, with the exit status that the call has.
func TestErrorsAreJSONForScripts(t *testing.T) {
	b := newStandIn(t)
	b.err = errors.New("the index is damaged")
	b.serve()
	for _, line := range []string{"status", "list", "show x", "why x", "rm x", "pin x", "gc", "du",
		"jobs", "probe", "check", "events", "invalidate x", "pack x", "list --modle", "lst", "get",
		"jobs retry", "rm --all"} {
		r := call(t, append(strings.Fields(line), "--json")...)
		require.NotEqual(t, exit.Done, r.code, line)
		out := parseJSON(t, r)
		require.NotEmpty(t, jsonAt(t, out, "error"), line)
		require.EqualValues(t, r.code, jsonAt(t, out, "exit_status"), line)
	}
}

// A script that deletes everything says so.
func TestDeletingAllWithoutATerminalNeedsYes(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	r := call(t, "rm", "--all")
	require.Equal(t, exit.BadUsage, r.code)
	require.Contains(t, r.err, "epcachectl rm --all --yes")
	require.Empty(t, b.changed())
	require.Equal(t, exit.Done, call(t, "rm", "--all", "--yes").code)
	require.Equal(t, []string{"remove "}, b.changed())
}

// A user that has nothing to delete gets the reason why the builds that list shows stay.
func TestUsersDeleteNoSharedBuilds(t *testing.T) {
	b := newStandIn(t)
	b.ordinary, b.builds = true, []*wire.Build{}
	b.serve()
	r := call(t, "rm", "--all", "--yes")
	require.Equal(t, exit.Done, r.code)
	require.Contains(t, r.out, "only administrators delete shared builds")
}

func TestCollectingToASize(t *testing.T) {
	newStandIn(t).serve()
	require.Equal(t, exit.BadUsage, call(t, "gc", "1x").code)
	require.Equal(t, exit.BadUsage, call(t, "gc", "1GiB", "1GiB").code)
}

func TestVersionIsAFlagToo(t *testing.T) {
	require.Contains(t, call(t, "--version").out, "epcachectl version "+version)
	require.Contains(t, call(t, "version").out, "epcachectl "+version)
}

// Shells complete builds, models, jobs, execution providers and values of flags.
func TestShellsCompleteNamesAndValues(t *testing.T) {
	b := newStandIn(t)
	b.builds = []*wire.Build{{Build: strings.Repeat("cd", 32), ModelName: "Org/Net"}}
	b.jobs = []*wire.Job{{Id: strings.Repeat("ab", 16)}}
	b.serve()
	for line, want := range map[string]string{
		"show O": "Org/Net", "rm cd": "cdcdcdcdcdcd", "jobs follow ": "abababababab",
		"list --model O": "Org/Net", "get m --ep Open": "OpenVINOExecutionProvider",
		"get m --on-miss b": "background", "warm m --store u": "user",
		"why x --ep QNN": "QNNExecutionProvider", "export O": "Org/Net", "push cd": "cdcdcdcdcdcd",
		"why m --route c": "compile_api", "get m --on-miss f": "fetch",
	} {
		args := strings.Split(line, " ")
		r := call(t, append([]string{"__complete"}, args...)...)
		require.Contains(t, "\n"+r.out, "\n"+want+"\n", line)
	}
	t.Setenv("EPCACHE_SOCKET", t.TempDir()+"/none")
	require.Equal(t, ":0\n", call(t, "__complete", "show", "").out, "no daemon is started")
}

// Removed verbs and flags say what to use instead.
func TestRemovedSpellings(t *testing.T) {
	for line, instead := range map[string]string{
		"key m.onnx":                         "why MODEL --key",
		"get m.onnx --dim-by-denotation N=1": "dims_by_denotation in the file of --pipeline",
		"warm m.onnx --node-name-prefix=x":   "ep.context_node_name_prefix=PREFIX",
		"gc --to 1GiB":                       "epcachectl gc SIZE",
	} {
		r := call(t, strings.Split(line, " ")...)
		require.Equal(t, exit.BadUsage, r.code, line)
		require.Contains(t, r.err, "epcachectl: hint: removed: use ", line)
		require.Contains(t, r.err, instead, line)
	}
}
