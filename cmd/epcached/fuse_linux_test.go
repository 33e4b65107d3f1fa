package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A fuseServer is a FUSE file system of a test, in a process of its own: this test binary, started
// with the model that it serves and the directory that it mounts in the environment.
const fuseEnvironment = "EPCACHED_TEST_FUSE"

// The files of the file system. All have the model's bytes, and attributes that are never kept.
var fuseNodes = map[string]uint64{
	"sound.onnx":  2,
	"silent.onnx": 3, // reads are not answered
	"dead.onnx":   4, // nothing but open is
}

// mountFUSE mounts the file system until kill, or the end of the test.
func mountFUSE(t *testing.T, model string) (dir string, kill func()) {
	t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil || os.Getuid() != 0 {
		t.Skip("SKIPPED: only root with /dev/fuse can mount a FUSE file system")
	}
	dir = t.TempDir()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), fuseEnvironment+"="+model+"\n"+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	kill = func() {
		_ = cmd.Process.Kill() // it may be the second time
		_ = cmd.Wait()         // as killed
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	}
	t.Cleanup(kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	if reason, refused := strings.CutPrefix(line, "refused "); refused {
		t.Skip("SKIPPED: a FUSE file system cannot be mounted here: " + reason)
	}
	return dir, kill
}

// serveFUSE is the server's main function.
func serveFUSE(order string) int {
	model, dir, _ := strings.Cut(order, "\n")
	content, err := os.ReadFile(model)
	if err != nil {
		fmt.Println("refused", err)
		return 1
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Mount("epcached-test", dir, "fuse", unix.MS_NODEV|unix.MS_NOSUID,
			fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd))
	}
	if err != nil {
		fmt.Println("refused", err)
		return 1
	}
	fmt.Println("mounted")
	buffer := make([]byte, 1<<20)
	for {
		n, err := unix.Read(fd, buffer)
		switch {
		case err == unix.EINTR || err == unix.ENOENT:
			continue
		case err != nil:
			return 0 // unmounted
		}
		if answer := answerFUSE(buffer[:n], content); answer != nil {
			_, _ = unix.Write(fd, answer) // fails for what was interrupted
		}
	}
}

// answerFUSE returns the answer to one request, nil: none is sent.
func answerFUSE(request, content []byte) []byte {
	le := binary.LittleEndian
	opcode, node, body := le.Uint32(request[4:]), le.Uint64(request[16:]), request[40:]
	attributes := func(b []byte, node uint64) []byte {
		mode := uint32(unix.S_IFREG | 0o644)
		if node == 1 {
			mode = unix.S_IFDIR | 0o755
		}
		for _, v := range []uint64{node, uint64(len(content)), 8, 1, 1, 1} {
			b = le.AppendUint64(b, v)
		}
		for _, v := range []uint32{0, 0, 0, mode, 1, 0, 0, 0, 4096, 0} {
			b = le.AppendUint32(b, v)
		}
		return b
	}
	var reply []byte
	var failed unix.Errno
	silent := node == fuseNodes["dead.onnx"]
	switch opcode {
	case 26: // INIT
		reply = make([]byte, 64)
		le.PutUint32(reply, 7)
		le.PutUint32(reply[4:], 31)
		le.PutUint32(reply[20:], 4096)
	case 1: // LOOKUP
		child := fuseNodes[strings.TrimRight(string(body), "\x00")]
		if failed = unix.ENOENT; child != 0 {
			failed, reply = 0,
				attributes(append(le.AppendUint64(nil, child), make([]byte, 32)...), child)
		}
	case 3: // GETATTR
		if silent {
			return nil
		}
		reply = attributes(make([]byte, 16), node)
	case 14, 27: // OPEN, OPENDIR; with direct I/O, whose reads no signal ends
		reply = append(make([]byte, 8), 1, 0, 0, 0, 0, 0, 0, 0)
	case 15: // READ
		if silent || node == fuseNodes["silent.onnx"] {
			return nil
		}
		from := min(le.Uint64(body[8:]), uint64(len(content)))
		reply = content[from:min(from+uint64(le.Uint32(body[16:])), uint64(len(content)))]
	case 25: // FLUSH
		if silent {
			return nil
		}
	case 17: // STATFS
		if silent {
			return nil
		}
		reply = make([]byte, 80)
	case 2, 36, 42: // FORGET, INTERRUPT, BATCH_FORGET
		return nil
	case 18, 29: // RELEASE, RELEASEDIR
	default:
		failed = unix.ENOSYS
	}
	header := le.AppendUint32(nil, uint32(16+len(reply)))
	header = le.AppendUint32(header, uint32(-int32(failed)))
	header = le.AppendUint64(header, le.Uint64(request[8:]))
	return append(header, reply...)
}

// threads counts the daemon's threads and the processes that it started.
func (d *epcached) threads() (n int) {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", d.pid()))
	require.NoError(d, err)
	for _, task := range tasks {
		// it may have ended
		children, _ := os.ReadFile(filepath.Join("/proc", fmt.Sprint(d.pid()), "task", task.Name(),
			"children"))
		n += 1 + len(strings.Fields(string(children)))
	}
	return n
}

// open counts the daemon's descriptors of files below a directory.
func (d *epcached) open(below string) (n int) {
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", d.pid()))
	require.NoError(d, err)
	for _, link := range links {
		// else it is closed
		if to, err := os.Readlink(link); err == nil && strings.HasPrefix(to, below) {
			n++
		}
	}
	return n
}
