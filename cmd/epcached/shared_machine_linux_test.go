package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock"
)

const (
	openVINOBefore     = "openvino-1.8.0-ort-1.28.0"
	openVINOOnOlderORT = "openvino-1.8.0-ort-1.24.4"
)

// machine is one that several users share, with the service of systemd/. Its directories are
// mounted over the real ones for its processes alone, and each process runs under its user's real
// uid.
type machine struct {
	testing.TB
	base     string // has what is mounted
	daemon   *epcached
	listener *net.UnixListener
	users    map[string]int
}

const daemonUID = 2990

// newMachine installs the service, with this runtime registered, or none.
func newMachine(t *testing.T, runtime string) *machine {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can run processes of several users")
	}
	for _, program := range []string{"setpriv", "mount", "unshare"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("SKIPPED: %v", err)
		}
	}
	runtimeDir(t, openVINO) // skips the test where no runtimes are
	base, err := os.MkdirTemp("/var/tmp", "epcached-machine-")
	require.NoError(t, err)
	t.Cleanup(func() { removeAll(t, base) })
	m := &machine{TB: t, base: base, users: make(map[string]int)}
	for _, dir := range []string{"run/epcached", "home", "srv/models", "opt/epcached/bin",
		"opt/epcached/etc", "var/lib/epcached"} {
		require.NoError(t, os.MkdirAll(filepath.Join(base, dir), 0o755))
	}
	openAbove(t, base, filepath.Join(base, "var", "lib"))
	require.NoError(t, os.Chown(filepath.Join(base, "var/lib/epcached"), daemonUID, daemonUID))
	require.NoError(t, os.Chmod(filepath.Join(base, "var/lib/epcached"), 0o711))
	copyPrograms(t, filepath.Join(base, "opt/epcached/bin"), "epcached", "epcachectl",
		"epcached-ort")
	settings, err := os.ReadFile(filepath.Join("..", "..", "systemd", "epcached.toml"))
	require.NoError(t, err)
	if runtime != "" {
		m.install(runtime)
		settings = append(settings, "\n[[runtime]]\ndirectory = \"/opt/epcached/runtime\"\n"...)
	}
	require.NoError(t, os.WriteFile(filepath.Join(base, "opt/epcached/etc/epcached.toml"), settings,
		0o644))
	m.serve()
	return m
}

// copyPrograms copies built programs. It leaves that to another process, because a process that
// another test starts meanwhile would keep a file open for writing, which then cannot be run.
func copyPrograms(t testing.TB, to string, names ...string) {
	t.Helper()
	args := []string{"--target-directory", to}
	for _, name := range names {
		args = append(args, filepath.Join(programs, name))
	}
	out, err := exec.Command("cp", args...).CombinedOutput()
	require.NoError(t, err, string(out))
}

// openAbove lets all users pass the directories from base to below.
func openAbove(t testing.TB, base, below string) {
	for dir := below; ; dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
		if dir == base {
			return
		}
	}
}

// install puts a runtime into the place of the registered one, as an update does: by renaming.
func (m *machine) install(runtime string) {
	at := filepath.Join(m.base, "opt/epcached/runtime")
	m.copyRuntime(runtime, at+".new")
	if _, err := os.Stat(at); err == nil {
		require.NoError(m, os.Rename(at, at+".old"))
		defer removeAll(m, at+".old")
	}
	require.NoError(m, os.Rename(at+".new", at))
}

// copyRuntime copies a runtime, so that its libraries are equal, and other files.
func (m *machine) copyRuntime(runtime, to string) {
	require.NoError(m, os.CopyFS(to, os.DirFS(runtimeDir(m, runtime))))
}

// unit reads an entry of a unit of systemd/.
func unit(t testing.TB, name, entry string) string {
	text, err := os.ReadFile(filepath.Join("..", "..", "systemd", name))
	require.NoError(t, err)
	found := regexp.MustCompile(`(?m)^` + entry + `=(.*)$`).FindSubmatch(text)
	require.NotNil(t, found, "%s has no %s", name, entry)
	return string(found[1])
}

// mounts begins a process of this machine's. The directories that are protected from the service
// are protected from it.
func (m *machine) mounts(service bool) string {
	script := "set -e; mount --make-rprivate /\n"
	for _, dir := range []string{"run", "home", "srv", "opt"} {
		script += fmt.Sprintf("mount --bind %s/%s /%s\n", m.base, dir, dir)
	}
	if service { // StateDirectory, ProtectHome=read-only, PrivateTmp=yes
		script += "mount --bind " + m.base + "/var/lib /var/lib\nmount -o remount,bind,ro /home\n" +
			"mount -t tmpfs tmpfs /tmp\nmount -t tmpfs tmpfs /var/tmp\n"
	}
	return script
}

