package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// halfPast is a time as results have it.
func halfPast(hour int) string {
	return time.Date(2026, 11, 21, hour, 30, 0, 0, time.Local).Format(time.RFC3339)
}

// explained is an explanation with one of everything.
func explained(decision string) *wire.Explanation {
	at := time.Date(2026, 11, 21, 14, 30, 0, 0, time.Local).UnixMilli()
	return &wire.Explanation{
		Decision: decision, Reason: "made by an earlier library",
		RequestKey: strings.Repeat("ab", 32), Runtime: "/opt/ort",
		Record: `{"version":1,"eps":[{"name":"StandInExecutionProvider","options":{"precision":` +
			`"f16"}}]}`,
		Candidates: []*wire.Candidate{{
			Build: &wire.Build{Build: strings.Repeat("cd", 32), Ep: "StandInExecutionProvider",
				EpVersion: "1.7", SdkVersion: "2026.3", State: "current",
				CreatedMs: at, CompileSeconds: 2, Compatibility: "unsupported",
				CompatibilitySource: "execution provider", CompatibilityRuntime: "/opt/ort",
				CompatibilityReason: "runtime requirements", JudgedMs: at, LoadSeconds: 0.1,
				SourceLoadSeconds: 0.52},
			Reason: "the execution provider refuses it",
			Differences: []*wire.Difference{{Field: "sdk_version", Asked: "2026.4",
				Found: "2026.3"}},
		}},
		Neighbours: []*wire.Neighbour{{RequestKey: strings.Repeat("12", 32),
			ModelName: "other.onnx", Builds: 2,
			Differences: []*wire.Difference{{Field: "eps[0].options.precision", Asked: "f16"}}}},
		History: []*wire.Event{{AtMs: at, Kind: "compiled", Model: "tiny.onnx", Text: "in 2 s"}},
	}
}

func explaining(e *wire.Explanation) func(*wire.Acquire) (unixsock.Answer, error) {
	return func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "explanation", Explanation: e}},
			nil
	}
}

func TestWhySaysAReasonOnce(t *testing.T) {
	const reason = "compiled by these or equal libraries"
	e := explained("hit")
	e.Reason, e.Candidates[0].Reason, e.Candidates[0].Served = reason, reason, true
	e.Candidates[0].Build.CompatibilityReason = reason
	b := newStandIn(t)
	b.acquire = explaining(e)
	b.serve()
	out := call(t, "why", tinyModel(t, "tiny.onnx"), ep).out
	require.Equal(t, 1, strings.Count(out, reason), out)
	require.Contains(t, out, "\nbuild cdcdcdcdcdcd is served\n")
}

func TestWhyModel(t *testing.T) {
	b := newStandIn(t)
	b.acquire = explaining(explained("stale"))
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	r := call(t, "why", model, ep, "--dim", "batch=4")
	require.Equal(t, exit.Stale, r.code, r.err)
	require.Equal(t, wire.OnMiss_EXPLAIN, b.first().GetOnMiss())
	require.Equal(t, map[string]int64{"batch": 4}, b.first().GetFreeDimensions())
	lines := strings.Split(r.out, "\n")
	require.Equal(t, model+" has a build that must not be loaded: made by an earlier library",
		lines[0], "the decision comes first")
	for _, want := range []string{
		"build cdcdcdcdcdcd is not served: the execution provider refuses it\n",
		"unsupported, says the execution provider, for /opt/ort, " + halfPast(14) + ": runtime " +
			"requirements\n",
		"StandInExecutionProvider 1.7, SDK 2026.3\n",
		"loads in 100ms of processor time, the source in 520ms\n",
		"  FIELD        NOW     MADE WITH\n  sdk_version  2026.4  2026.3\n",
		"nearest entries:\n  other.onnx, request key 121212121212, 2 builds, differs in 1 field\n",
		"    eps[0].options.precision  f16        (missing)\n",
		"history:\n  " + halfPast(14) + "  compiled       tiny.onnx  in 2 s\n",
	} {
		require.Contains(t, r.out, want)
	}
	require.NotContains(t, r.out, `version   1`, "only what differs")
	require.Empty(t, r.err)

	all := call(t, "why", model, ep, "--all").out
	require.Regexp(t, `eps\[0\].options.precision +f16\n`, all)
	require.Regexp(t, `\n  version +1\n`, all)
}

func TestWhyEntry(t *testing.T) {
	b := newStandIn(t)
	b.explain = explained("withheld")
	b.serve()
	r := call(t, "why", "abababab")
	require.Equal(t, exit.Stale, r.code, r.err)
	require.True(t,
		strings.HasPrefix(r.out, "abababab is stored, and withheld: made by an earlier library\n"),
		r.out)
	require.Equal(t, exit.Stale, call(t, "why", tinyModel(t, "tiny.onnx")).code,
		"a file without --ep stands for its entry")
	changed := b.changed()
	require.Equal(t, "why abababab", changed[0])
	require.Regexp(t, `^why [0-9a-f]{64}$`, changed[1])
}

