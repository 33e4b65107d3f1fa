package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// underSystemd runs a system's systemd, as process 1 of namespaces of its own, on this system's
// files, with what the directory "installed" adds, and the test's directory at /test. The runtime
// is at /opt/runtime. It writes what users there are and how the units end into the test's
// directory.
const underSystemd = `
mount -t tmpfs none $HOME/over && mkdir $HOME/over/root $HOME/over/work || exit 77
cp -r $HOME/installed $HOME/over/upper
R=$HOME/over/root
mount -t overlay overlay -o lowerdir=/,upperdir=$HOME/over/upper,workdir=$HOME/over/work $R || ` +
	`exit 77
mount -t proc proc $R/proc && mount --rbind /sys $R/sys && mount -t cgroup2 none $R/sys/fs/` +
	`cgroup || exit 77
mount --rbind /dev $R/dev && mount -t tmpfs none $R/run && mount -t tmpfs none $R/tmp || exit 77
mkdir -p $R/opt/runtime $R/test && mount --bind $RUNTIME $R/opt/runtime && mount --bind $HOME ` +
	`$R/test || exit 77
systemd-sysusers --root=$R $R/usr/lib/sysusers.d/epcached.conf || exit 77
exec chroot $R env container=test /lib/systemd/systemd --system --unit=epcached-test.target ` +
	`--log-target=console --log-level=info
`

// epcached-test.target starts the daemon's sockets and a service that does what the test asks for.
const (
	testTarget = "[Unit]\nRequires=epcached.socket asked.service\nAfter=epcached.socket\n"
	askedUnit  = `[Unit]
DefaultDependencies=no
[Service]
ExecStart=/bin/sh -c 'id -u epcached > /test/uid; id -u epcached-worker > /test/worker; ` +
		`while [ ! -e /test/end ]; do sleep 0.05; done; systemctl start look.service; ` +
		`systemctl show -P Result epcached.service epcached.socket epcached-worker.socket > ` +
		`/test/shown; while ! find /var/lib/epcached/staging -name private | grep -q .; ` +
		`do sleep 0.05; done; systemctl kill -s KILL "epcached-worker@*"; ` +
		`while [ ! -e /test/failed ]; do sleep 0.05; done; find /var/lib/epcached/staging ` +
		`-mindepth 1 > /test/left; while systemctl list-units --all --plain --no-legend ` +
		`"epcached-worker@*" | grep -q .; do sleep 0.05; done; ` +
		`systemctl kill -s KILL epcached.service; touch /test/done'
`
)

// lookingWorker is in the place of the worker in its unit, and reports what it may do there.
const lookingWorker = `
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
StandardOutput=file:/test/look
ExecStart=/bin/sh -c 'for f in objects manifests views index index.db lock staging; ` +
	`do [ -e /var/lib/epcached/$$f ] && echo $$f; done; for f in /var/lib/epcached /etc/epcached ` +
	`/usr/bin/epcached /run/epcached/worker.sock; do touch $$f 2> /dev/null && echo changed $$f; ` +
	`done; exit 0'
`

// container is a systemd with the shipped units.
type container struct {
	home, socket string
	log          *syncBuffer
	done         chan error
}

