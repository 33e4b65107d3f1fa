package compilers_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/internal/bytesize"
)

// hostileRuntime has a real ONNX Runtime, and in the place of QNN's library one with a body that is
// the given C.
func hostileRuntime(t *testing.T, body string) compilers.Runtime {
	t.Helper()
	compiler, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("NOT TESTED: no C compiler to build hostile code with")
	}
	r := compilertest.Runtime(t, "openvino-1.8.1")
	dir := t.TempDir()
	source, library := filepath.Join(dir, "ep.c"),
		filepath.Join(dir, "libonnxruntime_providers_qnn.so")
	require.NoError(t,
		os.WriteFile(source,
			[]byte(hostileHead+"void *CreateEpFactories(void) {\n"+body+
				"\n; exit(0); }\nvoid *ReleaseEpFactory(void) { return 0; }\n"), 0o600))
	out, err := exec.Command(compiler, "-shared", "-fPIC", "-o", library, source).CombinedOutput()
	require.NoError(t, err, "%s", out)
	r.EPs = []compilers.EPLibrary{{EP: qnn, Path: library}}
	return r
}

// hostileHead has what hostile code needs; tell prints the result of an attempt.
const hostileHead = `#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
static void tell(const char *what, long result) {
	fprintf(stderr, "%s=%s\n", what, result >= 0 ? "DONE" : strerror(errno));
}
`

// attack compiles with hostile code, and returns the error and what it printed.
func attack(t *testing.T, o compilers.ORTOptions, body string) (compilers.Job, map[string]string,
	error) {
	t.Helper()
	job := writeJob(t, hostileRuntime(t, body), compilers.EP{Name: qnn}, tinymodel.Relu())
	result, err := newORT(t, o).Compile(t.Context(), job, nil)
	require.Error(t, err)
	return job, attackResults(err, result.Log), err
}

func attackResults(err error, log string) map[string]string {
	found := map[string]string{}
	for line := range strings.Lines(log) {
		if what, came, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			found[what] = came
		}
	}
	return found
}

// requireInEffect fails the test where a measure is not in effect, and skips it loudly where this
// system has no means for it.
func requireInEffect(t *testing.T, name string) {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	switch {
	case name == "files" && landlockABI() == 0:
		t.Skip("NOT TESTED: this kernel has no Landlock")
	case name != "files" && !strings.Contains(string(status), "\nSeccomp:"):
		t.Skip("NOT TESTED: this kernel filters no system calls")
	}
	measures, err := newORT(t, compilers.ORTOptions{}).Sandbox(t.Context())
	require.NoError(t, err)
	for _, m := range measures {
		if m.Name == name {
			require.True(t, m.InForce, "%s", m)
			return
		}
	}
	t.Fatalf("no measure %q", name)
}

// namespaces reports whether this process may make pid namespaces.
func namespaces() bool {
	cmd := exec.Command("true")
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	return cmd.Run() == nil
}