// A model that has no build is there all the same.
func TestWhyOfAMiss(t *testing.T) {
	b := newStandIn(t)
	b.acquire = explaining(explained("miss"))
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	r := call(t, "why", model, ep)
	require.Equal(t, exit.NotFound, r.code, r.err)
	require.True(t, strings.HasPrefix(r.out, model+" would be compiled: "), r.out)
}

// Scripts branch on the exit code.
func TestWhyExitCodes(t *testing.T) {
	codes := map[string]int{
		"hit": exit.Done, "passthrough": exit.Done, "current": exit.Done, "miss": exit.NotFound,
		"gone":  exit.NotFound,
		"stale": exit.Stale, "withheld": exit.Stale, "damaged": exit.Damage, "failed": exit.Failed,
	}
	for decision, code := range codes {
		b := newStandIn(t)
		b.explain = &wire.Explanation{Decision: decision}
		b.serve()
		r := call(t, "why", "x")
		require.Equal(t, code, r.code, decision)
		require.NotEmpty(t, r.out)
		require.Empty(t, r.err, "it is the result, not a failure")
		require.Equal(t, code, call(t, "why", "x", "--json").code, decision)
	}
}

func TestWhyJSON(t *testing.T) {
	b := newStandIn(t)
	b.explain = explained("current")
	b.serve()
	var out map[string]any
	require.NoError(t, json.Unmarshal([]byte(call(t, "why", "x", "--json").out), &out))
	require.ElementsMatch(t,
		[]string{"decision", "reason", "request_key", "runtime", "record", "candidates",
			"neighbours", "history", "remotes"}, keysOf(out))
	candidate := out["candidates"].([]any)[0].(map[string]any)
	require.ElementsMatch(t, []string{"build", "served", "reason", "differences"},
		keysOf(candidate))
	require.Equal(t, "execution provider",
		candidate["build"].(map[string]any)["compatibility_source"])
	require.Equal(t, map[string]any{"field": "sdk_version", "asked": "2026.4", "found": "2026.3"},
		candidate["differences"].([]any)[0])
	neighbour := out["neighbours"].([]any)[0].(map[string]any)
	require.ElementsMatch(t, []string{"request_key", "model_name", "builds", "differences"},
		keysOf(neighbour))
	ep := out["record"].(map[string]any)["eps"].([]any)[0].(map[string]any)
	require.Equal(t, "f16", ep["options"].(map[string]any)["precision"])

	b.set(func() { b.explain = &wire.Explanation{Decision: "current"} })
	require.Contains(t, call(t, "why", "x", "--json").out, `"record": null`)
}

func TestWhyMistakes(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, exit.BadUsage, call(t, "why").code)
	require.Equal(t, exit.BadUsage, call(t, "why", tinyModel(t, "tiny.onnx"), "--dim", "batch=1").
		code, "a request without --ep")
	r := call(t, "why", "abababab", ep)
	require.Equal(t, exit.NotFound, r.code)
	require.Contains(t, r.err, `epcachectl: why "abababab": `)
	require.Contains(t, r.err, "hint: for a stored entry, omit the flags: epcachectl why "+
		"abababab\n")
	b.set(func() {
		b.err = &unixsock.Error{Class: wire.ErrorClass_NOT_FOUND, Text: "no such entry"}
	})
	model := tinyModel(t, "tiny.onnx")
	r = call(t, "why", model)
	require.Equal(t, exit.NotFound, r.code)
	require.Contains(t, r.err, "hint: ask what get would do: epcachectl why "+model+" --ep EP\n")
}

func TestWhyOfACompiledModel(t *testing.T) {
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "passthrough",
			Why: "it has an EPContext node"}}, nil
	}
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	r := call(t, "why", model, ep)
	require.Equal(t, result{exit.Done,
		model + " is compiled already: it has an EPContext node\n", ""}, r)
}

func TestJudgement(t *testing.T) {
	require.Equal(t, "not judged yet", judgement(&term.Printer{}, &wire.Build{}))
	require.Equal(t, "prefer recompilation, says rule newer-loads-older",
		judgement(&term.Printer{}, &wire.Build{Compatibility: "prefer_recompilation",
			CompatibilitySource: "rule newer-loads-older"}))
	require.Equal(t, "optimal, the client compiled it itself", judgement(&term.Printer{},
		&wire.Build{Compatibility: "optimal", CompatibilitySource: "put"}))
	require.Equal(t, "optimal, says a load check",
		judgement(&term.Printer{},
			&wire.Build{Compatibility: "optimal", CompatibilitySource: "load check"}))
	require.Equal(t, "not measured", gain(&wire.Build{SourceLoadSeconds: 1}))
	slower := &wire.Build{LoadSeconds: 0.52, SourceLoadSeconds: 0.1}
	require.Equal(t, "the compiled form loads slower than the source: "+
		"520ms of processor time, the source 100ms", gain(slower))
	require.Equal(t, "5.2x", gainColumn(&wire.Build{LoadSeconds: 0.1, SourceLoadSeconds: 0.52}))
	require.Equal(t, "5.2x slower",
		gainColumn(&wire.Build{LoadSeconds: 0.52, SourceLoadSeconds: 0.1}))
}