func startContainer(t *testing.T, config string) *container {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can start a system's systemd")
	}
	c := &container{home: shortDir(t), log: &syncBuffer{}, done: make(chan error, 1)}
	require.NoError(t, os.Chmod(c.home, 0o755))
	units := filepath.Join(c.home, "installed", "etc", "systemd", "system")
	put := func(path string, data []byte, mode os.FileMode) {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, data, mode))
	}
	require.NoError(t, os.Mkdir(filepath.Join(c.home, "over"), 0o755))
	for _, name := range []string{"epcached.service", "epcached.socket", "epcached-worker.socket",
		"epcached-worker@.service"} {
		shipped, err := os.ReadFile(filepath.Join("..", "..", "systemd", name))
		require.NoError(t, err)
		shipped = regexp.MustCompile(`(?m)^ListenStream=/run/epcached/epcached.sock`).
			ReplaceAll(shipped, []byte("ListenStream=/test/s"))
		put(filepath.Join(units, name), shipped, 0o644)
		// The default dependencies are left out, because only a whole system has started them.
		put(filepath.Join(units, name+".d", "test.conf"),
			[]byte("[Unit]\nDefaultDependencies=no\n"), 0o644)
	}
	worker, err := os.ReadFile(filepath.Join("..", "..", "systemd", "epcached-worker@.service"))
	require.NoError(t, err)
	worker = regexp.MustCompile(`(?m)^(ExecStart|StandardInput|StandardOutput)=.*`).
		ReplaceAll(worker, nil)
	put(filepath.Join(units, "look.service"), append(worker, lookingWorker...), 0o644)
	put(filepath.Join(units, "epcached-test.target"), []byte(testTarget), 0o644)
	put(filepath.Join(units, "asked.service"), []byte(askedUnit), 0o644)
	users, err := os.ReadFile(filepath.Join("..", "..", "systemd", "epcached.sysusers"))
	require.NoError(t, err)
	put(filepath.Join(c.home, "installed", "usr", "lib", "sysusers.d", "epcached.conf"), users,
		0o644)
	put(filepath.Join(c.home, "installed", "etc", "epcached", "epcached.toml"), []byte(config),
		0o644)
	bin := filepath.Join(c.home, "installed", "usr", "bin")
	require.NoError(t, os.MkdirAll(bin, 0o755))
	copyPrograms(t, bin, "epcached", "epcached-ort")
	cmd := exec.Command("unshare", "--mount", "--cgroup", "--pid", "--uts", "--ipc", "--fork",
		"--kill-child", "sh", "-c", underSystemd)
	cmd.Env = append(os.Environ(), "HOME="+c.home, "RUNTIME="+runtimeDir(t, openVINO))
	cmd.Stdout, cmd.Stderr = c.log, c.log
	require.NoError(t, cmd.Start())
	go func() { c.done <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // all in the namespaces end with it
		<-c.done
		require.Eventually(t, func() bool { return os.RemoveAll(c.home) == nil }, patience,
			pollEvery, "its processes end")
		require.NoError(t, os.Mkdir(c.home, 0o755))
		if t.Failed() {
			t.Logf("the container's log:\n%s", c.log)
		}
	})
	c.socket = filepath.Join(c.home, "s")
	require.Eventually(t, func() bool {
		select {
		case err := <-c.done:
			c.done <- err
			t.Skipf("NOT TESTED: THE UNITS WERE NOT RUN, because no systemd runs here: %v: %s", err,
				c.log)
		default:
		}
		_, err := os.Stat(c.socket)
		return err == nil
	}, patience, pollEvery, "systemd makes the socket: %s", c.log)
	return c
}

func (c *container) number(t *testing.T, name string) int {
	t.Helper()
	var text []byte
	require.Eventually(t, func() (found bool) {
		text, _ = os.ReadFile(filepath.Join(c.home, name)) // it is written later
		return bytes.HasSuffix(text, []byte("\n"))
	}, patience, pollEvery)
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	return n
}

