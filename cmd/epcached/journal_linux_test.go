package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// journalOf makes a file that the daemon takes for systemd's journal, as its standard error.
func journalOf(t *testing.T, s *site) *os.File {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "journal"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, file.Close()) })
	var stat unix.Stat_t
	require.NoError(t, unix.Fstat(int(file.Fd()), &stat))
	s.environment = []string{fmt.Sprintf("JOURNAL_STREAM=%d:%d", stat.Dev, stat.Ino)}
	return file
}

func TestJournalHasThePriorityOfEachLevel(t *testing.T) {
	s := newSite(t)
	s.config = "jobs = 1\n"
	file := journalOf(t, s)
	d := &epcached{TB: t, site: s, cmd: s.command(t, "--log-level", "debug"), log: &syncBuffer{},
		done: make(chan struct{})}
	d.cmd.Stdout, d.cmd.Stderr = d.log, file
	d.run(t)
	text := func() string {
		all, err := os.ReadFile(file.Name())
		require.NoError(t, err)
		return string(all)
	}
	d.status()
	require.Contains(t, "\n"+text(), "\n<6>level=INFO msg=ready ")
	require.NoError(t,
		os.WriteFile(filepath.Join(filepath.Dir(s.socket), "epcached.toml"),
			[]byte("nonsense = 1\n"), 0o644))
	require.Eventually(t,
		func() bool {
			return strings.Contains(text(),
				"\n<3>level=ERROR msg=\"configuration has mistakes")
		}, patience, pollEvery)
	d.stop()
	for line := range strings.Lines(text()) {
		require.Regexp(t, `^<[3467]>level=(ERROR|WARN|INFO|DEBUG) `, line)
	}
}

func TestJournalHasErrorsOfTheStart(t *testing.T) {
	s := newSite(t)
	s.config = "nonsense = 1\nwrong = 2\n"
	file := journalOf(t, s)
	cmd := s.command(t)
	cmd.Stderr = file
	require.Error(t, cmd.Run())
	text, err := os.ReadFile(file.Name())
	require.NoError(t, err)
	require.Contains(t, string(text), "nonsense")
	for line := range strings.Lines(string(text)) {
		require.True(t, strings.HasPrefix(line, "<3>"), line)
	}
}
