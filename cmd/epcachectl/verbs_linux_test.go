package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestList(t *testing.T) {
	newStandIn(t).serve()
	r := call(t, "list")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Equal(t, 3, strings.Count(r.out, "\n"), "a head and the builds of both pages")
	builds := parseJSON(t, call(t, "list", "--json"))
	require.Len(t, builds, 2)
	require.Equal(t, "tiny.onnx", jsonAt(t, builds, 0, "model_name"))
}

func TestListSaysHowBuildsAreKept(t *testing.T) {
	b := newStandIn(t)
	b.builds = []*wire.Build{{Build: "cd", ModelName: "a.onnx", State: "current",
		KeptAs: "packed, with a copy"}}
	b.serve()
	require.Regexp(t, ` KEPT +STATE\n.* packed, with a copy +current\n$`, call(t, "list").out)
	require.Contains(t, call(t, "list", "--json").out, `"kept_as": "packed, with a copy"`)
	b.set(func() { // another one, for the first may still be being sent
		b.builds = []*wire.Build{{Build: "cd", ModelName: "a.onnx", State: "current",
			KeptAs: "packed, with a copy", KeptText: "packed, 1 B of 2 B its own"}}
	})
	require.Regexp(t, `\nkept +packed, 1 B of 2 B its own\n`, call(t, "show", "cd").out)
	shown := call(t, "show", "cd", "--json").out
	require.Contains(t, shown, `"kept_as": "packed, with a copy"`, "the same word as in list")
	require.Contains(t, shown, `"kept_text": "packed, 1 B of 2 B its own"`)
}

func TestShowNamesTheUserOfAPut(t *testing.T) {
	b := newStandIn(t)
	b.builds = []*wire.Build{{Build: strings.Repeat("cd", 32), ModelName: "a.onnx",
		MadeBy: "uid 1000"}}
	b.serve()
	require.Regexp(t, `compiled by +uid 1000, with libraries of its own\n`,
		call(t, "show", "a.onnx").out)
	require.Contains(t, call(t, "list", "--json").out, `"made_by": "uid 1000"`)
}

func TestShow(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	r := call(t, "show", "tiny")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Contains(t, r.out, "history: compiled")
	require.Equal(t, []string{"show tiny"}, b.changed())
	var out struct {
		Builds []struct{ Record struct{ Version int } }
	}
	require.NoError(t, json.Unmarshal([]byte(call(t, "show", "tiny", "--json").out), &out))
	require.Equal(t, 1, out.Builds[0].Record.Version)
}

// A file stands for the entry of its content.
func TestModelAsEntry(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	text, err := os.ReadFile(model)
	require.NoError(t, err)
	digest, err := cas.Sum(context.Background(), strings.NewReader(string(text)), 0,
		int64(len(text)))
	require.NoError(t, err)
	for _, args := range [][]string{{"show", model}, {"invalidate", model, "--reason", "why"},
		{"rm", model}} {
		require.Equal(t, exit.Done, call(t, args...).code)
	}
	require.Equal(t,
		[]string{"show " + digest.String(), "invalidate " + digest.String() + " why",
			"remove " + digest.String()}, b.changed())
}

func TestChangesAndDryRun(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, "would withhold tiny.onnx: build cdcdcdcdcdcd of StandInExecutionProvider\n",
		call(t, "invalidate", "x", "-n").out)
	require.Equal(t, "would delete tiny.onnx: build cdcdcdcdcdcd of "+
		"StandInExecutionProvider\n2.0 KiB would be freed\n", call(t, "rm", "x", "-n").out)
	require.Equal(t, exit.Done, call(t, "rm", "--all", "--yes", "-n").code)
	require.Empty(t, b.changed())
	require.Equal(t,
		"deleted tiny.onnx: build cdcdcdcdcdcd of StandInExecutionProvider\n2.0 KiB freed\n",
		call(t, "rm", "--all", "--yes").out)
	require.Equal(t, []string{"remove "}, b.changed())
	for _, args := range [][]string{{"rm"}, {"rm", "--all", "--yes", "x"}, {"invalidate"}} {
		require.Equal(t, exit.BadUsage, call(t, args...).code, args)
	}
	out := parseJSON(t, call(t, "rm", "x", "-n", "--json"))
	require.Equal(t, true, jsonAt(t, out, "dry_run"))
	require.EqualValues(t, 2048, jsonAt(t, out, "freed_bytes"))
}

