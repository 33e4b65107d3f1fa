package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	silentOpenVINO = "openvino-1.6.1" // states no hardware
	oldOpenVINO    = "openvino-1.4.0" // likewise, and it judges no build
	otherUID       = "2991"
)

// ctl runs epcachectl for a daemon, and returns what it prints and its exit status.
func (s *site) ctl(t testing.TB, args ...string) (string, int) {
	t.Helper()
	cmd := exec.CommandContext(limited(t), filepath.Join(programs, "epcachectl"),
		append([]string{"--socket", s.socket}, args...)...)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	err := cmd.Run()
	if cmd.ProcessState == nil {
		require.NoError(t, err)
	}
	return out.String() + said.String(), cmd.ProcessState.ExitCode()
}

// get asks for a model, and returns the answer.
func (s *site) get(t testing.TB, args []string, more ...string) map[string]any {
	t.Helper()
	out, status := s.ctl(t, slices.Concat([]string{"get", "--json"}, args, more)...)
	require.Zero(t, status, out)
	if !strings.HasPrefix(out, "[") { // as it is for a group
		out = "[" + out[:strings.LastIndex(out, "}")+1] + "]"
	}
	var list []map[string]any
	require.NoError(t, json.NewDecoder(strings.NewReader(out)).Decode(&list), out)
	return list[0]
}

// digestsOf are those of an answer's files.
func digestsOf(answer map[string]any) (out []any) {
	for _, f := range answer["files"].([]any) {
		out = append(out, f.(map[string]any)["digest"])
	}
	return out
}

// outcomes imports a bundle, and returns what becomes of each build by its key.
func (s *site) outcomes(t testing.TB, status int, args ...string) map[string]map[string]any {
	t.Helper()
	out, got := s.ctl(t, append([]string{"import", "--json"}, args...)...)
	require.Equal(t, status, got, out)
	var reply struct{ Builds []map[string]any }
	require.NoError(t, json.NewDecoder(strings.NewReader(out)).Decode(&reply), out)
	all := make(map[string]map[string]any)
	for _, b := range reply.Builds {
		key, _ := b["name"].(string)
		all[strings.TrimPrefix(key, "b-")] = b
	}
	return all
}

// newKey makes a key pair, which other users may read.
func newKey(t testing.TB, s *site, dir, name string) (private, public string) {
	t.Helper()
	out, status := s.ctl(t, "trust", "keygen", filepath.Join(dir, name))
	require.Zero(t, status, out)
	return filepath.Join(dir, name+".key"), filepath.Join(dir, name+".pub")
}

// ofAnotherUser is a site with a daemon that runs as another user.
func ofAnotherUser(t testing.TB, runtimes ...string) *site {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can run processes of several users")
	}
	s := newSite(t, runtimes...)
	dir := filepath.Dir(s.socket)
	require.NoError(t, exec.Command("chown", otherUID, dir).Run())
	require.NoError(t, os.Chmod(dir, 0o711))
	self, err := os.Executable()
	require.NoError(t, err)
	s.under = append(passable(t, append(slices.Clone(runtimes), programs, dir,
		filepath.Dir(self))), "setpriv", "--reuid", otherUID, "--regid", otherUID,
		"--clear-groups")
	return s
}

// passable is a command that runs another one where every user reaches the directories, at the same
// paths: a project may be checked out below a directory that only its user may pass.
func passable(t testing.TB, dirs []string) []string {
	script, holds := "", t.TempDir()
	for _, closed := range closedAbove(t, dirs) {
		before, after := "", ""
		for i, dir := range dirs {
			if strings.HasPrefix(dir, closed+"/") {
				hold := filepath.Join(holds, strconv.Itoa(i))
				require.NoError(t, os.MkdirAll(hold, 0o755))
				before += fmt.Sprintf("mount --bind %q %q\n", dir, hold)
				after += fmt.Sprintf("mkdir -p %q\nmount --move %q %q\n", dir, hold, dir)
			}
		}
		script += before + fmt.Sprintf("mount -t tmpfs -o mode=755 none %q\n", closed) + after
	}
	return []string{"unshare", "--mount", "sh", "-ec", script + `exec "$@"`, "sh"}
}