// The shipped units under a real systemd: the daemon, from which nearly all is kept, has models
// compiled by workers of another user, each in an instance of the workers' unit.
func TestUnitsCompileUnderSystemd(t *testing.T) {
	user := &compilers.Credential{UID: 65534, GID: 65534}
	if err := user.CanPass(filepath.Join(runtimeDir(t, openVINO), "x")); err != nil {
		t.Skipf("NOT TESTED: the runtime is where other users do not come: %v", err)
	}
	s := startContainer(t, unmeasured+"[[runtime]]\ndirectory = \"/opt/runtime\"\n"+`
[[compiler]]
ep = "QNNExecutionProvider"
command = ["/bin/sh", "-c", '[ -n "$0" ] || exit 0; mkdir -m 700 private; : > private/file; `+
		`sleep 600', "{model}", "{output}"]
version = ["-c", "echo 1"]
without_library = true
`)
	c, err := unixsock.Dialer{Name: "test", Wait: patience}.Dial(limited(t), s.socket)
	require.NoError(t, err, s.log)
	defer c.Close()
	path := filepath.Join(shortDir(t), "m.onnx")
	require.NoError(t, os.WriteFile(path, compilertest.Dense(1, 64, 1), 0o600))
	require.Equal(t, "compiled", get(t, c, path).Outcome)
	require.Equal(t, "hit", get(t, c, path).Outcome)
	reply, err := unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	daemon, worker := s.number(t, "uid"), s.number(t, "worker")
	require.NotEqual(t, daemon, worker)
	require.Contains(t, reply.Sandbox, "user: workers run as uid "+strconv.Itoa(worker))
	for _, m := range reply.Sandbox {
		t.Log(m)
	}
	require.NoError(t, os.WriteFile(filepath.Join(s.home, "end"), nil, 0o644))
	_, err = tryGet(t, c, path, withEPs(&wire.ExecutionProvider{Name: "QNNExecutionProvider"}))
	require.ErrorContains(t, err, "SIGKILL", "the instance is killed in the midst of a job")
	require.NoError(t, os.WriteFile(filepath.Join(s.home, "failed"), nil, 0o644))
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(s.home, "done"))
		return err == nil
	}, patience, pollEvery, "all instances have ended: %s", s.log)
	shown, err := os.ReadFile(filepath.Join(s.home, "shown"))
	require.NoError(t, err)
	require.Equal(t, "success\n\nsuccess\n\nsuccess\n", string(shown))
	look, err := os.ReadFile(filepath.Join(s.home, "look"))
	require.NoError(t, err)
	require.Equal(t, "staging\n", string(look),
		"a worker sees the jobs' directories, and changes nothing else")
	left, err := os.ReadFile(filepath.Join(s.home, "left"))
	require.NoError(t, err)
	require.Empty(t, string(left), "directories of the workers' user are removed")
}

// The least that systemd may say of the units: what is wrong in them, and how exposed they are.
func TestUnitsAreTight(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("NOT TESTED: THE UNITS WERE NOT LOOKED AT, because there is no systemd-analyze here")
	}
	dir := t.TempDir()
	most := map[string]float64{"epcached.service": 1.0, "epcached-worker@.service": 2.0,
		"epcached-remote.service": 2.0}
	names := []string{"epcached.service", "epcached.socket", "epcached-worker.socket",
		"epcached-worker@.service", "epcached-remote.service", "epcached-remote.socket"}
	var paths []string
	for _, name := range names {
		shipped, err := os.ReadFile(filepath.Join("..", "..", "systemd", name))
		require.NoError(t, err)
		text := strings.ReplaceAll(string(shipped), "ExecStart=/usr/bin/",
			"ExecStart="+programs+"/")
		paths = append(paths, filepath.Join(dir, name))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	cmd := exec.Command("systemd-analyze", append([]string{"verify"}, paths...)...)
	cmd.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	for line := range strings.Lines(string(out)) {
		require.Contains(t, line, "notify-reload", "systemd before 253 does not know it")
	}
	level := regexp.MustCompile(`Overall exposure level for .*: ([0-9.]+) `)
	for name, most := range most {
		out, err := exec.Command("systemd-analyze", "security", "--offline=true",
			filepath.Join(dir, name)).CombinedOutput()
		require.NoError(t, err, string(out))
		found := level.FindSubmatch(out)
		require.NotNil(t, found, string(out))
		is, err := strconv.ParseFloat(string(found[1]), 64)
		require.NoError(t, err)
		require.LessOrEqual(t, is, most, "%s\n%s", name, out)
	}
}