func TestPins(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, "would pin tiny.onnx: build cdcdcdcdcdcd of StandInExecutionProvider\n",
		call(t, "pin", "x", "-n").out)
	require.Empty(t, b.changed())
	require.Equal(t, "pinned tiny.onnx: build cdcdcdcdcdcd of StandInExecutionProvider\n",
		call(t, "pin", "x", "y").out)
	require.Equal(t, true,
		jsonAt(t, parseJSON(t, call(t, "pin", "x", "--json")), "builds", 0, "pinned"))
	require.Equal(t, exit.Done, call(t, "unpin", "x").code)
	require.Equal(t, []string{"pin x y", "pin x", "unpin x"}, b.changed())
	require.Equal(t, exit.BadUsage, call(t, "pin").code)
	b.set(func() { b.builds = []*wire.Build{{Build: "cd", State: "current", Pinned: true}} })
	require.Contains(t, call(t, "list").out, "current, pinned")
	require.Contains(t, call(t, "show", "x").out, "current, pinned")
}

func TestCheckFindsDamage(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, result{exit.Done, "1 build, 2 files, 0 B: no damage\n", ""}, call(t, "check"))
	leftover := &wire.Finding{Kind: "leftover", Object: "x"}
	damage := &wire.Finding{Kind: "damaged", Object: "y", Detail: "one byte",
		Builds: []string{"0123456789abcdef"}}
	b.set(func() { b.findings = []*wire.Finding{leftover} })
	require.Equal(t, exit.Done, call(t, "check", "--deep").code, "a leftover is no damage")
	b.set(func() { b.findings = []*wire.Finding{leftover, damage} })
	r := call(t, "check", "--quick")
	require.Equal(t, exit.Damage, r.code)
	require.Contains(t, r.out, "damaged y: one byte\n  needed by build 0123456789ab\n")
	require.Empty(t, r.err, "it is the result, not a failure")
	require.Equal(t, exit.BadUsage, call(t, "check", "--quick", "--deep").code)
	require.Equal(t, exit.Damage, call(t, "check", "--json").code)
}

func TestRepairReportsItsActions(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, result{exit.Done, "1 build, 2 files, 0 B: 0 findings repaired\n", ""},
		call(t, "repair"))
	b.set(func() {
		b.changes, b.findings = nil,
			[]*wire.Finding{{Kind: "damaged", Object: "y", Detail: "one byte",
				Action: "quarantine it"}}
	})
	r := call(t, "repair", "-n")
	require.Equal(t, exit.Damage, r.code, "there is damage")
	require.Equal(t, "damaged y: one byte\n  would do: quarantine it\n1 build, 2 files, 0 B: 1 "+
		"finding would be repaired\n", r.out)
	require.NotContains(t, b.changed(), "repair")
	r = call(t, "repair", "--json")
	require.Equal(t, exit.Done, r.code, "none is left")
	out := parseJSON(t, r)
	require.EqualValues(t, 1, jsonAt(t, out, "repaired"))
	require.Equal(t, "quarantine it", jsonAt(t, out, "findings", 0, "action"))
	require.Contains(t, b.changed(), "repair")
	b.set(func() { b.findings = append(b.findings, &wire.Finding{Kind: "newer", Object: "z"}) })
	require.Equal(t, exit.Damage, call(t, "repair").code, "nothing was done about one")
	b.set(func() {
		b.findings = []*wire.Finding{b.findings[0],
			{Kind: "newer", Object: "z", Action: "failed: no such disk"}}
	})
	require.Equal(t, exit.Damage, call(t, "repair").code, "nor where it failed")
}

