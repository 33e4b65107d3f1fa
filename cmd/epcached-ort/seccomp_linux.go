//go:build linux && (amd64 || arm64)

package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/workerproto"
)

type denial struct {
	call  uint32
	errno unix.Errno
}

// refusedCalls are system calls that a compiler does not need, and that give access beyond its
// files and processes. System V objects, message queues and keys also outlive all processes.
var refusedCalls = []denial{
	// io_uring makes sockets and opens files without the filtered calls
	{unix.SYS_IO_URING_SETUP, unix.ENOSYS},
	{unix.SYS_SHMGET, unix.ENOSYS}, {unix.SYS_SEMGET, unix.ENOSYS}, {unix.SYS_MSGGET, unix.ENOSYS},
	{unix.SYS_MQ_OPEN, unix.ENOSYS},
	{unix.SYS_ADD_KEY, unix.ENOSYS}, {unix.SYS_REQUEST_KEY, unix.ENOSYS},
	{unix.SYS_KEYCTL, unix.ENOSYS},
	{unix.SYS_PTRACE, unix.EPERM}, {unix.SYS_PROCESS_VM_READV, unix.EPERM},
	{unix.SYS_PROCESS_VM_WRITEV, unix.EPERM},
	{unix.SYS_OPEN_BY_HANDLE_AT, unix.EPERM}, // opens files by handle, without a path
	// Landlock does not restrict changes of owners, modes and attributes by path. For open files
	// they are permitted.
	{unix.SYS_FCHMODAT, unix.EPERM}, {unix.SYS_FCHMODAT2, unix.EPERM},
	{unix.SYS_FCHOWNAT, unix.EPERM},
	// Landlock does not restrict changes of a file's times either. Refuse them, because the daemon
	// recognises verified files by their times. Vendors' tools set the times of their output, so
	// the call pretends to succeed.
	{unix.SYS_UTIMENSAT, 0},
	{unix.SYS_SETXATTR, unix.EPERM}, {unix.SYS_LSETXATTR, unix.EPERM},
	{unix.SYS_REMOVEXATTR, unix.EPERM}, {unix.SYS_LREMOVEXATTR, unix.EPERM},
}

// refusedWithOpenModel are refused in addition to a worker that has its user's model open, and to
// one that makes no files and reads those of the store.
var refusedWithOpenModel = []denial{
	{unix.SYS_FCHMOD, unix.EPERM}, {unix.SYS_FCHOWN, unix.EPERM}, {unix.SYS_FSETXATTR, unix.EPERM},
	{unix.SYS_FREMOVEXATTR, unix.EPERM},
}

