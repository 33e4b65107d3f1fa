package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// runToEnd runs the daemon with these arguments alone, and gives its exit status and what it said.
func runToEnd(t *testing.T, environment []string, args ...string) (status int, stdout,
	stderr string) {
	t.Helper()
	return runThrough(t, nil, environment, args...)
}

// runThrough has another program start epcached, unless it is nil.
func runThrough(t *testing.T, program, environment []string, args ...string) (status int, stdout,
	stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	command := slices.Concat(program, []string{filepath.Join(programs, "epcached")}, args)
	cmd := exec.CommandContext(limited(t), command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.Env = append(os.Environ(), environment...)
	err := cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func TestHelp(t *testing.T) {
	status, out, errs := runToEnd(t, nil, "--version")
	require.Zero(t, status)
	require.Contains(t, out, "epcached")
	require.Contains(t, out, version)
	require.Empty(t, errs)

	status, out, errs = runToEnd(t, nil, "--help")
	require.Zero(t, status)
	require.Empty(t, errs)
	for _, flag := range []string{"--state DIR", "--socket PATH", "--runtime DIR", "--config FILE",
		"--log-level", "Exit status:\n    0  stopped", "Examples:\n  epcached --runtime"} {
		require.Contains(t, out, flag)
	}
	for line := range strings.Lines(out) {
		require.LessOrEqual(t, len(line), 101, line)
	}
	worker, err := exec.Command(filepath.Join(programs, "epcached-ort"), "--help").Output()
	require.NoError(t, err)
	require.Contains(t, string(worker), "Examples:\n  epcached-ort --version")
}

func TestWrongFlags(t *testing.T) {
	cases := map[string]struct {
		args []string
		says string
	}{
		"unknown flag":      {[]string{"--stat", "x"}, "--stat"},
		"an argument":       {[]string{"start"}, `"start"`},
		"flag with nothing": {[]string{"--state"}, "--state"},
		"log level":         {[]string{"--log-level", "loud"}, `"loud"`},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			args := append(c.args, "--socket", filepath.Join(dir, "s"))
			if name != "flag with nothing" {
				args = append(args, "--state", filepath.Join(dir, "state"))
			} else {
				args = c.args
			}
			status, out, errs := runToEnd(t, nil, args...)
			require.Equal(t, exitUsage, status, errs)
			require.Empty(t, out)
			require.Contains(t, errs, c.says)
			require.Regexp(t, `hint: (epcached --help|did you mean --state\?)`, errs)
			require.NoDirExists(t, filepath.Join(dir, "state"), "nothing was begun")
		})
	}
}

func TestConfigurationErrors(t *testing.T) {
	cases := map[string]struct {
		text string
		says []string
	}{
		"unknown field": {"state = \"/tmp/x\"\njob = 3\n", []string{":2:1:", `"job"`}},
		"unknown field in table": {"[limits]\nwall = \"3s\"\nmemory = 5\n",
			[]string{":3:1:", `"limits.memory"`}},
		"unknown field of a runtime": {"[[runtime]]\ndirectory = \"/x\"\npath = \"/y\"\n",
			[]string{":3:1:", "path"}},
		"two unknown fields": {"one = 1\ntwo = 2\n",
			[]string{":1:1:", `"one"`, ":2:1:", `"two"`}},
		"no TOML":    {"jobs = 2\nwhat is this\n", []string{":2:6", "expected '='"}},
		"wrong type": {"jobs = 2\nworker = 5\n", []string{":2:", "worker"}},
		"wrong type in a table": {"[limits]\nwall = \"long\"\n",
			[]string{":2:", "wall"}},
		"a text for a number":     {"\n\njobs = \"two\"\n", []string{":3:", "jobs"}},
		"number out of range":     {"administrators = [-1]\n", []string{":1:", "administrators"}},
		"twice":                   {"jobs = 1\njobs = 2\n", []string{":2:", "jobs"}},
		"runtime without a place": {"[[runtime]]\n", []string{":1:3:", "runtime[1]", "directory"}},
		"runtime in two places": {"[[runtime]]\ndirectory = \"/x\"\nort_library = \"/y\"\n",
			[]string{":1:3:", "runtime[1]", "either"}},
		"log level": {"log_level = \"loud\"\n",
			[]string{":1:", "log_level", `"loud"`, "debug"}},
		"negative number of jobs": {"jobs = -1\n", []string{":1:", "jobs", "-1"}},
		"negative memory": {"[limits]\nmemory_bytes = -5\n",
			[]string{":2:", "limits.memory_bytes", "-5"}},
		"negative limit": {"[limits]\nwall = \"-5s\"\n",
			[]string{":2:1:", "limits.wall", "-5"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			path := filepath.Join(dir, "epcached.toml")
			require.NoError(t, os.WriteFile(path, []byte(c.text), 0o644))
			status, out, errs := runToEnd(t, nil, "--config", path, "--state",
				filepath.Join(dir, "state"), "--socket", filepath.Join(dir, "s"))
			require.Equal(t, exitUsage, status, errs)
			require.Empty(t, out)
			require.Contains(t, errs, path)
			for _, word := range c.says {
				require.Contains(t, errs, word)
			}
			require.NoDirExists(t, filepath.Join(dir, "state"), "nothing was begun")
		})
	}
}