func TestStatus(t *testing.T) {
	newStandIn(t).serve()
	require.Contains(t, call(t, "status").out, "uid:0, administrator")
	var out map[string]any
	require.NoError(t, json.Unmarshal([]byte(call(t, "status", "--json").out), &out))
	require.ElementsMatch(t,
		[]string{"logical_bytes", "unique_bytes", "unpacked_bytes", "saved_by_sharing_bytes",
			"dead_bytes", "budget_bytes", "entries", "builds",
			"used_bytes", "disk_bytes", "manifest_bytes", "held_bytes", "reserved_bytes",
			"pinned_bytes", "free_bytes", "floor_bytes",
			"evicted", "unkept", "to_look_at"},
		keysOf(out["space"].(map[string]any)))
	require.EqualValues(t, 7, out["space"].(map[string]any)["unique_bytes"])
}

func TestProbe(t *testing.T) {
	newStandIn(t).serve()
	require.Contains(t, call(t, "probe").out,
		"/opt/ort: ONNX Runtime 1.31.1\n  StandInExecutionProvider")
	require.Equal(t, "CPU",
		jsonAt(t, parseJSON(t, call(t, "probe", "--json")), 0, "eps", 0, "devices", 0, "type"))
}

func TestProbeFindHasOneExitStatusInBothForms(t *testing.T) {
	for _, home := range []string{t.TempDir(), os.Getenv("HOME")} {
		t.Setenv("HOME", home)
		require.Equal(t, call(t, "probe", "--find").code, call(t, "probe", "--find", "--json").code)
	}
}

func TestProbeFindNothing(t *testing.T) {
	r := call(t, "probe", "--find", "--runtime", t.TempDir())
	require.Equal(t, exit.NotFound, r.code)
	require.Contains(t, r.err, "libonnxruntime.so")
}

func TestTOMLString(t *testing.T) {
	for path, want := range map[string]string{"/opt/rt": `"/opt/rt"`, `/a"b`: `'/a"b'`} {
		got, err := tomlString(path)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
}

func TestKey(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	r := call(t, "why", tinyModel(t, "tiny.onnx"), ep, "--key", "--json")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Equal(t, wire.OnMiss_KEY_ONLY, b.first().GetOnMiss())
	require.JSONEq(t, `{"request_key":"`+strings.Repeat("ab", 32)+`","model_digest":"`+
		strings.Repeat("ef", 32)+`","record":{"version":1}}`, r.out)
}

func TestInspect(t *testing.T) {
	t.Setenv(unixsock.SocketVariable, "/nonexistent") // it needs no daemon
	model := tinyModel(t, "tiny.onnx")
	r := call(t, "inspect", model)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Regexp(t, `opset +ai.onnx 17`, r.out)
	var out modelfile.Inspected
	require.NoError(t, json.Unmarshal([]byte(call(t, "inspect", model, "--json").out), &out))
	require.EqualValues(t, 8, out.IRVersion)
	require.Len(t, out.ModelDigest, 64)

	require.Equal(t, exit.NotFound, call(t, "inspect", filepath.Join(t.TempDir(), "none")).code)
	garbage := filepath.Join(t.TempDir(), "garbage")
	require.NoError(t, os.WriteFile(garbage, []byte("this is no model"), 0o600))
	r = call(t, "inspect", garbage)
	require.Equal(t, exit.Failed, r.code)
	require.True(t, strings.HasPrefix(r.err, `epcachectl: inspect "`+garbage+`": `), r.err)
}

// inspect shows every attribute of an EPContext node, those that no schema has as well.
func TestInspectShowsAllAttributes(t *testing.T) {
	model := compiledModel(t, t.TempDir())
	r := call(t, "inspect", model)
	require.Equal(t, exit.Done, r.code, r.err)
	for _, line := range []string{"notes = made by hand", "max_size = 4096", "tuning = fast",
		"table = 8192 bytes"} {
		require.Regexp(t, `(?m)^ +`+line+`$`, r.out)
	}
	var out modelfile.Inspected
	require.NoError(t, json.Unmarshal([]byte(call(t, "inspect", model, "--json").out), &out))
	one := out.Contexts[0]
	require.Equal(t, "made by hand", one.Notes)
	require.EqualValues(t, 4096, one.MaxSize)
	require.Equal(t, map[string]string{"tuning": "fast"}, one.Attributes)
	require.Equal(t, map[string]int64{"table": 8192}, one.AttributeBytes)
}

// A model that is compiled already has no key, and none is printed.
func TestKeyOfACompiledModel(t *testing.T) {
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "passthrough"}}, nil
	}
	b.serve()
	r := call(t, "why", "--key", tinyModel(t, "tiny.onnx"), ep)
	require.Equal(t, exit.Failed, r.code)
	require.Empty(t, r.out)
	require.Contains(t, r.err, "it is compiled already, so no build is looked up")
}

