package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// ruleFile has one rule that gives this verdict.
func ruleFile(verdict string) string {
	return "[[ep.QNNExecutionProvider.rule]]\nname = \"own\"\nverdict = \"" + verdict +
		"\"\nreason = \"we say so\"\n"
}

// configuredWith starts a daemon with rules of its own, and gives the paths of both files.
func configuredWith(t *testing.T, more string) (d *epcached, configuration, rules string) {
	s := newSite(t)
	dir := filepath.Dir(s.socket)
	rules = filepath.Join(dir, "rules.toml")
	require.NoError(t, os.WriteFile(rules, []byte(ruleFile("optimal")), 0o644))
	s.config = "rules = [\"rules.toml\"]\n" + more
	return s.start(t), filepath.Join(dir, "epcached.toml"), rules
}

// replace puts a file in another's place, as editors and package managers do.
func replace(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path+".new", []byte(text), 0o644))
	require.NoError(t, os.Rename(path+".new", path))
}

// requireEvent waits for an event about the configuration that says all of this.
func (d *epcached) requireEvent(words ...string) {
	d.Helper()
	client := d.dial()
	defer client.Close()
	require.Eventually(d, func() bool {
		reply, err := unixsock.Ask[wire.EventsReply](limited(d), client, &wire.Events{}, nil)
		require.NoError(d, err)
	events:
		for _, e := range reply.Events {
			for _, word := range words {
				if e.Kind != event.Configuration || !strings.Contains(e.Text, word) {
					continue events
				}
			}
			return true
		}
		return false
	}, patience, pollEvery, "%v", words)
}

func TestWrongRulesLeaveTheEarlierOnesInForce(t *testing.T) {
	d, _, rules := configuredWith(t, "")
	replace(t, rules, ruleFile("good"))
	d.requireEvent("it has mistakes", rules+":3:", `"good"`)
	require.Contains(t, strings.Join(d.status().Warnings, "\n"), rules+":3:")
	client := d.dial()
	reply, err := unixsock.Ask[wire.DoctorReply](limited(t), client, &wire.Doctor{}, nil)
	require.NoError(t, err)
	doctor := fmt.Sprint(reply)
	require.Contains(t, doctor, rules+":3:")
	require.Contains(t, d.log.String(), rules+":3:")

	replace(t, rules, ruleFile("unsupported"))
	d.requireEvent("in effect: rules")
	require.NotContains(t, strings.Join(d.status().Warnings, "\n"), rules)
}

func TestWrongConfigurationLeavesTheEarlierOneInForce(t *testing.T) {
	d, path, _ := configuredWith(t, "")
	earlier, err := os.ReadFile(path)
	require.NoError(t, err)
	replace(t, path, string(earlier)+"administrators = [2001]\njob = 3\n")
	d.requireEvent("it has mistakes", path+":3:1:", `"job"`)
	require.Contains(t, strings.Join(d.status().Warnings, "\n"), path+":3:1:")

	require.NoError(t, os.Remove(path))
	d.requireEvent("it has mistakes", "no such file")
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	d.requireEvent("it has mistakes", "not a regular file")
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.WriteFile(path, earlier, 0o644))
	d.requireEvent("no value in effect has changed")
	require.NotContains(t, strings.Join(d.status().Warnings, "\n"), path)
}

// A file that is written in place or replaced, a directory of rules that gets another, or a signal:
// each is noticed.
func TestChangedConfigurationIsPutIntoForce(t *testing.T) {
	d, path, _ := configuredWith(t, "")
	dir := filepath.Dir(path)
	const rules = "rules = [\"rules.toml\"]\n"
	require.NoError(t,
		os.WriteFile(path, []byte(rules+"administrators = [2001]\n"), 0o644))
	d.requireEvent("in effect: administrators")

	directory := filepath.Join(dir, "rules.d")
	require.NoError(t, os.Mkdir(directory, 0o755))
	replace(t, path,
		"rules = [\"rules.d\"]\nlog_level = \"debug\"\n[policy]\nunknown = \"refuse\"\n")
	d.requireEvent("log_level", "administrators", "rules", "policy.unknown")
	require.NoError(t,
		os.WriteFile(filepath.Join(directory, "10.toml"), []byte(ruleFile("optimal")), 0o644))
	d.requireEvent("changed and in effect: rules")

	replace(t, path, "jobs = 3\nkeep_source = \"none\"\n[limits]\nwall = "+
		"\"7s\"\n[[runtime]]\ndirectory = \"rt\"\n")
	d.requireEvent("keep_source", "runtime", "after a restart: jobs, limits.wall")
	require.Contains(t, strings.Join(d.status().Warnings, "\n"),
		"after a restart: jobs, limits.wall")
	require.Len(t, d.status().Runtimes, 1)
	require.Equal(t, filepath.Join(dir, "rt"), d.status().Runtimes[0].Directory)
}