// closedAbove are the topmost directories above these that other users may not pass.
func closedAbove(t testing.TB, dirs []string) (closed []string) {
	for _, dir := range dirs {
		for i, c := range dir[1:] {
			if above := dir[:i+1]; c == '/' {
				info, err := os.Stat(above)
				require.NoError(t, err)
				if info.Mode()&0o001 == 0 {
					if !slices.Contains(closed, above) {
						closed = append(closed, above)
					}
					break
				}
			}
		}
	}
	return closed
}

func modelOf(t testing.TB, name string) string {
	path := filepath.Join(os.Getenv("EPCACHED_MODELS"), name, "model.onnx")
	if _, err := os.Stat(path); err != nil {
		t.Skipf("SKIPPED: %v; testdata/fetch-models gets it", err)
	}
	return path
}

// A build that one machine compiled is a hit on another one with a daemon that has another user,
// another state directory and no build.
func TestBuildsTravelBetweenMachines(t *testing.T) {
	t.Parallel()
	runtimes := []string{runtimeDir(t, openVINO), runtimeDir(t, silentOpenVINO), runtimeDir(t, qnn),
		runtimeDir(t, oldOpenVINO)}
	a, b := newSite(t, runtimes...), ofAnotherUser(t, runtimes...)
	a.start(t)
	conv, ep := modelOf(t, "tiny-convolution"), "OpenVINOExecutionProvider:CPU"
	asked := map[string][]string{
		"OpenVINO": {conv, "--ep", ep},
		"embedded": {conv, "--ep", ep, "--embed"},
		"older":    {conv, "--ep", ep, "--runtime", runtimes[3]},
		"silent":   {conv, "--ep", ep, "--runtime", runtimes[1]},
		"initializers": {modelOf(t, "tiny-mlp"), "--ep", ep, "--initializers-file",
			"rest.bin"},
		"QNN ahead of time": {modelOf(t, "tiny-mlp"), "--ep", "QNNExecutionProvider", "--option",
			"soc_model=60", "--runtime", runtimes[2]},
		"group": {"--share", modelOf(t, "tiny-mlp"), conv, "--ep",
			"QNNExecutionProvider", "--option", "soc_model=60", "--runtime", runtimes[2]},
		"external, extended": {modelOf(t, "tiny-external"), "--ep", ep, "--optimization-level",
			"extended"},
	}
	made := make(map[string]map[string]any)
	for name, args := range asked {
		made[name] = a.get(t, args)
	}
	dir := t.TempDir()
	private, public := newKey(t, a, dir, "ci")
	bundle := filepath.Join(dir, "all.tar")
	out, status := a.ctl(t, "export", "--all", "--to", bundle, "--key", private, "--builder", "a")
	require.Zero(t, status, out)
	out, status = a.ctl(t, "export", "--all", "--to", bundle+"2.tar", "--key", private,
		"--builder", "a")
	require.Zero(t, status, out)
	first, err := os.ReadFile(bundle)
	require.NoError(t, err)
	second, err := os.ReadFile(bundle + "2.tar")
	require.NoError(t, err)
	require.True(t, bytes.Equal(first, second), "two exports differ")
	require.NotContains(t, string(first), a.state, "a path travels")

	d := b.start(t)
	for _, o := range b.outcomes(t, 7, bundle) {
		require.Equal(t, "refused", o["outcome"])
		require.Contains(t, o["text"], "not trusted here")
	}
	for _, only := range []string{"-n", "--check"} {
		for _, o := range b.outcomes(t, 0, bundle, "--trust", public, only) {
			require.Equal(t, "hit here", o["outcome"], o["text"])
			require.False(t, o["stored"].(bool))
		}
		require.Empty(t, d.list())
	}
	for key, o := range b.outcomes(t, 0, bundle, "--trust", public, "--pin") {
		require.Equal(t, "hit here", o["outcome"], key)
		require.True(t, o["stored"].(bool), o["text"])
		require.Equal(t, "shared", o["scope"]) // root is an administrator
	}
	for _, o := range b.outcomes(t, 0, bundle, "--trust", public) {
		require.Equal(t, "it is stored already", o["text"])
		require.False(t, o["stored"].(bool))
	}
	for name, args := range asked {
		got := b.get(t, args, "--on-miss", "fail")
		require.Equal(t, "hit", got["outcome"], name)
		require.Equal(t, digestsOf(made[name]), digestsOf(got), name)
		require.Contains(t, got["why"], "signed by", name)
	}
	require.Zero(t, d.status().Compiles)
	verified := b.get(t, asked["OpenVINO"], "--on-miss", "fail", "--verify-output", "1e-3")
	require.Empty(t, verified["warnings"])
	shown, status := b.ctl(t, "show", made["silent"]["build"].(string))
	require.Zero(t, status)
	require.Contains(t, shown, "made by a, manifest sha256:")
	require.Contains(t, shown, ", from another machine, compiled there in ")
	require.Contains(t, shown, "pinned")
	why, _ := b.ctl(t, "why", made["OpenVINO"]["build"].(string))
	require.Contains(t, why, "imported by uid 0, signed by")
}

