package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A stopper kills the daemon as it begins its N-th decisive system call, counted over all of its
// threads. The kernel holds each such call and notifies the test, which lets it continue (seccomp,
// user notification): no debugger is needed, and none would count over threads. This test binary
// installs the filter, in a process that then becomes the daemon.
const stopperEnvironment = "EPCACHED_TEST_STOPPER"

// stopDetached is its value for the background process of --autostart.
const stopDetached = "detached"

// decisive are the system calls by which the daemon changes what is on disk, or acknowledges it.
var decisive = map[uint32]string{
	unix.SYS_FSYNC: "fsync", unix.SYS_FDATASYNC: "fdatasync", unix.SYS_LINKAT: "linkat",
	unix.SYS_RENAMEAT:  "renameat",
	unix.SYS_RENAMEAT2: "renameat2", unix.SYS_UNLINKAT: "unlinkat", unix.SYS_MKDIRAT: "mkdirat",
	unix.SYS_FCHMODAT:  "fchmodat",
	unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_PWRITE64: "pwrite64", unix.SYS_SENDMSG: "sendmsg",
	unix.SYS_BIND: "bind", unix.SYS_LISTEN: "listen", unix.SYS_SYMLINKAT: "symlinkat",
}

// becomeStopped is the main function of the process that becomes the daemon. It returns only if
// that fails.
func becomeStopped(command []string) error {
	runtime.LockOSThread() // the filter is this thread's, and exec leaves no other
	unix.CloseOnExec(3)
	unix.CloseOnExec(4)
	listener, err := installFilter()
	if err != nil {
		return fmt.Errorf("filter: %w", err)
	}
	tell, wait := os.NewFile(3, "tell"), os.NewFile(4, "wait")
	if err := binary.Write(tell, binary.LittleEndian, int32(listener)); err != nil {
		return err
	}
	if _, err := io.ReadFull(wait, make([]byte, 1)); err != nil {
		return err
	}
	if os.Getenv(stopperEnvironment) == stopDetached {
		null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		if err := unix.Dup3(int(null.Fd()), 3, 0); err != nil { // in place of the starter's pipe
			return err
		}
	}
	environment := slices.DeleteFunc(os.Environ(),
		func(v string) bool { return strings.HasPrefix(v, stopperEnvironment+"=") })
	return syscall.Exec(command[0], command, environment)
}

func installFilter() (listener int, err error) {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return 0, err
	}
	// The number of the call is the first word of what a filter sees.
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}}
	left := len(decisive)
	for nr := range decisive {
		filter = append(filter,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: nr, Jt: uint8(left)})
		left--
	}
	filter = append(filter,
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF})
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(&program)))
	runtime.KeepAlive(filter)
	if errno != 0 {
		return 0, errno
	}
	return int(fd), nil
}

// stopper is the test's end.
type stopper struct {
	pid  int
	kill func(n int, call string) bool // whether this call is the daemon's last
	done sync.WaitGroup
}

// launchStopped starts a daemon under a stopper.
func (s *site) launchStopped(t testing.TB, kill func(n int, call string) bool,
	more ...string) (*epcached, *stopper) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	under := *s
	under.under = append(slices.Clone(s.under), self)
	how := "1"
	if slices.Contains(more, "--detached") {
		how = stopDetached
	}
	under.environment = append(slices.Clone(s.environment), stopperEnvironment+"="+how)
	hear, tell, err := os.Pipe()
	require.NoError(t, err)
	defer hear.Close()
	wait, allow, err := os.Pipe()
	require.NoError(t, err)
	defer allow.Close()
	d := &epcached{TB: t, site: &under, cmd: under.command(t, more...), log: &syncBuffer{},
		done: make(chan struct{})}
	d.cmd.ExtraFiles = []*os.File{tell, wait}
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	d.run(t)
	require.NoError(t, tell.Close())
	require.NoError(t, wait.Close())
	var number int32
	if err := binary.Read(hear, binary.LittleEndian, &number); err != nil {
		d.wait()
		t.Skipf("SKIPPED: the kernel does not let a process watch the system calls of another: %s",
			d.log)
	}
	process, err := unix.PidfdOpen(d.pid(), 0)
	require.NoError(t, err)
	defer unix.Close(process)
	listener, err := unix.PidfdGetfd(process, int(number), 0)
	require.NoError(t, err)
	st := &stopper{pid: d.pid(), kill: kill}
	st.done.Go(func() { st.serve(listener) })
	t.Cleanup(st.done.Wait) // it ends with the daemon
	_, err = allow.Write([]byte{1})
	require.NoError(t, err)
	return d, st
}

// notice and verdict are the kernel's struct seccomp_notif and seccomp_notif_resp.
type notice struct {
	id         uint64
	pid, flags uint32
	call       uint32
	arch       uint32
	pointer    uint64
	args       [6]uint64
}

type verdict struct {
	id    uint64
	value int64
	err   int32
	flags uint32
}

// serve lets calls go on until no process is left that makes any.
func (s *stopper) serve(listener int) {
	defer unix.Close(listener)
	for n := 0; ; {
		ready := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(ready, -1); err != nil && err != unix.EINTR {
			return
		}
		if ready[0].Revents&unix.POLLIN == 0 {
			if ready[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0 {
				return
			}
			continue
		}
		var of notice
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener),
			unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&of))); errno != 0 {
			continue // the calling thread has ended meanwhile
		}
		if s.ours(of.pid) {
			if n++; s.kill(n, decisive[of.call]) {
				_ = unix.Kill(s.pid, unix.SIGKILL) // the test sees whether it ends
				continue
			}
		}
		goOn := verdict{id: of.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
		// An error means that the calling thread has ended meanwhile.
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_SEND,
			uintptr(unsafe.Pointer(&goOn)))
	}
}

// ours reports whether the thread is the daemon's, and not one of its workers'.
func (s *stopper) ours(thread uint32) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", s.pid, thread))
	return err == nil
}