func TestErrorsOfTheDaemon(t *testing.T) {
	b := newStandIn(t)
	b.err = &unixsock.Error{Class: wire.ErrorClass_NOT_ALLOWED, Text: "not yours", Hint: "ask"}
	b.serve()
	for _, args := range [][]string{{"list"}, {"status"}, {"probe"}, {"check"}, {"repair"},
		{"rm", "x"}, {"invalidate", "x"}, {"show", "x"}, {"events"}, {"why", "x"}} {
		r := call(t, args...)
		require.Equal(t, exit.NotAllowed, r.code, args)
		require.Contains(t, r.err, "not yours\nepcachectl: hint: ask\n")
		require.Empty(t, r.out)
	}
}

func TestNoDaemon(t *testing.T) {
	t.Setenv(unixsock.SocketVariable, filepath.Join(t.TempDir(), "none"))
	for _, args := range [][]string{{"list"}, {"status"}, {"probe"}, {"check"}, {"repair"},
		{"rm", "x"}, {"invalidate", "x"}, {"show", "x"}, {"events"}, {"why", "x"}} {
		require.Equal(t, exit.NoDaemon, call(t, append(args, "--wait=0")...).code, args)
	}
	require.Equal(t, exit.Done, call(t, "version").code)
	require.Contains(t, call(t, "--version").out, version)
	require.Equal(t, exit.Done, call(t, "completion", "bash").code)
}

// Each verb has --json and help with an example and its exit statuses, short enough to be read.
func TestHelp(t *testing.T) {
	root := newRoot(&cli.Call{Print: term.NewPrinter(os.Stdout, os.Stderr)})
	for _, cmd := range root.Commands() {
		r := call(t, cmd.Name(), "--help")
		require.Equal(t, exit.Done, r.code)
		require.Contains(t, r.out, "Exit status:\n    0  done", cmd.Name())
		require.Contains(t, r.out, "Examples:\n  epcachectl "+cmd.Name())
		require.Contains(t, r.out, "--json")
		if cmd.Name() == "completion" { // cobra's own words
			continue
		}
		for _, one := range append(cmd.Commands(), cmd) {
			require.LessOrEqual(t, len(strings.Fields(one.Short)), 8, one.CommandPath())
			text, _, _ := strings.Cut(one.Long, "\n\nExit status:")
			for paragraph := range strings.SplitSeq(text, "\n\n") {
				require.LessOrEqual(t, strings.Count(paragraph, "\n"), 3, "%s: %s",
					one.CommandPath(), paragraph)
				for line := range strings.SplitSeq(paragraph, "\n") {
					require.LessOrEqual(t, len(line), 100, "%s: %s", one.CommandPath(), line)
				}
			}
		}
	}
	require.Equal(t, exit.BadUsage, call(t, "frobnicate").code)
	require.Equal(t, call(t, "list", "--help").out, call(t, "help", "list").out)
}

func TestNamesCannotDrive(t *testing.T) {
	require.Equal(t, `"\x1b[2J"`, term.Printable("\x1b[2J"))
	require.Equal(t, "modèle.onnx", term.Printable("modèle.onnx"))
}

// Damage that the daemon has dealt with is shown and explained, and is none for check or repair.
func TestCheckAndRepairAgreeOnDamageThatWasDealtWith(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	b.set(func() {
		b.findings = []*wire.Finding{{Kind: "missing", Object: "y", Detail: "the blob is not there",
			Action: "none: its builds are being recompiled"}}
	})
	for _, verb := range [][]string{{"check"}, {"repair", "-n"}, {"repair"}} {
		r := call(t, verb...)
		require.Equal(t, exit.Done, r.code, verb)
		require.Contains(t, r.out, "missing y: the blob is not there\n"+
			"  nothing is left to repair: its builds are being recompiled\n")
	}
}