// Where no change is noticed there is SIGHUP; systemd is notified when it is done.
func TestHangup(t *testing.T) {
	s := newSite(t)
	dir := filepath.Dir(s.socket)
	told, err := net.ListenUnixgram("unixgram",
		&net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	require.NoError(t, err)
	defer told.Close()
	says := func() string {
		buffer := make([]byte, 4096)
		require.NoError(t, told.SetReadDeadline(time.Now().Add(patience)))
		n, err := told.Read(buffer)
		require.NoError(t, err)
		return string(buffer[:n])
	}
	// the watcher reads a changed file as well, a second later
	waitFor := func(pattern string) {
		for !regexp.MustCompile(pattern).MatchString(says()) {
		}
	}
	s.environment = []string{"NOTIFY_SOCKET=" + filepath.Join(dir, "notify")}
	s.config = "jobs = 1\n"
	d := s.start(t)
	require.Equal(t, "READY=1", says())
	path := filepath.Join(dir, "epcached.toml")
	require.NoError(t, os.WriteFile(path, []byte(s.config+"administrators = [2001]\n"), 0o644))
	require.NoError(t, syscall.Kill(d.pid(), syscall.SIGHUP))
	require.Regexp(t, `^RELOADING=1\nMONOTONIC_USEC=[0-9]+$`, says())
	require.Equal(t, "READY=1\nSTATUS=", says())
	require.Eventually(t, func() bool {
		return strings.Contains(d.log.String(), "why=SIGHUP")
	}, patience, time.Millisecond)
	d.requireEvent("in effect: administrators")

	require.NoError(t, os.WriteFile(path, []byte("administrators = 5\n"), 0o644))
	require.NoError(t, syscall.Kill(d.pid(), syscall.SIGHUP))
	waitFor(`^RELOADING=1\n`)
	waitFor(`^READY=1\nSTATUS=the configuration has mistakes`)
	d.requireEvent("it has mistakes", path+":1:")
	require.True(t, d.running())
}

// A runtime that is configured while the daemon runs is asked for, and rules decide what of the one
// before it may load.
func TestChangedRulesChangeTheNextAnswer(t *testing.T) {
	t.Parallel()
	older, newer := runtimeDir(t, olderQNN), runtimeDir(t, qnn)
	runtime := func(dir string) string { return "[[runtime]]\ndirectory = \"" + dir + "\"\n" }
	// nothing is rebuilt in the background, which would end what the test looks at
	const once = "keep_source = \"none\"\n"
	d, path, rules := configuredWith(t, once+runtime(older))
	model, c := writeModel(t, t.TempDir(), 1), d.dial()
	first := get(t, c, model, withEPs(qnnProvider()))
	require.Equal(t, "compiled", first.Outcome)

	replace(t, path, "rules = [\"rules.toml\"]\n"+once+runtime(newer))
	d.requireEvent("in effect: runtime")
	again := get(t, c, model, withEPs(qnnProvider()), onMissFail)
	require.Equal(t, first.Build, again.Build)
	require.Equal(t, newer, again.Runtime)
	require.Equal(t, "optimal", again.Compatibility)
	require.Contains(t, again.CompatibilityReason, "we say so")

	replace(t, rules, ruleFile("unsupported"))
	d.requireEvent("in effect: rules")
	w := forModel(model, qnnProvider())
	onMissFail(w)
	_, _, err := c.Acquire(limited(t), w, []*os.File{openFile(t, model)}, nil, nil)
	require.ErrorContains(t, err, "we say so")

	replace(t, rules, ruleFile("good"))
	d.requireEvent("it has mistakes", rules+":3:")
	_, _, err = c.Acquire(limited(t), w, []*os.File{openFile(t, model)}, nil, nil)
	require.ErrorContains(t, err, "we say so", "the earlier rules stay in effect")
	require.EqualValues(t, 1, d.status().Compiles)
}

// A FIFO among the keys is a mistake of the configuration. One that takes the place of a file later
// ends the imports with an error, and the daemon stops.
func TestFIFOsAmongTheKeysBlockNothing(t *testing.T) {
	s := newSite(t)
	dir := filepath.Dir(s.socket)
	fifo, key := filepath.Join(dir, "fifo"), filepath.Join(dir, "ci.pub")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	s.config = "trust = [\"ci.pub\"]\n"
	d := s.start(t)
	path := filepath.Join(dir, "epcached.toml")
	replace(t, path, "trust = [\"fifo\"]\n")
	d.requireEvent("it has mistakes", path+":1:", fifo+`" is not a regular file`)
	replace(t, path, s.config)
	d.requireEvent("no value in effect has changed")

	require.NoError(t, os.Rename(fifo, key))
	client := d.dial()
	for range 2 {
		_, err := client.Import(limited(t), &wire.Import{Card: []byte("{}")}, nil, nil)
		require.ErrorContains(t, err, key+": it is not a regular file")
	}
	d.stop()
}