func TestConfigurationThatIsNotThere(t *testing.T) {
	status, _, errs := runToEnd(t, nil, "--config", "/no/such/file.toml")
	require.Equal(t, exitUsage, status)
	require.Contains(t, errs, "/no/such/file.toml")
}

// Flags go before the file, and the file before the defaults.
func TestFlagsGoBeforeTheFile(t *testing.T) {
	s := newSite(t)
	other := filepath.Join(filepath.Dir(s.socket), "other")
	s.config = "state = \"" + other + "\"\nlog_level = \"error\"\nsocket = \"" + other + ".sock\"\n"
	d := s.start(t)
	require.Equal(t, s.state, d.status().StateDirectory)
	require.NoDirExists(t, other)
	d.stop()
	require.NotContains(t, d.log.String(), "level=INFO", "the log level is the file's")
}

// A file of an earlier version starts the daemon, and the log says what has no effect any more.
func TestARemovedFieldIsLoggedAtTheStart(t *testing.T) {
	s := newSite(t)
	s.config = "[space]\ncompress_after = \"7d\"\n"
	d := s.start(t)
	d.stop()
	require.Contains(t, d.log.String(), "space.compress_after")
	require.Contains(t, d.log.String(), "it no longer has an effect")
}

// Mistakes in a file are what --check-config looks for: it fails, and the call was not wrong.
func TestCheckConfigFailsForMistakes(t *testing.T) {
	path := filepath.Join(shortDir(t), "epcached.toml")
	require.NoError(t, os.WriteFile(path, []byte("jbos = 3\n"), 0o644))
	status, _, errs := runToEnd(t, nil, "--config", path, "--check-config")
	require.Equal(t, 1, status)
	require.Contains(t, errs, path+":1")
	require.NotContains(t, errs, "--help")
}

func TestCheckConfig(t *testing.T) {
	dir := shortDir(t)
	path := filepath.Join(dir, "epcached.toml")
	require.NoError(t,
		os.WriteFile(path, []byte("jobs = 3\n[[runtime]]\ndirectory = \"rt\"\n"), 0o644))
	status, out, errs := runToEnd(t, nil, "--config", path, "--check-config", "--state",
		filepath.Join(dir, "state"), "--runtime", "/opt/flagged")
	require.Zero(t, status, errs)
	require.Contains(t, out, "jobs = 3  # "+path+":1\n")
	require.Contains(t, out, "state = \""+filepath.Join(dir, "state")+"\"  # flag --state\n")
	require.Contains(t, out, "[[runtime]]\ndirectory = \"/opt/flagged\"  # flag --runtime\n")
	require.Contains(t, out, "directory = \""+filepath.Join(dir, "rt")+"\"  # "+path+":3\n")
	require.NoDirExists(t, filepath.Join(dir, "state"), "nothing was begun")
}