// serve starts the service as systemd does: with its socket, under its user, without capabilities.
func (m *machine) serve() {
	require.Equal(m, "epcached", unit(m, "epcached.service", "User"))
	require.Equal(m, unixsock.SystemSocket, unit(m, "epcached.socket", "ListenStream"))
	socket := filepath.Join(m.base, unixsock.SystemSocket)
	var err error
	m.listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	require.NoError(m, err)
	m.Cleanup(func() { m.listener.Close() })
	require.NoError(m, os.Chmod(socket, 0o666))
	passed, err := m.listener.File()
	require.NoError(m, err)
	defer passed.Close()
	start := strings.NewReplacer("/usr/bin/", "/opt/epcached/bin/", "/etc/epcached/",
		"/opt/epcached/etc/", " --worker-socket /run/epcached/worker.sock", "").
		Replace(unit(m, "epcached.service", "ExecStart"))
	script := m.mounts(true) + "cd /; umask " + unit(m, "epcached.service", "UMask") +
		"\nLISTEN_PID=$$ LISTEN_FDS=1 exec setpriv --no-new-privs --bounding-set -all " +
		fmt.Sprintf("--reuid %d --regid %d --groups %d %s", daemonUID, daemonUID, workersUID, start)
	m.serveWorkers()
	d := &epcached{TB: m, site: &site{state: filepath.Join(m.base, "var/lib/epcached"),
		socket: socket}, log: new(syncBuffer), done: make(chan struct{})}
	d.cmd = exec.Command("unshare", "--mount", "sh", "-c", script)
	// of the sysusers file
	d.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/var/lib/epcached", "USER=epcached"}
	d.cmd.ExtraFiles = []*os.File{passed}
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	d.run(m)
	m.daemon = d
	d.status() // it is started by now
}

// workersUID is the workers' user; the daemon is in its group.
const workersUID = daemonUID + 1

// serveWorkers starts an instance of the workers' unit for each connection, as systemd does.
func (m *machine) serveWorkers() {
	require.Equal(m, "/run/epcached/worker.sock", unit(m, "epcached-worker.socket", "ListenStream"))
	require.Equal(m, "0600", unit(m, "epcached-worker.socket", "SocketMode"))
	socket := filepath.Join(m.base, "run/epcached/worker.sock")
	_ = os.Remove(socket) // of an earlier start
	l, err := net.Listen("unix", socket)
	require.NoError(m, err)
	m.Cleanup(func() { l.Close() })
	require.NoError(m, os.Chown(socket, daemonUID, workersUID))
	require.NoError(m, os.Chmod(socket, 0o600))
	start := strings.ReplaceAll(unit(m, "epcached-worker@.service", "ExecStart"), "/usr/bin/",
		"/opt/epcached/bin/")
	script := m.mounts(true) +
		fmt.Sprintf("exec setpriv --no-new-privs --bounding-set -all --reuid %d --regid %d "+
			"--clear-groups %s", workersUID, workersUID, start)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // the test ends
			}
			file, err := conn.(*net.UnixConn).File()
			_ = conn.Close() // the instance has its own
			if err != nil {
				continue // the daemon sees the end of the connection
			}
			instance := exec.Command("unshare", "--mount", "sh", "-c", script)
			instance.Stdin = file
			_ = instance.Start() // likewise
			_ = file.Close()     // likewise
			go func() { _ = instance.Wait() }()
		}
	}()
}

// toldSession is what an application says of its session.
type toldSession struct {
	Outcome  string
	Why      string
	Build    string
	Warnings []string
	UID      int
}

const application = `
import json, os, sys, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import epcache
    # This test is not about how long an application waits for a daemon's first word.
    epcache.Client.__init__.__kwdefaults__["hello_limit"] = 10
    ep, *models = sys.argv[1:]
    session = epcache.InferenceSession(models[0], epcache.SessionOptions(), ep=ep)
    others = epcache.SessionGroup(models, epcache.SessionOptions(), ep=ep) if models[1:] else []
report = session.epcache
outcomes = [report.outcome, *(s.epcache.outcome for s in others)]
print(json.dumps({"Outcome": ",".join(outcomes), "Why": report.why, "Build": report.build,
    "UID": os.getuid(),
    "Warnings": [str(w.message) for w in seen if issubclass(w.category, epcache.EpcacheWarning)]}))
`

