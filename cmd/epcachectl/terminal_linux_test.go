package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/creack/pty"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// onTerminal runs epcachectl on a terminal of its own, and returns what it wrote there.
func onTerminal(t *testing.T, columns int, env []string, args ...string) string {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, args...)
	cmd.Env = append(append(os.Environ(), asProgram+"=1", "TERM=xterm", "NO_COLOR="), env...)
	f, err := pty.StartWithSize(cmd, &pty.Winsize{Cols: uint16(columns), Rows: 24})
	require.NoError(t, err)
	defer f.Close()
	out, _ := io.ReadAll(f) // which ends with EIO when the program has ended
	_ = cmd.Wait()
	return strings.ReplaceAll(string(out), "\r\n", "\n")
}

// hubModels are ten builds of models that have the names that hubs give.
func hubModels() (names []string, builds []*wire.Build) {
	for i, size := range []string{"tiny", "base", "large"} {
		for j, file := range []string{"", "/onnx/model_quantized.onnx", "/onnx/model_fp16.onnx"} {
			names = append(names, fmt.Sprintf("Xenova/paraphrase-multilingual-MiniLM-L12-%s%s",
				size, file))
			_, _ = i, j
		}
	}
	names = append(names, "resnet50/model.onnx")
	for i, name := range names {
		builds = append(builds, &wire.Build{Build: strings.Repeat(fmt.Sprintf("%02x", 0xa0+i), 32),
			RequestKey: strings.Repeat("cd", 32), ModelDigest: strings.Repeat("ef", 32),
			ModelName: name, ModelPath: "/home/u/.cache/huggingface/hub/" + name,
			Ep: "OpenVINOExecutionProvider", EpVersion: "1.24.1",
			SdkVersion:    "2025.4.1-20426-82bbf0292c5",
			Compatibility: "optimal", State: "current", KeptAs: "whole", Hits: uint64(i),
			CompatibilityReason: "the libraries of the runtime are those that compiled the " +
				"build, byte for byte",
			LastUsedMs: time.Now().Add(-time.Duration(10*i) * time.Minute).UnixMilli(),
			Files: []*wire.File{{Name: "a_ctx.onnx", Size: 123456789,
				Digest: strings.Repeat("ab", 32)}}})
	}
	return names, builds
}

// No verb prints a line that is wider than the terminal, and list distinguishes ten models.
func TestResultsFitTheTerminal(t *testing.T) {
	b := newStandIn(t)
	names, builds := hubModels()
	b.builds = builds
	for i, name := range names {
		b.jobs = append(b.jobs, &wire.Job{Id: fmt.Sprintf("%02x%030d", i, i), State: "running",
			Phase: "compiling", ModelName: name, Ep: "OpenVINOExecutionProvider", ElapsedMs: 61_000,
			EstimateMs: 3_600_000, Waiting: 12,
			Why: "no build for this request, and a reason of some length"})
		b.failures = append(b.failures, &wire.Failure{ModelName: name, Ep: "QNNExecutionProvider",
			Reason: "compiler", Count: 3, Build: strings.Repeat("ab", 32),
			Text: strings.Repeat("a long story of what went wrong in the compiler ", 5)})
		b.advice = append(b.advice, &wire.Advice{Severity: "warning", Subject: "memory",
			Text: strings.Repeat("what is wrong and why it matters ", 5),
			Hint: strings.Repeat("what to do ", 12)})
	}
	b.explain = &wire.Explanation{Decision: "miss", RequestKey: strings.Repeat("cd", 32),
		Reason:     strings.Repeat("a reason that explains much ", 6),
		Candidates: []*wire.Candidate{{Build: builds[0], Reason: strings.Repeat("why not ", 20)}},
		Neighbours: []*wire.Neighbour{{ModelName: names[1], RequestKey: strings.Repeat("12", 32),
			Differences: []*wire.Difference{{Field: "execution_providers[0].options.precision",
				Asked: strings.Repeat("a", 70), Found: strings.Repeat("b", 70)}}}}}
	b.past = []*wire.Event{event(1, time.Now(), strings.Repeat("what happened ", 20))}
	b.remotes = []*wire.Remote{{Name: "shared", Url: "s3://" + strings.Repeat("bucket/", 20),
		Publishes: true, BreakerSeconds: 30, Calls: 1e9, Missing: 1e9, Denied: 1e9,
		Unreachable: 1e9, Fetched: 1e9, FetchedBytes: 1 << 50, SeedBytes: 1 << 50, LostSeconds: 1e6,
		Published: 1e9, SentBytes: 1 << 50, LastError: strings.Repeat("what the server wrote ", 9),
		TrustError:   strings.Repeat("why its trust document is refused ", 5),
		PublishError: strings.Repeat("why nothing was published ", 6)}}
	b.serve()
	dir := t.TempDir()
	for i := range 3 {
		text, err := os.ReadFile(tinyModel(t, "tiny.onnx"))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir,
			fmt.Sprintf("%s%d.onnx", strings.Repeat("long-name-", 12), i)), text, 0o600))
	}
	for _, columns := range []int{60, 80, 200} {
		for _, verb := range []string{"list", "list -l", "status", "du", "jobs", "show x", "why x",
			"why x --all", "doctor", "events", "gc -n", "rm x -n", "probe", "check", "lst",
			"remote status", "gc 1MiB", "warm " + dir + " --ep E"} {
			out := onTerminal(t, columns, nil, strings.Fields(verb)...)
			require.NotEmpty(t, out, verb)
			for line := range strings.Lines(out) {
				require.LessOrEqual(t, ansi.StringWidth(strings.TrimSuffix(line, "\n")), columns,
					"%s on %d columns: %q", verb, columns, line)
			}
		}
		seen := make(map[string]bool)
		out := onTerminal(t, columns, []string{"NO_COLOR=1"}, "list")
		require.NotContains(t, out, "\x1b")
		require.Contains(t, out, "all: ep OpenVINOExecutionProvider, version 1.24.1")
		require.Regexp(t, `10 min ago`, out)
		require.Equal(t, columns < 100, strings.Contains(onTerminal(t, columns, nil, "list", "-l"),
			"too narrow for the columns"), columns)
		at := -1
		for i := range names {
			key := builds[i].GetBuild()[:8]
			require.Greater(t, strings.Index(out, key), at, "the last used first")
			at = strings.Index(out, key)
			line, _, _ := strings.Cut(out[at:], "\n")
			name := strings.Fields(line)[1]
			require.False(t, seen[name], "%q twice on %d columns", name, columns)
			seen[name] = true
		}
	}
}