// Every way out of the job's directory that a file system has is closed, and ordinary use of it is
// not.
func TestWorkerKeepsToItsDirectory(t *testing.T) {
	requireInEffect(t, "files")
	outside := t.TempDir()
	secret := filepath.Join(outside, "secret")
	require.NoError(t, os.WriteFile(secret, []byte("a model"), 0o666))
	quote := func(name string) string { return strconv.Quote(filepath.Join(outside, name)) }
	_, told, err := attack(t, compilers.ORTOptions{}, `
		tell("own file", open("own", O_RDWR|O_CREAT, 0600));
		tell("own directory", mkdir("dir", 0700));
		tell("own rename", rename("own", "dir/own"));
		tell("own mode", fchmod(open("dir/own", O_RDONLY), 0700));
		tell("read", open(`+quote("secret")+`, O_RDONLY));
		tell("write", open(`+quote("secret")+`, O_WRONLY));
		tell("truncate", truncate(`+quote("secret")+`, 0));
		tell("create", open(`+quote("made")+`, O_WRONLY|O_CREAT, 0600));
		tell("directory", mkdir(`+quote("made")+`, 0700));
		tell("list", open(`+quote("")+`, O_RDONLY|O_DIRECTORY));
		tell("remove", unlink(`+quote("secret")+`));
		tell("move", rename(`+quote("secret")+`, `+quote("moved")+`));
		tell("take", rename(`+quote("secret")+`, "taken"));
		tell("give", rename("dir/own", `+quote("given")+`));
		tell("second name", link(`+quote("secret")+`, "linked"));
		tell("link", symlink(`+quote("secret")+`, "sym"));
		tell("through link", open("sym", O_RDONLY));
		tell("mode", chmod(`+quote("secret")+`, 0));
		tell("mode at", fchmodat(AT_FDCWD, `+quote("secret")+`, 0, 0));
		tell("owner", chown(`+quote("secret")+`, 1, 1));
		tell("mount", mount("none", "dir", "tmpfs", 0, 0));
		tell("device", mknod("dev", S_IFCHR|0600, 1 << 8 | 3));
		tell("fifo", mkfifo("fifo", 0600));
		tell("daemon", open("/proc/`+strconv.Itoa(os.Getpid())+`/environ", O_RDONLY));
		tell("shared memory", open("/dev/shm/epcached-test", O_RDWR|O_CREAT, 0600));
		tell("temporary", open("/tmp/epcached-test", O_RDWR|O_CREAT, 0600));`)
	require.Len(t, told, 26, "%v", err)
	for what, came := range told {
		if strings.HasPrefix(what, "own ") || what == "link" {
			require.Equal(t, "DONE", came, what)
		} else {
			require.Contains(t,
				[]string{"Permission denied", "Operation not permitted",
					"Invalid cross-device link"}, came, what)
		}
	}
	entries, err := os.ReadDir(outside)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	text, err := os.ReadFile(secret)
	require.NoError(t, err)
	require.Equal(t, "a model", string(text))
}

// Of a model that is an open file the worker may read that file, and neither write it, however it
// was opened, nor read what stands beside it.
func TestWorkerKeepsToItsOpenModel(t *testing.T) {
	requireInEffect(t, "files")
	outside := t.TempDir()
	for name, text := range map[string]string{"model.onnx": string(tinymodel.Relu()),
		"beside": "another model"} {
		require.NoError(t, os.WriteFile(filepath.Join(outside, name), []byte(text), 0o666))
	}
	quote := func(name string) string { return strconv.Quote(filepath.Join(outside, name)) }
	body := `
		tell("descriptor", open("/proc/self/fd/5", O_RDONLY));
		tell("model", open(getenv("MODEL"), O_RDONLY));
		tell("by its own path", open(` + quote("model.onnx") + `, O_RDONLY));
		tell("write", open("/proc/self/fd/5", O_RDWR));
		tell("truncate", truncate(getenv("MODEL"), 0));
		tell("into it", write(5, "x", 1));
		tell("mode", fchmod(5, 0));
		tell("beside", open(` + quote("beside") + `, O_RDONLY));
		tell("list", open(` + quote("") + `, O_RDONLY|O_DIRECTORY));`
	job := writeJob(t, hostileRuntime(t, body), compilers.EP{Name: qnn}, nil)
	require.NoError(t, os.Remove(job.Model))
	var err error
	job.ModelFile, err = os.Open(filepath.Join(outside, "model.onnx"))
	require.NoError(t, err)
	defer job.ModelFile.Close()
	c := newORT(t, compilers.ORTOptions{Env: []string{"MODEL=" + job.Model}})
	require.True(t, c.AcceptsOpenModel(job))
	result, err := c.Compile(t.Context(), job, nil)
	require.Error(t, err)
	came := attackResults(err, result.Log)
	for _, what := range []string{"descriptor", "model", "by its own path"} {
		require.Equal(t, "DONE", came[what], what)
	}
	for what, refusal := range map[string]string{
		"write": "Permission denied", "truncate": "Permission denied",
		"beside": "Permission denied", "list": "Permission denied",
		"into it": "Bad file descriptor", "mode": "Operation not permitted",
	} {
		require.Equal(t, refusal, came[what], what)
	}
}