// starts runs an application of a user's, with the libraries in this directory.
func (m *machine) starts(user, libraries string, models ...string) toldSession {
	m.Helper()
	uid := m.home(user)
	python := os.Getenv("EPCACHED_PYTHON")
	if python == "" {
		m.Skip("SKIPPED: EPCACHED_PYTHON is not set")
	}
	python, err := filepath.Abs(python)
	require.NoError(m, err)
	clients, err := filepath.Abs(filepath.Join("..", "..", "clients", "python"))
	require.NoError(m, err)
	// The test's own tools may be where other users do not come: these are not part of the machine.
	reach := ""
	real, err := filepath.EvalSymlinks(python)
	require.NoError(m, err)
	if err := (&compilers.Credential{UID: uint32(uid),
		GID: uint32(uid)}).CanPass(real); err != nil {
		reach = "--inh-caps +dac_read_search --ambient-caps +dac_read_search"
	}
	script := m.mounts(false) +
		fmt.Sprintf(`cd /home/%s; exec setpriv %s --reuid %d --regid %d --clear-groups "$@"`, user,
			reach, uid, uid)
	cmd := exec.Command("unshare",
		append([]string{"--mount", "sh", "-c", script, "sh", python, "-c", application,
			"OpenVINOExecutionProvider:CPU"}, models...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/home/" + user, "PYTHONPATH=" +
		libraries + ":" + clients, "PYTHONDONTWRITEBYTECODE=1",
		"EPCACHE_DAEMON=/opt/epcached/bin/epcached",
		"EPCACHE_WORKER=/opt/epcached/bin/epcached-ort",
		"ORT_DISABLE_TELEMETRY=1"}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.NoError(m, cmd.Run(), errs.String())
	var told toldSession
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.NoError(m, json.Unmarshal([]byte(lines[len(lines)-1]), &told), out.String())
	require.Equal(m, uid, told.UID)
	return told
}

// home makes a user, with a home directory that no other user can pass, and returns the uid.
func (m *machine) home(user string) int {
	if uid, known := m.users[user]; known {
		return uid
	}
	uid, home := 3001+len(m.users), filepath.Join(m.base, "home", user)
	m.users[user] = uid
	require.NoError(m, os.Mkdir(home, 0o700))
	require.NoError(m, os.Chown(home, uid, uid))
	return uid
}

// model writes a model that all users may read.
func (m *machine) model(name string, seed uint64) string {
	path := filepath.Join(m.base, "srv/models", name)
	require.NoError(m, os.WriteFile(path, compilertest.Dense(seed, 64, 1), 0o644))
	return "/srv/models/" + name
}

// own gives a user a directory with these libraries, such as a virtual environment has, and returns
// its path there.
func (m *machine) own(user, runtime string) string {
	m.home(user)
	path := filepath.Join("/home", user, "libraries")
	m.copyRuntime(runtime, filepath.Join(m.base, path))
	return path
}

// Users have libraries of their own: each has hits from the second start on, and no warning. After
// the registered runtime is updated, its builds are compiled again without a request.
func TestUsersOfASharedMachine(t *testing.T) {
	t.Parallel()
	m := newMachine(t, openVINOBefore)
	events, _ := m.daemon.follow(t)
	model := m.model("shared.onnx", 1)
	libraries := map[string]string{
		"equal": m.own("equal", openVINOBefore), "newer": m.own("newer", openVINO),
		"older": m.own("older", olderOpenVINO), "apart": m.own("apart", openVINOOnOlderORT),
	}
	starts := func(user, outcome string) toldSession {
		t.Helper()
		told := m.starts(user, libraries[user], model)
		require.Equal(t, outcome, told.Outcome, "%s: %s", user, told.Why)
		require.Empty(t, told.Warnings, user)
		return told
	}
	first := starts("equal", "compiled")
	// A build of an execution provider does not depend on the version of ONNX Runtime.
	require.Equal(t, first.Build, starts("apart", "hit").Build)
	starts("newer", "put")
	put := starts("older", "put")
	for _, user := range []string{"equal", "newer", "older"} {
		starts(user, "hit")
	}
	require.EqualValues(t, 2, m.daemon.status().GetSourceless().GetBuilds(),
		"those that applications compiled")

	m.install(olderOpenVINO)
	require.NotNil(t, waitForEvent(events, "rebuilt", "models/shared.onnx", patience),
		"the shared build is compiled again without a request")
	shared := starts("older", "hit") // its libraries are the registered ones by now
	require.NotContains(t, []string{first.Build, put.Build}, shared.Build)
	starts("equal", "put") // its libraries are not any more
	starts("equal", "hit")
}

// A service without a runtime steps aside: users have daemons of their own, as if it were not
// there.
func TestServiceWithoutARuntimeStepsAside(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "")
	model := m.model("shared.onnx", 1)
	libraries := m.own("user", openVINO)
	t.Cleanup(func() { m.endDaemonOf("user") })
	first := m.starts("user", libraries, model)
	require.Equal(t, "compiled", first.Outcome, first.Why)
	again := m.starts("user", libraries, model)
	require.Equal(t, "hit", again.Outcome, again.Why)
	require.Empty(t, append(first.Warnings, again.Warnings...))
	require.Zero(t, m.daemon.status().GetSpace().GetBuilds())
}

