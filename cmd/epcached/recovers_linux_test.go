package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A process that has no descriptors left reports it to its clients, and serves and stores again as
// soon as it has some.
func TestDaemonRecoversFromHavingNoDescriptors(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	c, dir := d.dial(), t.TempDir()
	first, other := writeModel(t, dir, 1), writeModel(t, dir, 2)
	get(t, c, first)

	var before unix.Rlimit
	require.NoError(t, unix.Prlimit(d.pid(), unix.RLIMIT_NOFILE, nil, &before))
	none := unix.Rlimit{Cur: 8, Max: before.Max}
	require.NoError(t, unix.Prlimit(d.pid(), unix.RLIMIT_NOFILE, &none, nil))
	_, err := tryGet(t, c, other)
	require.Error(t, err, "the client compiles by itself")
	require.True(t, d.running())
	require.NoError(t, unix.Prlimit(d.pid(), unix.RLIMIT_NOFILE, &before, nil))
	c = d.dial()
	require.Equal(t, "hit", get(t, c, first, onMissFail).Outcome)
	get(t, c, other)
	require.Equal(t, "hit", get(t, c, other, onMissFail).Outcome)
}

// mountCommand runs a command that changes mounts.
func mountCommand(t *testing.T, command ...string) {
	t.Helper()
	out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
	require.NoError(t, err, "%v: %s", command, out)
}

// requireServesWhileReadOnly has a client meet a state directory that became read-only.
func requireServesWhileReadOnly(t *testing.T, d *epcached, stored, other string) {
	t.Helper()
	c := d.dial()
	require.Equal(t, "hit", get(t, c, stored, onMissFail).Outcome)
	_, err := tryGet(t, c, other)
	require.Error(t, err, "the client compiles by itself")
	require.Equal(t, "hit", get(t, c, stored, onMissFail).Outcome)
	require.True(t, d.running())
}

// A state directory that is mounted read-only, while index.db and the journal stay writable because
// they are open, serves hits. When it is writable again the same daemon stores.
func TestDaemonRecoversFromAReadOnlyMount(t *testing.T) {
	t.Parallel()
	s, dir := newSite(t, runtimeDir(t, openVINO)), t.TempDir()
	s.state = filepath.Join(smallDisk(t, 64<<20), "state")
	t.Cleanup(func() { mountCommand(t, "umount", s.state) }) // when the daemon has stopped
	d := s.start(t)
	stored, other := writeModel(t, dir, 1), writeModel(t, dir, 2)
	get(t, d.dial(), stored)
	mountCommand(t, "mount", "--bind", s.state, s.state)
	mountCommand(t, "mount", "-o", "remount,bind,ro", s.state)
	requireServesWhileReadOnly(t, d, stored, other)
	mountCommand(t, "mount", "-o", "remount,bind,rw", s.state)
	c := d.dial()
	get(t, c, other)
	require.Equal(t, "hit", get(t, c, other, onMissFail).Outcome)
	require.Equal(t, "hit", get(t, c, stored, onMissFail).Outcome)
	out, code := d.epcachectl("check", "--deep")
	require.Zero(t, code, out)
}

// A file system that the kernel makes read-only after an error of its own (errors=remount-ro), with
// all that is open, serves hits. When it was repaired and mounted again the same daemon opens it.
func TestDaemonRecoversFromAnEmergencyReadOnly(t *testing.T) {
	t.Parallel()
	s, dir := newSite(t, runtimeDir(t, openVINO)), t.TempDir()
	disk := smallDisk(t, 64<<20)
	s.state = filepath.Join(disk, "state")
	d := s.start(t)
	stored, other := writeModel(t, dir, 1), writeModel(t, dir, 2)
	get(t, d.dial(), stored)
	device, err := exec.Command("findmnt", "-no", "SOURCE", disk).Output()
	require.NoError(t, err)
	if out, err := exec.Command("mount", "-o", "remount,abort", disk).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: this file system cannot be aborted: %v: %s", err, out)
	}
	requireServesWhileReadOnly(t, d, stored, other)
	repaired := filepath.Join(dir, "repaired")
	mountCommand(t, "cp", "--sparse=always", strings.TrimSpace(string(device)), repaired)
	mountCommand(t, "umount", "--lazy", disk)
	mountCommand(t, "mount", "-o", "loop", repaired, disk)
	require.Eventually(t, func() bool {
		a, err := tryGet(t, d.dial(), other)
		return err == nil && a.Outcome == "hit"
	}, patience, pollEvery, "what comes before the daemon notices is answered without being stored")
	c := d.dial()
	require.Equal(t, "hit", get(t, c, other, onMissFail).Outcome)
	require.Equal(t, "hit", get(t, c, stored, onMissFail).Outcome, "it was acknowledged")
	require.True(t, d.running())
}