// knownCalls are the calls that ONNX Runtime, OpenVINO's EP on processors and QNN's ahead of time
// were seen to make over all tests, and others of the same kinds.
var knownCalls = []uint32{
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_READV, unix.SYS_WRITEV, unix.SYS_PREAD64,
	unix.SYS_PWRITE64, unix.SYS_PREADV, unix.SYS_PWRITEV, unix.SYS_LSEEK, unix.SYS_CLOSE,
	unix.SYS_CLOSE_RANGE, unix.SYS_DUP, unix.SYS_DUP3, unix.SYS_FCNTL, unix.SYS_FLOCK,
	unix.SYS_OPENAT, unix.SYS_OPENAT2, unix.SYS_FSTAT, unix.SYS_STATX, unix.SYS_FACCESSAT,
	unix.SYS_FACCESSAT2, unix.SYS_READLINKAT, unix.SYS_GETDENTS64, unix.SYS_GETCWD, unix.SYS_CHDIR,
	unix.SYS_FCHDIR, unix.SYS_MKDIRAT, unix.SYS_UNLINKAT, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2,
	unix.SYS_SYMLINKAT, unix.SYS_LINKAT, unix.SYS_FTRUNCATE, unix.SYS_TRUNCATE, unix.SYS_FALLOCATE,
	unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_SYNC_FILE_RANGE, unix.SYS_COPY_FILE_RANGE,
	unix.SYS_SENDFILE, unix.SYS_SPLICE, unix.SYS_FADVISE64, unix.SYS_READAHEAD, unix.SYS_STATFS,
	unix.SYS_FSTATFS, unix.SYS_IOCTL, unix.SYS_MEMFD_CREATE, unix.SYS_GETXATTR, unix.SYS_LGETXATTR,
	unix.SYS_FGETXATTR, unix.SYS_FCHMOD, unix.SYS_FCHOWN, unix.SYS_UMASK, unix.SYS_PIPE2,
	unix.SYS_EVENTFD2, unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT,
	unix.SYS_EPOLL_PWAIT2, unix.SYS_PPOLL, unix.SYS_PSELECT6, unix.SYS_TIMERFD_CREATE,
	unix.SYS_TIMERFD_SETTIME, unix.SYS_TIMERFD_GETTIME, unix.SYS_SIGNALFD4, unix.SYS_INOTIFY_INIT1,
	unix.SYS_INOTIFY_ADD_WATCH, unix.SYS_INOTIFY_RM_WATCH, unix.SYS_SOCKETPAIR, unix.SYS_SENDMSG,
	unix.SYS_RECVMSG, unix.SYS_SENDTO, unix.SYS_RECVFROM, unix.SYS_SHUTDOWN, unix.SYS_GETSOCKOPT,
	unix.SYS_SETSOCKOPT, unix.SYS_MMAP, unix.SYS_MREMAP, unix.SYS_MPROTECT, unix.SYS_MUNMAP,
	unix.SYS_MADVISE, unix.SYS_MLOCK, unix.SYS_MLOCK2, unix.SYS_MUNLOCK, unix.SYS_MINCORE,
	unix.SYS_MSYNC, unix.SYS_BRK, unix.SYS_MBIND, unix.SYS_GET_MEMPOLICY, unix.SYS_SET_MEMPOLICY,
	unix.SYS_MEMBARRIER, unix.SYS_PKEY_ALLOC, unix.SYS_PKEY_FREE, unix.SYS_PKEY_MPROTECT,
	unix.SYS_CLONE, unix.SYS_CLONE3, unix.SYS_EXECVE, unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
	unix.SYS_WAIT4, unix.SYS_WAITID, unix.SYS_KILL, unix.SYS_TGKILL, unix.SYS_TKILL,
	unix.SYS_FUTEX, unix.SYS_SET_ROBUST_LIST, unix.SYS_GET_ROBUST_LIST, unix.SYS_SET_TID_ADDRESS,
	unix.SYS_RSEQ, unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN,
	unix.SYS_RT_SIGSUSPEND, unix.SYS_RT_SIGTIMEDWAIT, unix.SYS_RT_SIGPENDING,
	unix.SYS_RT_SIGQUEUEINFO, unix.SYS_RT_TGSIGQUEUEINFO, unix.SYS_SIGALTSTACK,
	unix.SYS_RESTART_SYSCALL, unix.SYS_SCHED_GETAFFINITY, unix.SYS_SCHED_SETAFFINITY,
	unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETPARAM, unix.SYS_SCHED_SETPARAM,
	unix.SYS_SCHED_GETSCHEDULER, unix.SYS_SCHED_SETSCHEDULER, unix.SYS_SCHED_GETATTR,
	unix.SYS_SCHED_GET_PRIORITY_MAX, unix.SYS_SCHED_GET_PRIORITY_MIN, unix.SYS_GETPRIORITY,
	unix.SYS_SETPRIORITY, unix.SYS_PRCTL, unix.SYS_GETPID, unix.SYS_GETPPID, unix.SYS_GETTID,
	unix.SYS_GETUID, unix.SYS_GETEUID, unix.SYS_GETGID, unix.SYS_GETEGID, unix.SYS_GETGROUPS,
	unix.SYS_GETRESUID, unix.SYS_GETRESGID, unix.SYS_GETPGID, unix.SYS_GETSID, unix.SYS_SETSID,
	unix.SYS_SETPGID, unix.SYS_CAPGET, unix.SYS_UNAME, unix.SYS_SYSINFO, unix.SYS_GETRUSAGE,
	unix.SYS_TIMES, unix.SYS_GETRLIMIT, unix.SYS_SETRLIMIT, unix.SYS_PRLIMIT64, unix.SYS_GETCPU,
	unix.SYS_GETRANDOM, unix.SYS_CLOCK_GETTIME, unix.SYS_CLOCK_GETRES, unix.SYS_CLOCK_NANOSLEEP,
	unix.SYS_NANOSLEEP, unix.SYS_GETTIMEOFDAY, unix.SYS_TIMER_CREATE, unix.SYS_TIMER_SETTIME,
	unix.SYS_TIMER_GETTIME, unix.SYS_TIMER_GETOVERRUN, unix.SYS_TIMER_DELETE, unix.SYS_GETITIMER,
	unix.SYS_SETITIMER, unix.SYS_LANDLOCK_CREATE_RULESET, unix.SYS_LANDLOCK_ADD_RULE,
	unix.SYS_LANDLOCK_RESTRICT_SELF, unix.SYS_SECCOMP,
}