// The daemon knows the files that it has verified by their times, and EPs load them from the store.
// Neither times nor modes of them change, by whichever call.
func TestWorkerChangesNoTimes(t *testing.T) {
	requireInEffect(t, "privileges")
	graph := filepath.Join(t.TempDir(), "graph.onnx")
	require.NoError(t, os.WriteFile(graph, tinymodel.Relu(), 0o644))
	long := time.Unix(1e9, 0)
	require.NoError(t, os.Chtimes(graph, long, long))
	before, err := os.Stat(graph)
	require.NoError(t, err)
	body := `
		const char *path = ` + strconv.Quote(graph) + `;
		struct timespec times[2] = {{1, 0}, {1, 0}};
		long old[4] = {1, 0, 1, 0};
		int fd = open(path, O_RDONLY);
		tell("open", fd);
		tell("by path", utimensat(AT_FDCWD, path, times, 0));
		tell("to now", utimensat(AT_FDCWD, path, NULL, 0));
		tell("by descriptor", futimens(fd, times));
	#ifdef SYS_utimes
		tell("utime", syscall(SYS_utime, path, old));
		tell("utimes", syscall(SYS_utimes, path, old));
		tell("futimesat", syscall(SYS_futimesat, AT_FDCWD, path, old));
	#endif
		tell("mode", fchmod(fd, 0600));
		tell("owner", fchown(fd, 1, 1));
		abort();`
	r := hostileRuntime(t, body)
	c := newORT(t,
		compilers.ORTOptions{
			Sandbox: compilers.SandboxOptions{Read: []string{filepath.Dir(graph)}}})
	facts, err := c.Probe(t.Context(), r)
	require.NoError(t, err)
	var exit *compilers.ExitError
	require.ErrorAs(t, facts.EPs[0].Err, &exit)
	came := attackResults(nil, exit.Stderr)
	require.Equal(t, "DONE", came["open"], "it may read the file: %v", exit)
	require.Equal(t, "DONE", came["by path"], "tools that set times of their own files go on")
	require.Equal(t, "Operation not permitted", came["mode"])
	require.Equal(t, "Operation not permitted", came["owner"])
	after, err := os.Stat(graph)
	require.NoError(t, err)
	stat := func(info os.FileInfo) syscall.Stat_t {
		s := *info.Sys().(*syscall.Stat_t)
		s.Atim = syscall.Timespec{} // it was read
		return s
	}
	require.Equal(t, stat(before), stat(after), "%v", came)
}

// A worker may use what the configuration adds to its sandbox, and nothing beside it.
func TestSandboxIsWidened(t *testing.T) {
	requireInEffect(t, "files")
	outside := t.TempDir()
	for _, name := range []string{"licence", "secret"} {
		require.NoError(t, os.WriteFile(filepath.Join(outside, name), nil, 0o600))
	}
	require.NoError(t, os.Mkdir(filepath.Join(outside, "cache"), 0o700))
	quote := func(name string) string { return strconv.Quote(filepath.Join(outside, name)) }
	options := compilers.ORTOptions{Sandbox: compilers.SandboxOptions{
		Read:  []string{filepath.Join(outside, "licence"), "/not/there"},
		Write: []string{filepath.Join(outside, "cache"), "/not/there/either"},
	}}
	_, told, _ := attack(t, options, `
		tell("licence", open(`+quote("licence")+`, O_RDONLY));
		tell("make", open(`+quote("cache/made")+`, O_WRONLY|O_CREAT, 0600));
		tell("change licence", open(`+quote("licence")+`, O_WRONLY));
		tell("secret", open(`+quote("secret")+`, O_RDONLY));
		tell("beside", open(`+quote("made")+`, O_WRONLY|O_CREAT, 0600));`)
	require.Equal(t, map[string]string{"licence": "DONE", "make": "DONE",
		"change licence": "Permission denied", "secret": "Permission denied",
		"beside": "Permission denied"}, told)
}

func TestWorkerHasNoNetwork(t *testing.T) {
	requireInEffect(t, "network")
	const body = `
		tell("tcp", socket(AF_INET, SOCK_STREAM, 0));
		tell("udp", socket(AF_INET, SOCK_DGRAM, 0));
		tell("tcp6", socket(AF_INET6, SOCK_STREAM, 0));
		tell("raw", socket(AF_PACKET, SOCK_RAW, 0));
		tell("netlink", socket(AF_NETLINK, SOCK_RAW, 0));
		tell("unix", socket(AF_UNIX, SOCK_STREAM, 0));
		char params[512] = {0};
		tell("io_uring", syscall(SYS_io_uring_setup, 4, params));`
	_, told, _ := attack(t, compilers.ORTOptions{}, body)
	require.Len(t, told, 7)
	for what, came := range told {
		require.NotEqual(t, "DONE", came, what)
	}
	_, told, _ = attack(t, compilers.ORTOptions{Sandbox: compilers.SandboxOptions{Network: true}},
		body)
	require.Equal(t, "DONE", told["udp"], "the configuration allows it")
}

