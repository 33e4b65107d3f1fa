package compilers_test

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/compilers/workerproto"
)

// workersUnit does what systemd does for the workers' unit: it starts a process for each
// connection.
type workersUnit struct {
	socket  string
	started chan *exec.Cmd // each process; the test waits for it
}

const workersGroup = 65534

func startUnit(t *testing.T) *workersUnit {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can start processes of another group")
	}
	u := &workersUnit{socket: filepath.Join(t.TempDir(), "s"), started: make(chan *exec.Cmd, 16)}
	l, err := net.Listen("unix", u.socket)
	require.NoError(t, err)
	require.NoError(t, os.Chown(u.socket, 0, workersGroup))
	require.NoError(t, os.Chmod(u.socket, 0o600))
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	worker := compilertest.Worker(t)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			file, err := conn.(*net.UnixConn).File()
			if err == nil {
				cmd := exec.Command(worker, "serve")
				cmd.Stdin, cmd.Stderr = file, os.Stderr
				cmd.SysProcAttr = &syscall.SysProcAttr{
					Credential: &syscall.Credential{Gid: workersGroup}}
				err = cmd.Start()
				u.started <- cmd
			}
			if err != nil {
				panic(err)
			}
			_ = file.Close() // the process has its own
			_ = conn.Close() // likewise
		}
	}()
	return u
}

func (u *workersUnit) compiler(t *testing.T) *compilers.ORT {
	t.Helper()
	user, err := compilers.UnitCredential(u.socket)
	require.NoError(t, err)
	return newORT(t, compilers.ORTOptions{Socket: u.socket, User: user})
}

// A real compile and a real load, in processes that the unit starts.
func TestWorkersOfAUnitCompileAndLoad(t *testing.T) {
	u := startUnit(t)
	r := compilertest.Runtime(t, "openvino-1.8.1")
	c := u.compiler(t)
	job := writeJob(t, r, compilers.EP{Name: openVINO}, compilertest.Dense(1, 64, 1))
	result, err := c.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	require.Positive(t, result.CPUSeconds)
	check, err := c.Check(t.Context(),
		compilers.CheckJob{Runtime: r, EPs: job.EPs,
			Graph: filepath.Join(job.Dir, result.Graph)})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, check.Outcome, check.Text)
	for range 2 {
		require.NoError(t, (<-u.started).Wait())
	}
}

// The death of a worker in a unit, by its own code or from outside, is reported as that of a child.
func TestWorkersOfAUnitThatDie(t *testing.T) {
	u := startUnit(t)
	c := u.compiler(t)
	begin := func(ctx context.Context, body string) (dir string, ended chan error) {
		job := writeJob(t, hostileRuntime(t, body), compilers.EP{Name: qnn}, tinymodel.Relu())
		ended = make(chan error, 1)
		go func() {
			_, err := c.Compile(ctx, job, nil)
			ended <- err
		}()
		return filepath.Join(job.Dir, ".worker"), ended
	}
	running := func(dir string, ended chan error) *exec.Cmd {
		require.Eventually(t, func() bool {
			_, err := os.Stat(filepath.Join(dir, "here"))
			return err == nil || len(ended) > 0
		}, time.Minute, time.Millisecond)
		if len(ended) > 0 {
			require.NoError(t, <-ended, "the worker ended before it blocked")
		}
		return <-u.started
	}
	const blocks = `mkdir("private", 0700); creat("private/here", 0600); creat("here", 0600); ` +
		`for (;;) pause();`

	_, ended := begin(t.Context(), `fputs("its last words", stderr); abort();`)
	err := <-ended
	var exit *compilers.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, "SIGABRT", exit.Name)
	require.Contains(t, exit.Stderr, "its last words")
	require.NoError(t, (<-u.started).Wait())

	ctx, cancel := context.WithCancel(t.Context())
	dir, ended := begin(ctx, blocks)
	instance := running(dir, ended)
	worker := childrenOf(childrenOf(instance.Process.Pid)[0])[0]
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.NoError(t, instance.Wait(), "it ends when the daemon says so")
	require.ErrorIs(t, unix.Kill(worker, 0), unix.ESRCH)
	require.NoDirExists(t, dir)

	dir, ended = begin(t.Context(), blocks)
	instance = running(dir, ended)
	supervisor := childrenOf(instance.Process.Pid)[0]
	require.NoError(t, instance.Process.Kill())
	require.NoError(t, unix.Kill(supervisor, unix.SIGKILL),
		"as systemd does to the rest of the unit")
	require.ErrorAs(t, <-ended, &exit)
	require.Equal(t, "SIGKILL", exit.Name)
	require.Error(t, instance.Wait())
}

// Where no unit is, or none for the daemon, the error names the configuration's key, and no failure
// of the model is remembered.
func TestNoUnit(t *testing.T) {
	u := startUnit(t)
	c := u.compiler(t)
	require.NoError(t, os.Remove(u.socket))
	job := writeJob(t, hostileRuntime(t, `abort();`), compilers.EP{Name: qnn}, tinymodel.Relu())
	_, err := c.Compile(t.Context(), job, nil)
	require.ErrorIs(t, err, compilers.ErrStart)
	require.ErrorContains(t, err, "worker_socket")

	l, err := net.Listen("unix", u.socket)
	require.NoError(t, err)
	defer l.Close()
	require.NoError(t, os.Chmod(u.socket, 0o666))
	_, err = compilers.UnitCredential(u.socket)
	require.ErrorContains(t, err, "SocketMode=0600")
	go func() {
		conn, err := l.Accept()
		if err == nil {
			_ = conn.Close() // as systemd does when it cannot start an instance
		}
	}()
	_, err = c.Compile(t.Context(), writeJob(t, job.Runtime, job.EPs[0], tinymodel.Relu()), nil)
	require.ErrorIs(t, err, compilers.ErrStart)
	require.ErrorContains(t, err, "journalctl")
}

// Only the workers of a unit let their group at what they make: a client that starts a worker
// itself says nothing of it.
func TestWorkerFilesArePrivate(t *testing.T) {
	for preparation, want := range map[string]string{`{}`: "0077\n", `{"Group":true}`: "0007\n"} {
		request, send, err := os.Pipe()
		require.NoError(t, err)
		read, answers, err := os.Pipe()
		require.NoError(t, err)
		cmd := exec.Command(compilertest.Worker(t), "prepare", preparation)
		cmd.Dir, cmd.ExtraFiles = t.TempDir(), []*os.File{request, answers}
		require.NoError(t, cmd.Start())
		require.NoError(t,
			workerproto.WriteRequest(send,
				workerproto.Request{Do: workerproto.Command,
					Args: []string{"/bin/sh", "-c", "umask > umask"}}))
		require.NoError(t, cmd.Wait())
		for _, f := range []*os.File{request, send, read, answers} {
			require.NoError(t, f.Close())
		}
		text, err := os.ReadFile(filepath.Join(cmd.Dir, "umask"))
		require.NoError(t, err)
		require.Equal(t, want, string(text), preparation)
	}
}
