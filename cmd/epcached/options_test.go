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
keep_source = "copy"
publishers = [9]
[limits]
wall = "90s"
memory_bytes = 3
output_bytes = 4
[sandbox]
network = true
read = ["/licence"]
write = ["/dev/x"]
[[driver]]
ep = "QNNExecutionProvider"
file = "/sys/module/qcom/version"
[policy]
unknown = "serve"
max_age = "2d"
[policy.QNNExecutionProvider]
unsupported = "fail"
measure_gain = false
[rebuild]
enabled = false
window = "22:00-06:00"
[space]
budget = "30%"
free_floor = "5 GiB"
max_unused = "240h"
user_share = "10%"
pack = "always"
pack_after = "6h"
verify_every = "12h"
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
		KeepSource: "copy",
		Space: store.SpaceOptions{Budget: store.Amount{Percent: 30},
			Floor: store.Amount{Bytes: 5 << 30}, MaxUnused: 240 * time.Hour,
			UserShare: store.Amount{Percent: 10}},
		Pack: store.PackAlways, PackAfter: 6 * time.Hour, Verify: 12 * time.Hour,
		Publishers: []uint32{9},
		Claims:     claims.Limits{Deadline: 90 * time.Second, Bytes: 4},
		Drivers: []runtimes.DriverSource{{EP: "QNNExecutionProvider",
			File: "/sys/module/qcom/version"}},
		Rebuild: upkeep.RebuildOptions{Off: true, Window: "22:00-06:00"},
		Policies: map[string]request.Policy{
			"": {Unknown: "serve", PreferRecompilation: "serve_and_refresh",
				Unsupported: "recompile", MaxAge: 48 * time.Hour, MeasureGain: &yes},
			"QNNExecutionProvider": {Unknown: "serve", PreferRecompilation: "serve_and_refresh",
				Unsupported: "fail", MaxAge: 48 * time.Hour, MeasureGain: &no},
		},
	}, o)
	require.Equal(t,
		compilers.Limits{Wall: 90 * time.Second, CPU: 24 * time.Minute, Memory: 3,
			Output: 4}, limitsOf(s.Limits))
	require.Equal(t,
		compilers.SandboxOptions{Network: true, Read: []string{"/licence"},
			Write: []string{"/dev/x"}}, sandboxOf(s.Sandbox))
}