func TestWorkerReachesNoOtherProcess(t *testing.T) {
	requireInEffect(t, "privileges")
	me := strconv.Itoa(os.Getpid())
	_, told, _ := attack(t, compilers.ORTOptions{}, `
		struct rlimit core;
		getrlimit(RLIMIT_CORE, &core);
		fprintf(stderr, "core=%lu\n", (unsigned long)core.rlim_max);
		tell("signal", kill(`+me+`, 0));
		tell("trace", ptrace(PTRACE_SEIZE, `+me+`, 0, 0));
		tell("shared", shmget(IPC_PRIVATE, 4096, IPC_CREAT|0600));
		tell("host name", sethostname("x", 1));
		tell("user", setuid(65533));
		tell("niceness", nice(-20));`)
	require.Len(t, told, 7)
	require.Equal(t, "1", told["core"], "no dump is that small")
	delete(told, "core")
	for what, came := range told {
		require.NotEqual(t, "DONE", came, what)
	}
}

// staying starts processes that leave session, group and parent, and ends as the format says.
const staying = `
	for (int i = 0; i < 3; i++)
		if (fork() == 0) {
			setsid();
			if (fork() == 0) {
				signal(SIGTERM, SIG_IGN);
				signal(SIGHUP, SIG_IGN);
				for (int fd = 3; fd < 64; fd++) close(fd);
				execl("/bin/sleep", "sleep", "%s", (char *)0);
			}
			_exit(0);
		}
	usleep(200000);
	%s;`

// All processes that a worker starts end with it, by each of the means that systems have for that.
func TestWorkersLeaveNoProcessBehind(t *testing.T) {
	means := map[string]struct {
		options compilers.ORTOptions
		measure string
	}{
		"namespace": {compilers.ORTOptions{}, "pid namespace"},
		"supervisor": {compilers.ORTOptions{Sandbox: compilers.SandboxOptions{NoNamespaces: true}},
			"killed by its parent"},
	}
	for name, m := range means {
		t.Run(name, func(t *testing.T) {
			for end, how := range map[string]string{"exit": "exit(0)", "crash": "abort()",
				"hang":   "for (;;) pause()",
				"murder": "kill(getppid(), SIGKILL); kill(0, SIGTERM); exit(0)"} {
				t.Run(end, func(t *testing.T) {
					c := newORT(t, withLimits(m.options, compilers.Limits{Wall: 3 * time.Second}))
					measures, err := c.Sandbox(t.Context())
					require.NoError(t, err)
					if there := strings.Contains(fmt.Sprint(measures), m.measure); !there &&
						name == "namespace" && !namespaces() {
						t.Skipf("NOT TESTED: no %s here: %v", m.measure, measures)
					} else {
						require.True(t, there, "%v", measures)
					}
					if name == "supervisor" && end == "murder" && landlockABI() < 6 {
						t.Skip("NOT TESTED: Landlock on this kernel does not keep a worker from " +
							"signalling who killed by its parent")
					}
					// finds them again
					seconds := fmt.Sprintf("%d.%d", 90000+os.Getpid(), time.Now().UnixNano())
					job := writeJob(t, hostileRuntime(t, fmt.Sprintf(staying, seconds, how)),
						compilers.EP{Name: qnn}, tinymodel.Relu())
					_, err = c.Compile(t.Context(), job, nil)
					require.Error(t, err)
					switch end {
					case "crash":
						require.ErrorContains(t, err, "abort")
					case "hang":
						require.ErrorIs(t, err, compilers.ErrTimeout)
					}
					stayed := workerProcess(seconds)
					for _, pid := range stayed {
						_ = unix.Kill(pid, unix.SIGKILL) // the test fails, and leaves none either
					}
					require.Empty(t, stayed)
				})
			}
		})
	}
}