// A narrow terminal shows which of two builds of one model is for which execution provider.
func TestListDistinguishesExecutionProviders(t *testing.T) {
	b := newStandIn(t)
	_, builds := hubModels()
	b.builds = builds[:2]
	for i, ep := range []string{"OpenVINOExecutionProvider", "QNNExecutionProvider"} {
		builds[i].ModelName, builds[i].Ep, builds[i].Pinned = "m1/model.onnx", ep, true
	}
	b.serve()
	for _, columns := range []int{40, 60, 80, 100} {
		out := onTerminal(t, columns, nil, "list")
		require.Regexp(t, `m1/m\S+nx +Open.*117.7 MiB`, out, columns)
		require.Regexp(t, `m1/m\S+nx +QNN.*117.7 MiB`, out, columns)
	}
}

// Colours are for terminals that have them.
func TestColoursAreForTerminals(t *testing.T) {
	b := newStandIn(t)
	b.jobs = []*wire.Job{{Id: "ab", State: "running", ModelName: "m"}}
	b.serve()
	require.Contains(t, onTerminal(t, 80, nil, "jobs"), "\x1b[32mrunning\x1b[0m")
	for _, env := range []string{"NO_COLOR=1", "TERM=dumb"} {
		require.NotContains(t, onTerminal(t, 80, []string{env}, "jobs"), "\x1b", env)
	}
	require.NotContains(t, call(t, "jobs").out, "\x1b")
}

// The progress of many models is one view: no bar is cut, no line wraps, and the count rises only.
func TestProgressOfManyModels(t *testing.T) {
	b := newStandIn(t)
	b.queue()
	b.progress = &wire.Progress{Phase: "compiling", ElapsedMs: 10_000, EstimateMs: 40_000,
		Detail: "a detail of some length that a narrow terminal has no space for"}
	b.serve()
	dir := t.TempDir()
	for i := range 12 {
		text, err := os.ReadFile(tinyModel(t, "tiny.onnx"))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(fmt.Sprintf("%s/a model with quite a long name %d.onnx",
			dir, i), text, 0o600))
	}
	for _, columns := range []int{60, 80, 200} {
		out := onTerminal(t, columns, nil, "warm", "--follow", dir, "--ep", "E")
		count := -1
		for _, line := range strings.FieldsFunc(out, func(r rune) bool {
			return r == '\n' || r == '\r'
		}) {
			line = ansi.Strip(line)
			require.LessOrEqual(t, ansi.StringWidth(line), columns, "%q", line)
			if at := strings.Index(line, "["); at >= 0 {
				require.Regexp(t, `\[#*\.*\]  `, line)
			}
			var done, all int
			if n, _ := fmt.Sscanf(line, "%d of %d done", &done, &all); n == 2 {
				require.Equal(t, 12, all)
				require.GreaterOrEqual(t, done, count)
				count = done
			}
		}
	}
}