// Two builds that only the SDK distinguishes are not one line twice.
func TestListTellsSDKsApart(t *testing.T) {
	b := newStandIn(t)
	one, two := b.build(), b.build()
	one.SdkVersion, two.SdkVersion = "2.50", "2.51"
	one.Compatibility, two.Compatibility = "prefer_recompilation", "optimal"
	b.builds = []*wire.Build{one, two}
	b.serve()
	out := call(t, "list").out
	require.Regexp(t, `2\.50 +prefer recompilation `, out)
	require.Regexp(t, `2\.51 +optimal `, out)
	var builds []map[string]any
	require.NoError(t, json.Unmarshal([]byte(call(t, "list", "--json").out), &builds))
	require.Equal(t, "prefer_recompilation", builds[0]["compatibility"])
	require.Contains(t, call(t, "show", "x").out, "prefer recompilation")
}

func TestProbeReportsChanges(t *testing.T) {
	b := newStandIn(t)
	at := time.Date(2026, 11, 21, 14, 30, 0, 0, time.Local).UnixMilli()
	b.runtimes = []*wire.RuntimeFacts{{Directory: "/opt/ort", OrtVersion: "1.31.1", State: "ready",
		Watched: "polled: network file system", PreviousMs: at,
		ProbedMs: at + 3600_000, Changes: []string{"StandInExecutionProvider 1.7 -> 1.8"},
		Eps: []*wire.EpFacts{{Name: "StandInExecutionProvider", Version: "1.8",
			DriverVersion: "555.1", DriverSource: "/sys/module/nvidia/version"}}}}
	b.serve()
	require.Equal(t, `/opt/ort: ONNX Runtime 1.31.1, ready, watched: polled: `+
		`network file system, probed `+halfPast(15)+`
  changed since the probe before it, `+halfPast(14)+`:
    StandInExecutionProvider 1.7 -> 1.8
  StandInExecutionProvider 1.8
    driver 555.1 (from /sys/module/nvidia/version)
    no device on this machine; epcachectl doctor says why
`, call(t, "probe").out)
	var out []map[string]any
	require.NoError(t, json.Unmarshal([]byte(call(t, "probe", "--json").out), &out))
	require.Equal(t, "ready", out[0]["state"])
	require.Equal(t, "555.1", out[0]["eps"].([]any)[0].(map[string]any)["driver_version"])
}

func TestStatusWatch(t *testing.T) {
	newStandIn(t).serve()
	r := call(t, "status", "--watch", "--every", "100ms", "--timeout", "350ms", "--json")
	require.Equal(t, exit.Done, r.code, r.err)
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	require.GreaterOrEqual(t, len(lines), 2)
	require.True(t, json.Valid([]byte(lines[0])))
	require.Equal(t, exit.BadUsage, call(t, "status", "--watch", "--every", "0s").code)
}

// A dry run must not read like a result.
func TestDryRunShows(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	model := tinyModel(t, "tiny.onnx")
	require.True(t, strings.HasPrefix(call(t, "get", model, ep, "-n").out, "would hit "+model+": "))
	var list []map[string]any
	require.NoError(t, json.Unmarshal([]byte(call(t, "get", model, ep, "-n", "--json").out), &list))
	require.Equal(t, true, list[0]["dry_run"])
	b.set(func() { b.builds = []*wire.Build{} })
	require.Equal(t, "deleted nothing: no such builds\n", call(t, "rm", "--all", "--yes").out)
	require.Equal(t, "would delete nothing: no such builds\n",
		call(t, "rm", "--all", "--yes", "-n").out)
}

func TestHugeNamesAreCut(t *testing.T) {
	b := newStandIn(t)
	b.acquire = func(*wire.Acquire) (unixsock.Answer, error) {
		return unixsock.Answer{}, &unixsock.Error{Class: wire.ErrorClass_NOT_FOUND, Text: "none"}
	}
	b.serve()
	huge := strings.Repeat("x", 100_000)
	for _, args := range [][]string{{"--option", huge}, {"--option", huge + "=1"},
		{"--option", "A" + huge + "/x=1"}, {"--session-option", huge}, {"--dim", huge}} {
		r := call(t, append([]string{"get", tinyModel(t, "tiny.onnx"), ep, "--on-miss=fail"},
			args...)...)
		require.NotZero(t, r.code)
		require.Less(t, len(r.err), 1000, args[0])
	}
}