// A group, which a claim cannot compile, is compiled by the user's own daemon.
func TestGroupsWithOwnLibrariesAreForTheUsersOwnDaemon(t *testing.T) {
	t.Parallel()
	m := newMachine(t, openVINOBefore)
	models := []string{m.model("one.onnx", 1), m.model("two.onnx", 2)}
	equal, other := m.own("equal", openVINOBefore), m.own("other", openVINO)
	t.Cleanup(func() { m.endDaemonOf("other") })
	require.Equal(t, "compiled,compiled,compiled", m.starts("equal", equal, models...).Outcome)
	told := m.starts("other", other, models...)
	require.Equal(t, "put,compiled,compiled", told.Outcome, told.Why)
	require.Empty(t, told.Warnings)
	// The user's own daemon is asked first while it runs, and has the model from the group.
	told = m.starts("other", other, models...)
	require.Equal(t, "hit,hit,hit", told.Outcome, told.Why)
	require.Empty(t, told.Warnings)
}

// endDaemonOf ends the daemon that a user's application started.
func (m *machine) endDaemonOf(user string) {
	m.runs(user, "epcachectl", "--socket", "/home/"+user+"/.local/state/epcached/epcached.sock",
		"stop")
}

// runs runs a program of epcached's as a user, and returns what it prints.
func (m *machine) runs(user, program string, args ...string) string {
	m.Helper()
	uid := m.home(user)
	script := m.mounts(false) +
		fmt.Sprintf(`cd /home/%s; exec setpriv --reuid %d --regid %d --clear-groups "$@"`, user,
			uid, uid)
	cmd := exec.Command("unshare",
		append([]string{"--mount", "sh", "-c", script, "sh", "/opt/epcached/bin/" + program},
			args...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/home/" + user}
	out, err := cmd.CombinedOutput()
	require.NoError(m, err, string(out))
	return string(out)
}

// The command line does as the sessions do, and both are served what the other compiled.
func TestCommandLineOfAUserWithOwnLibraries(t *testing.T) {
	t.Parallel()
	m := newMachine(t, openVINOBefore)
	equal, other := m.own("equal", openVINOBefore), m.own("other", openVINO)
	get := func(user, libraries, model string) string {
		return m.runs(user, "epcachectl", "get", "--ep", "OpenVINOExecutionProvider:CPU",
			"--runtime", libraries, model)
	}
	one, two := m.model("one.onnx", 1), m.model("two.onnx", 2)
	require.Contains(t, get("equal", equal, one), "compiled")
	require.Contains(t, get("equal", equal, one), "hit")
	require.Contains(t, get("other", other, one), "compiled")
	require.Contains(t, get("other", other, one), "hit")
	require.Equal(t, "hit", m.starts("other", other, one).Outcome)
	require.Equal(t, "put", m.starts("other", other, two).Outcome)
	require.Contains(t, get("other", other, two), "hit")
	require.Contains(t, m.runs("other", "epcachectl", "why", "--ep",
		"OpenVINOExecutionProvider:CPU", "--runtime", other, one), "is served from the cache")
	// A claim is for a request that waits, so the user's own daemon compiles in the background.
	t.Cleanup(func() { m.endDaemonOf("other") })
	three := m.model("three.onnx", 3)
	require.Contains(t, m.runs("other", "epcachectl", "warm", "--follow", "--ep",
		"OpenVINOExecutionProvider:CPU", "--runtime", other, three), "compiled "+three)
}

// The service as it is shipped compiles again what all users may read, and says why it cannot
// compile the rest again.
func TestServiceReportsModelsItCannotRecompile(t *testing.T) {
	t.Parallel()
	m := newMachine(t, openVINOBefore)
	uid := m.home("user")
	private := "/home/user/private.onnx"
	at := filepath.Join(m.base, private)
	require.NoError(t, os.WriteFile(at, compilertest.Dense(2, 64, 1), 0o644))
	require.NoError(t, os.Chown(at, uid, uid))
	for _, model := range []string{m.model("shared.onnx", 1), private} {
		require.Contains(t, m.runs("user", "epcachectl", "get", "--ep",
			"OpenVINOExecutionProvider:CPU", model), "compiled")
	}
	for _, verb := range []string{"status", "probe", "doctor"} {
		out := m.runs("user", "epcachectl", verb)
		require.Contains(t, out, "1 of 2 builds cannot be recompiled", verb)
		require.Contains(t, out, "1: the daemon's user may not open the model", verb)
	}
}
