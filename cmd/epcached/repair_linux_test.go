package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// epcachectl runs epcachectl against the daemon, and returns what it prints, and its exit status.
func (d *epcached) epcachectl(args ...string) (string, int) {
	d.Helper()
	cmd := exec.Command(filepath.Join(programs, "epcachectl"),
		append(args, "--socket", d.socket, "--timeout=1m")...)
	out := &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = out, out
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		require.NoError(d, err)
	}
	return out.String(), cmd.ProcessState.ExitCode()
}

// A repair quarantines a damaged file, and has its build compiled again without a request. With -n
// it says so and does nothing.
func TestRepairQuarantinesAndRecompiles(t *testing.T) {
	t.Parallel()
	p := newPatient(t, openVINO, openVINOProvider())
	sound := p.acquire(t)
	path := sound.object(t, p.site.state, false)
	damages["one bit of the binary"].do(t, path)
	damaged := contentOf(t, path)

	out, code := p.epcachectl("repair", "-n")
	require.Equal(t, 4, code, out)
	require.Contains(t, out, "would do: quarantine it; withhold and recompile builds: 1")
	require.Equal(t, damaged, contentOf(t, path), "nothing was done")
	out, code = p.epcachectl("repair")
	require.Equal(t, 0, code, out)
	require.Contains(t, out, "done: quarantine it; withhold and recompile builds: 1")
	require.NoFileExists(t, path)
	aside, err := filepath.Glob(filepath.Join(p.site.state, "quarantine", "*"+filepath.Base(path)))
	require.NoError(t, err)
	require.Len(t, aside, 1)
	require.Equal(t, damaged, contentOf(t, aside[0]), "it is kept")
	c := p.dial()
	require.Eventually(t, func() bool {
		a, err := tryGet(t, c, p.model, withEPs(p.ep), onMissFail)
		return err == nil && a.Outcome == "hit"
	}, patience, pollEvery, "it is compiled again though no request waits for it")
	out, code = p.epcachectl("repair")
	require.Equal(t, 0, code, out)
	require.Contains(t, out, "0 findings repaired")
}

// A repair rebuilds an index that differs from the manifests, and writes a lost journal again,
// while the daemon runs. Marks and builds outlive that.
func TestRepairRebuildsTheIndex(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	dir := t.TempDir()
	kept, lost := writeModel(t, dir, 1), writeModel(t, dir, 2)
	build := get(t, d.dial(), kept).Build
	get(t, d.dial(), lost)
	out, code := d.epcachectl("pin", build)
	require.Equal(t, 0, code, out)
	require.NoError(t, os.Remove(filepath.Join(d.state, "journal")))
	manifests, err := filepath.Glob(filepath.Join(d.state, "manifests", "??", "*"))
	require.NoError(t, err)
	require.Len(t, manifests, 2)
	for _, path := range manifests {
		if text := contentOf(t, path); !bytes.Contains(text, []byte(filepath.Base(kept))) {
			require.NoError(t, os.Chmod(path, 0o644))
			require.NoError(t, os.WriteFile(path, append(text, "more"...), 0o644))
		}
	}
	out, code = d.epcachectl("repair", "--quick")
	require.Equal(t, 0, code, out)
	require.Contains(t, out, "restore it from memory")
	require.Contains(t, out,
		"index index.db: \n  done: rebuild it from the manifests and the journal")
	require.True(t, d.running(), "the daemon has not ended")
	require.Contains(t, d.status().Warnings, "the index was rebuilt at the start: for a repair")
	require.Equal(t, "hit", get(t, d.dial(), kept, onMissFail).Outcome)
	require.True(t, d.list()[0].GetPinned(), "it was in the journal")
	require.Len(t, d.list(), 1, "the other's manifest is in the quarantine")
	require.Equal(t, "compiled", get(t, d.dial(), lost).Outcome)

	out, code = d.epcachectl("repair", "--quick", "--rebuild-index")
	require.Equal(t, 0, code, out)
	require.Equal(t, "hit", get(t, d.dial(), lost, onMissFail).Outcome)
	require.FileExists(t, filepath.Join(d.state, "journal"))
}

// A daemon reads what is stored, though no request needs it, and shows what it has found.
func TestDaemonVerifiesWhatIsStored(t *testing.T) {
	t.Parallel()
	s := newSite(t, runtimeDir(t, openVINO))
	s.config += "[space]\nverify_every = \"\"\n"
	d := s.start(t)
	model := writeModel(t, t.TempDir(), 1)
	path := get(t, d.dial(), model).object(t, s.state, false)
	require.Empty(t, d.status().GetVerified())
	d.stop()
	damages["one bit of the binary"].do(t, path)

	s.config = unmeasured + "[space]\nverify_every = \"1h\"\n"
	d = s.start(t)
	require.Eventually(t, func() bool {
		out, code := d.epcachectl("status")
		return code == 0 && strings.Contains(out, " 1 damaged")
	}, patience, pollEvery, d.log)
	require.NoFileExists(t, path)
	out, _ := d.epcachectl("doctor")
	require.Regexp(t, "warning.*verified in the background: .*: 1 damaged", out)
	// waited: for the rebuild in the background
	require.Contains(t, []string{"compiled", "waited"}, get(t, d.dial(), model).Outcome,
		"it is not served")
}
