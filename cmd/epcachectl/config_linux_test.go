package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/internal/config"
)

func TestConfigCheck(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "epcached.toml")
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	write("epcached.toml", "jobs = -1\n[policy]\nunknwon = \"serve\"\n")
	wrong := file + ":1:1: field \"jobs\": -1 is not 0 to 4096\n" + file +
		":3:1: unknown field \"policy.unknwon\"; did you mean \"unknown\"?\n"
	require.Equal(t, result{exit.Failed, wrong, ""}, call(t, "config", "check", file))
	var out configResult
	require.NoError(t, json.Unmarshal([]byte(call(t, "config", "check", file, "--json").out), &out))
	first := &config.Error{Position: config.Position{Line: 1, Column: 1}, Field: "jobs",
		Text: "-1 is not 0 to 4096"}
	require.Equal(t, first, out.Errors[0])

	write("epcached.toml", "rules = [\"rules.toml\"]\n")
	write("rules.toml", "what = 1\n")
	r := call(t, "config", "check", file)
	require.Equal(t, exit.Failed, r.code)
	require.Contains(t, r.out, filepath.Join(dir, "rules.toml")+":1:1: ",
		"a relative path is meant relative to this file")

	write("epcached.toml", "jobs = 1\n")
	require.Equal(t, result{exit.Done, file + ": no mistakes\n", ""},
		call(t, "config", "check", file))
	write("epcached.toml", "[space]\npack = \"always\"\ncompress_after = \"3d\"\n")
	r = call(t, "config", "check", file)
	require.Equal(t, exit.Done, r.code, "a field of the version before is no mistake")
	require.Contains(t, r.out, "warning: "+file+
		":3:1: field \"space.compress_after\": it no longer has an effect: ")
	out = configResult{}
	require.NoError(t, json.Unmarshal([]byte(call(t, "config", "check", file, "--json").out), &out))
	require.Empty(t, out.Errors)
	require.Equal(t, "space.compress_after", out.Warnings[0].Field)
	require.Equal(t, exit.NotFound, call(t, "config", "check", file+".none").code)
	require.Equal(t, exit.BadUsage, call(t, "config", "check", file, file).code)
}

func TestConfigShow(t *testing.T) {
	file := filepath.Join(t.TempDir(), "epcached.toml")
	require.NoError(t, os.WriteFile(file, []byte("jobs = 3\n"), 0o600))
	r := call(t, "config", "show", file)
	require.Equal(t, exit.Done, r.code, r.err)
	require.Contains(t, r.out, "jobs = 3  # "+file+":1\n")
	var fields []config.Field
	require.NoError(t,
		json.Unmarshal([]byte(call(t, "config", "show", file, "--json").out), &fields))
	require.Contains(t, fields, config.Field{Name: "jobs", Value: float64(3), Origin: file + ":1"})
	require.Contains(t, fields,
		config.Field{Name: "policy.unknown", Value: "load_check", Origin: "default"})
	require.Contains(t, fields, config.Field{Name: "rules", Value: []any{}, Origin: "default"},
		"a list, as the text has it")
	require.Contains(t, fields,
		config.Field{Name: "administrators", Value: []any{}, Origin: "default"})
	require.Equal(t, exit.NotFound, call(t, "config", "show", file+".none").code)
	require.Equal(t, exit.Done, call(t, "config").code)
	require.NoError(t, os.WriteFile(file, []byte("jobs = -3\nnone = 1\n"), 0o600))
	r = call(t, "config", "show", file)
	require.Equal(t, exit.Failed, r.code)
	require.Regexp(t, "^(epcachectl: "+file+":[12]:1: .*\n){2}$", r.err)
}

func TestConfigCheckSaysWhatReplacesRemovedFields(t *testing.T) {
	file := filepath.Join(t.TempDir(), "epcached.toml")
	require.NoError(t, os.WriteFile(file, []byte("[space]\nmax_entries = 3\n"), 0o600))
	r := call(t, "config", "check", file)
	require.Equal(t, exit.Done, r.code)
	require.Equal(t, "warning: "+file+":2:1: field \"space.max_entries\": it no longer has an "+
		"effect: use budget, or max_unused\n"+file+": no mistakes\n", r.out)
}

// Without a name it is the file that the caller's own daemon reads.
func TestConfigIsTheUsersOwnWhereThereIsOne(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", dir)
	t.Setenv("XDG_STATE_HOME", dir)
	if _, err := os.Stat(config.DefaultFile); err != nil {
		require.Contains(t, call(t, "config", "check").err, config.DefaultFile)
	}
	file := filepath.Join(dir, "epcached", "epcached.toml")
	require.NoError(t, os.Mkdir(filepath.Dir(file), 0o700))
	require.NoError(t, os.WriteFile(file, []byte("jobs = 3\n"), 0o600))
	require.Equal(t, result{exit.Done, file + ": no mistakes\n", ""},
		call(t, "config", "check"))
	shown := call(t, "config", "show")
	require.Contains(t, shown.out, "jobs = 3  # "+file+":1\n")
	require.Contains(t, shown.out, "state = \""+filepath.Join(dir, "epcached")+"\"",
		"also for root, whose daemon of its own has it there")
	require.NoError(t, os.WriteFile(file, []byte("jobs = -1\n"), 0o600))
	got := call(t, "config", "check")
	require.Equal(t, exit.Failed, got.code)
	require.Contains(t, got.out, file+":1:1: ")
}