// An ordinary user imports for that user alone, as far as the user could put a build.
func TestImportsOfUsersAreTheirOwn(t *testing.T) {
	t.Parallel()
	runtime := runtimeDir(t, openVINO)
	a := newSite(t, runtime)
	a.start(t)
	model := []string{modelOf(t, "tiny-convolution"), "--ep", "OpenVINOExecutionProvider:CPU"}
	a.get(t, model)
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o755))
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o755))
	private, public := newKey(t, a, dir, "ci")
	bundle := filepath.Join(dir, "x")
	out, status := a.ctl(t, "export", "--all", "--to", bundle, "--key", private)
	require.Zero(t, status, out)
	require.NoError(t, exec.Command("chmod", "-R", "a+rX", dir).Run())
	require.NoError(t, os.Chmod(filepath.Dir(a.socket), 0o711))
	as := func(args ...string) (string, int) {
		cmd := exec.CommandContext(limited(t), "setpriv",
			append([]string{"--reuid", otherUID, "--regid", otherUID,
				"--clear-groups", filepath.Join(programs, "epcachectl"), "--socket",
				b(t, a, runtime).socket}, args...)...)
		text, _ := cmd.CombinedOutput() // the status says how it ended
		return string(text), cmd.ProcessState.ExitCode()
	}
	out, status = as("import", bundle, "--trust", public, "--store", "shared")
	require.Equal(t, 7, status, out)
	require.Contains(t, out, "administrators and publishers")
	out, status = as("import", bundle, "--trust", public)
	require.Zero(t, status, out)
	require.Contains(t, out, "stored for uid:"+otherUID)
}