func landlockABI() int {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0,
		unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(abi)
}

func withLimits(o compilers.ORTOptions, l compilers.Limits) compilers.ORTOptions {
	o.Limits = l
	return o
}

// workerProcess lists processes that have the text in their command line.
func workerProcess(text string) []int {
	var found []int
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline") // only a malformed pattern fails
	for _, path := range paths {
		line, err := os.ReadFile(path)
		if pid, err2 := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil &&
			err2 == nil && strings.Contains(string(line), text) {
			found = append(found, pid)
		}
	}
	return found
}

// A worker that takes a resource without end is ended, and the error names the resource.
func TestWorkerThatTakesWithoutEnd(t *testing.T) {
	limits := compilers.Limits{Wall: 60 * time.Second, Memory: 1 << 30, Output: 8 << 20,
		OpenFiles: 100}
	for name, c := range map[string]struct {
		body string
		is   error
		says string
	}{
		"processor": {"for (;;);", compilers.ErrCPU,
			"processor time limit reached: 1s"},
		"processor, and it does not mind": {"signal(SIGXCPU, SIG_IGN); for (;;);", compilers.ErrCPU,
			"processor time limit"},
		"memory": {"for (;;) { char *p = malloc(1 << 24); if (!p) { perror(\"malloc\"); abort(); " +
			"} memset(p, 1, 1 << 24); }", nil, "Cannot allocate memory"},
		"memory that no limit of the kernel counts": {"char *p = mmap(0, 450 << 20, " +
			"PROT_READ|PROT_WRITE, MAP_SHARED|MAP_ANONYMOUS, -1, 0); memset(p, 1, 450 << 20); " +
			"for (;;) pause();",
			compilers.ErrMemory, "more than 400.0 MiB"},
		"open files": {"while (open(\"/dev/null\", O_RDONLY) >= 0); perror(\"open\"); abort();",
			nil, "Too many open files"},
		"one file": {"int fd = open(\"big\", O_WRONLY|O_CREAT, 0600); static char b[1 << 20]; " +
			"for (;;) write(fd, b, sizeof b);", compilers.ErrOutput,
			"more than 8.0 MiB"},
		"many files": {"static char b[1 << 20]; for (int i = 0;; i++) { char n[20]; sprintf(n, " +
			"\"%d\", i); int fd = open(n, O_WRONLY|O_CREAT, 0600); write(fd, b, sizeof b); " +
			"close(fd); usleep(10000); }", compilers.ErrOutput, "more than 8.0 MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			limits := limits
			if c.is == compilers.ErrCPU {
				limits.CPU = time.Second
			}
			if c.is == compilers.ErrMemory {
				limits.Memory = 400 << 20
			}
			job, _, err := attack(t, compilers.ORTOptions{Limits: limits}, c.body)
			if c.is != nil {
				require.ErrorIs(t, err, c.is)
			}
			require.ErrorContains(t, err, c.says)
			require.NotErrorIs(t, err, compilers.ErrTimeout)
			left, err := os.ReadDir(job.Dir)
			require.NoError(t, err)
			require.Len(t, left, 1, "only the model is there")
		})
	}
}

func TestSandboxReportsMeasuredRestrictions(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{Scratch: t.TempDir()})
	measures, err := c.Sandbox(t.Context())
	require.NoError(t, err)
	again, err := c.Sandbox(t.Context())
	require.NoError(t, err)
	require.Equal(t, measures, again)
	require.Contains(t, fmt.Sprint(measures),
		"memory: "+bytesize.Text(compilers.MachineMemory()/4*3)+" for all processes",
		"what nobody set is derived from the machine")
	for _, m := range measures {
		t.Log(m)
		require.NotEmpty(t, m.Text)
		require.Equal(t, m.InForce, m.Hint == "", "what is missing has a hint: %s", m)
	}
	open, err := newORT(t, compilers.ORTOptions{Sandbox: compilers.SandboxOptions{Network: true}}).
		Sandbox(t.Context())
	require.NoError(t, err)
	for _, m := range open {
		if m.Name == "network" {
			require.False(t, m.InForce)
		}
	}
}
