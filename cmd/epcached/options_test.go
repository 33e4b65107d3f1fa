package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/store"
)

// The configuration reaches the cache, field by field.
func TestOptionsOf(t *testing.T) {
	file := filepath.Join(t.TempDir(), "epcached.toml")
	require.NoError(t, os.WriteFile(file, []byte(`
jobs = 3
jobs_memory_bytes = 12
path_access = true
administrators = [7]
allow_options = ["session/x"]
quiet_seconds = 0.25
poll_seconds = 4
keep_source = "copy"
publishers = [9]
[claims]
deadline_seconds = 1.25
bytes = 13
user_bytes = 14
open = 15
[limits]
wall_seconds = 1.5
cpu_seconds = 2
verify_seconds = 2.5
memory_bytes = 3
output_bytes = 4
output_files = 5
open_files = 6
processes = 7
stack_bytes = 8
nice = 9
[sandbox]
network = true
read = ["/licence"]
write = ["/dev/x"]
namespaces = false
[[driver]]
ep = "QNNExecutionProvider"
module = "qcom"
[policy]
unknown = "serve"
max_age = "2d"
[policy.QNNExecutionProvider]
unsupported = "fail"
measure_gain = false
min_compile_seconds = 0.5
[rebuild]
enabled = false
jobs = 2
cpu_share = 0.1
window = "22:00-06:00"
[failures]
remember = false
crash = "2m"
limit = "3m"
longest = "2d"
refused = "4h"
[space]
budget = "30%"
free_floor = "5 GiB"
max_unused = "240h"
max_entries = 77
user_bytes = "8 MiB"
user_share = "10%"
pack = "always"
pack_after = "6h"
verify_every = "12h"
unpacked_dir = "/unpacked"
`), 0o600))
	s, err := config.Load(file)
	require.NoError(t, err)
	set, err := s.LoadRules()
	require.NoError(t, err)
	yes, no := true, false
	o := optionsOf(s, set, nil, slog.Default())
	o.Log = nil
	require.Contains(t, o.Conditions, "Memory:3 ")
	require.Contains(t, o.Conditions, "/licence")
	o.Conditions = ""
	require.Equal(t, cache.Options{
		Jobs: 3, JobsMemory: 12, PathAccess: true, Administrators: []uint32{7},
		AllowOptions: []string{"session/x"}, Rules: set,
		Quiet: 250 * time.Millisecond, Poll: 4 * time.Second, KeepSource: "copy",
		Space: store.SpaceOptions{Budget: store.Amount{Percent: 30},
			Floor: store.Amount{Bytes: 5 << 30}, MaxUnused: 240 * time.Hour, MaxEntries: 77,
			UserBytes: store.Amount{Bytes: 8 << 20}, UserShare: store.Amount{Percent: 10}},
		Pack: store.PackAlways, PackAfter: 6 * time.Hour, Verify: 12 * time.Hour,
		UnpackedDir: "/unpacked",
		Publishers:  []uint32{9},
		Claims: claims.Limits{Deadline: 1250 * time.Millisecond, Bytes: 13, UserBytes: 14,
			Open: 15},
		Drivers: []runtimes.DriverSource{{EP: "QNNExecutionProvider", Module: "qcom"}},
		Rebuild: upkeep.RebuildOptions{Off: true, Jobs: 2, CPUShare: 0.1, Window: "22:00-06:00"},
		Failures: failure.Options{Off: true, Crash: 2 * time.Minute, Limit: 3 * time.Minute,
			Longest: 48 * time.Hour, Refused: 4 * time.Hour},
		Policies: map[string]request.Policy{
			"": {Unknown: "serve", PreferRecompilation: "serve_and_refresh",
				Unsupported: "recompile", MaxAge: 48 * time.Hour, MeasureGain: &yes},
			"QNNExecutionProvider": {Unknown: "serve", PreferRecompilation: "serve_and_refresh",
				Unsupported: "fail", MaxAge: 48 * time.Hour,
				MinCompileSeconds: 0.5, MeasureGain: &no},
		},
	}, o)
	require.Equal(t,
		compilers.Limits{Wall: 1500 * time.Millisecond, Verify: 2500 * time.Millisecond,
			CPU: 2 * time.Second, Memory: 3, Output: 4, Files: 5, OpenFiles: 6,
			Processes: 7, Stack: 8, Nice: 9}, limitsOf(s.Limits))
	require.Equal(t,
		compilers.SandboxOptions{Network: true, Read: []string{"/licence"},
			Write: []string{"/dev/x"}, NoNamespaces: true}, sandboxOf(s.Sandbox))
}