// Offsets in struct seccomp_data, and the marks of 32-bit programs' calls.
const (
	callOffset, archOffset = 0, 4
	x32Bit                 = 0x40000000
)

// filterCalls installs a filter for system calls of this thread and of every program that it
// starts. Without the network it refuses all sockets except those of socketpair, because a Unix
// socket gives access to the machine's services. It needs no_new_privs. Without seccomp in the
// kernel it does nothing.
//
// With c.Known it refuses all unknown calls, and reports them to the daemon. If the kernel cannot
// report them (before Linux 5.0, or within a sandbox that gets the reports itself), it refuses only
// the named ones.
func filterCalls(c *workerproto.Confinement, others bool) error {
	deny := slices.Concat(refusedCalls, archRefusedCalls)
	if others {
		deny = append(deny, refusedWithOpenModel...)
	}
	if !c.Network {
		deny = append(deny, denial{unix.SYS_SOCKET, unix.EACCES})
	}
	if c.Known {
		listener, errno := install(filter(deny, slices.Concat(knownCalls, archKnownCalls)),
			unix.SECCOMP_FILTER_FLAG_NEW_LISTENER)
		if errno == 0 {
			go reportRefused(listener)
			return nil
		}
	}
	_, errno := install(filter(deny, nil), 0)
	if errno != 0 && !errors.Is(errno, unix.ENOSYS) && !errors.Is(errno, unix.EINVAL) {
		return fmt.Errorf("seccomp: %w", errno)
	}
	return nil
}

func install(program []unix.SockFilter, flags uintptr) (listener uintptr, errno unix.Errno) {
	fprog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	listener, _, errno = unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags,
		uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(program)
	return listener, errno
}

// firstUnifiedCall is the first call with the same number on all architectures. Unknown calls from
// it on fail with ENOSYS, because programs then fall back as on an older kernel, and earlier ones
// with EPERM.
const firstUnifiedCall = 424

// reportRefused answers unknown calls, on a thread without a filter, and prints which.
func reportRefused(listener uintptr) {
	reported := map[int32]bool{}
	for {
		var call struct {
			id         uint64
			pid, flags uint32
			nr         int32
			arch       uint32
			rest       [7]uint64
		}
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, listener, unix.SECCOMP_IOCTL_NOTIF_RECV,
			uintptr(unsafe.Pointer(&call)))
		switch errno {
		case 0:
		case unix.EINTR, unix.ENOENT: // the process ended in the meantime
			continue
		default:
			return
		}
		if !reported[call.nr] {
			reported[call.nr] = true
			fmt.Fprintln(os.Stderr, workerproto.CallRefused, call.nr)
		}
		answer := struct {
			id    uint64
			value int64
			errno int32
			flags uint32
		}{id: call.id, errno: -int32(unix.EPERM)}
		if call.nr >= firstUnifiedCall {
			answer.errno = -int32(unix.ENOSYS)
		}
		// it may have ended
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, listener, unix.SECCOMP_IOCTL_NOTIF_SEND,
			uintptr(unsafe.Pointer(&answer)))
	}
}

// filter returns the BPF program: calls of another architecture fail with ENOSYS, those in deny
// fail, and of the others those in allow are permitted, or all if allow is empty.
func filter(deny []denial, allow []uint32) []unix.SockFilter {
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	give := func(value uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: value}
	}
	fail := func(errno unix.Errno) unix.SockFilter {
		return give(unix.SECCOMP_RET_ERRNO | uint32(errno))
	}
	arch := uint32(unix.AUDIT_ARCH_X86_64)
	if runtime.GOARCH == "arm64" {
		arch = unix.AUDIT_ARCH_AARCH64
	}
	program := []unix.SockFilter{
		load(archOffset),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: arch, Jt: 1},
		fail(unix.ENOSYS),
		load(callOffset),
		{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, K: x32Bit, Jf: 1},
		fail(unix.ENOSYS),
	}
	for _, d := range deny {
		program = append(program, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K,
			K: d.call, Jf: 1}, fail(d.errno))
	}
	for _, call := range allow {
		program = append(program, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K,
			K: call, Jf: 1}, give(unix.SECCOMP_RET_ALLOW))
	}
	if len(allow) > 0 {
		return append(program, give(unix.SECCOMP_RET_USER_NOTIF))
	}
	return append(program, give(unix.SECCOMP_RET_ALLOW))
}