// b is a daemon of root with an empty store, which other users reach.
func b(t *testing.T, a *site, runtime string) *site {
	if other := filepath.Join(filepath.Dir(a.socket), "b"); !exists(other) {
		require.NoError(t, os.Mkdir(other, 0o711))
		s := &site{state: filepath.Join(other, "state"), socket: filepath.Join(other, "s"),
			runtimes: []string{runtime},
			config:   unmeasured}
		s.start(t)
	}
	return &site{socket: filepath.Join(filepath.Dir(a.socket), "b", "s")}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Nothing of a build that is damaged, not trusted or expired is stored.
func TestRefusedImportsStoreNothing(t *testing.T) {
	t.Parallel()
	runtime := runtimeDir(t, openVINO)
	a, b := newSite(t, runtime), newSite(t, runtime)
	a.start(t)
	d := b.start(t)
	a.get(t, []string{modelOf(t, "tiny-convolution"), "--ep", "OpenVINOExecutionProvider:CPU"})
	dir := t.TempDir()
	private, public := newKey(t, a, dir, "ci")
	_, other := newKey(t, a, dir, "other")
	export := func(name string, more ...string) string {
		to := filepath.Join(dir, name)
		out, status := a.ctl(t, slices.Concat([]string{"export", "--all", "--to", to}, more)...)
		require.Zero(t, status, out)
		return to
	}
	good := export("good.tar", "--key", private)
	old := export("old.tar", "--key", private, "--not-after", "2026-01-01")
	unsigned := export("unsigned")
	whole, err := os.ReadFile(good)
	require.NoError(t, err)
	changed := func(name string, change func(b []byte) []byte) string {
		to := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(to, change(bytes.Clone(whole)), 0o600))
		return to
	}
	for _, c := range []struct {
		bundle, key string
		status      int
		want        string
	}{
		{good, other, 7, "trust the public key"},
		{old, public, 7, "expired on 2026-01-01"},
		{unsigned, public, 7, "sign it: epcachectl export --key"},
		{changed("short.tar", func(b []byte) []byte { return b[:len(b)-5000] }), public, 4,
			"ends early"},
		{changed("flipped.tar", func(b []byte) []byte { b[len(b)-2500] ^= 1; return b }), public, 4,
			"blobs/sha256/"},
		{changed("foreign.tar", func([]byte) []byte { return make([]byte, 2048) }), public, 4,
			"empty tar"},
		{filepath.Join(dir, "none.tar"), public, 3, "no such file"},
	} {
		out, status := b.ctl(t, "import", c.bundle, "--trust", c.key)
		require.Equal(t, c.status, status, out)
		require.Contains(t, out, c.want)
	}
	require.Empty(t, d.list())
	require.Empty(t, entriesOf(t, b.state, "staging"))
	cmd := exec.CommandContext(limited(t), filepath.Join(programs, "epcachectl"), "--socket",
		b.socket, "import", "-",
		"--trust", public)
	cmd.Stdin = bytes.NewReader(whole)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Len(t, d.list(), 1)
	cmd = exec.Command(cmd.Path, cmd.Args[1:]...)
	cmd.Stdin = bytes.NewReader(whole[:len(whole)-5000])
	out, err = cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), `import "standard input": `)
	require.NotContains(t, string(out), "epcachectl-import-")
	out2, status := b.ctl(t, "export", "--all", "--to", filepath.Join(dir, "again.tar"),
		"--key", private)
	require.Zero(t, status, out2)
	again, err := os.ReadFile(filepath.Join(dir, "again.tar"))
	require.NoError(t, err)
	require.Len(t, again, len(whole), "an imported build is exported as the one that it was")
}

// A build that fails on this class of machine is never served.
func TestImportsOfAnotherMachineClassMustRun(t *testing.T) {
	t.Parallel()
	runtime := runtimeDir(t, silentOpenVINO)
	a, b := newSite(t, runtime), newSite(t, runtime)
	b.environment = []string{"ONEDNN_MAX_CPU_ISA=SSE41"}
	a.start(t)
	d := b.start(t)
	ep := []string{"--ep", "OpenVINOExecutionProvider:CPU", "--optimization-level", "disable_all"}
	fails := append([]string{modelOf(t, "minilm-int8")}, ep...)
	runs := append([]string{modelOf(t, "tiny-convolution")}, ep...)
	made := []map[string]any{a.get(t, fails), a.get(t, runs)}
	dir := t.TempDir()
	private, public := newKey(t, a, dir, "ci")
	out, status := a.ctl(t, "export", "--all", "--to", filepath.Join(dir, "x"), "--key", private)
	require.Zero(t, status, out)
	b.outcomes(t, 0, filepath.Join(dir, "x"), "--trust", public)
	require.Equal(t, "hit", b.get(t, runs, "--on-miss", "fail")["outcome"])
	require.Zero(t, d.status().Compiles)
	got := b.get(t, fails)
	require.NotEqual(t, "hit", got["outcome"])
	require.NotEqual(t, digestsOf(made[0]), digestsOf(got))
}
