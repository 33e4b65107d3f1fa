//go:build linux && (amd64 || arm64)

package main

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

type denial struct {
	call  uint32
	errno unix.Errno
}

// refused are calls that a compiler has no use for, and by which it would reach beyond its files and its processes. Objects of System V and message
// queues, and keys, also stay behind when all processes are gone.
var refused = []denial{
	{unix.SYS_IO_URING_SETUP, unix.ENOSYS}, // it makes sockets, and opens files, without the calls for it
	{unix.SYS_SHMGET, unix.ENOSYS}, {unix.SYS_SEMGET, unix.ENOSYS}, {unix.SYS_MSGGET, unix.ENOSYS}, {unix.SYS_MQ_OPEN, unix.ENOSYS},
	{unix.SYS_ADD_KEY, unix.ENOSYS}, {unix.SYS_REQUEST_KEY, unix.ENOSYS}, {unix.SYS_KEYCTL, unix.ENOSYS},
	{unix.SYS_PTRACE, unix.EPERM}, {unix.SYS_PROCESS_VM_READV, unix.EPERM}, {unix.SYS_PROCESS_VM_WRITEV, unix.EPERM},
	{unix.SYS_OPEN_BY_HANDLE_AT, unix.EPERM}, // it opens files by number, past every folder
	// Landlock lets everybody change owners, modes and attributes. For files that it has open the worker may.
	{unix.SYS_FCHMODAT, unix.EPERM}, {unix.SYS_FCHMODAT2, unix.EPERM}, {unix.SYS_FCHOWNAT, unix.EPERM},
	// Nor does it keep from times, by which the daemon knows files that it has verified. Vendors' tools
	// set times of what they make, which is of no use: to them it looks as if they had.
	{unix.SYS_UTIMENSAT, 0},
	{unix.SYS_SETXATTR, unix.EPERM}, {unix.SYS_LSETXATTR, unix.EPERM}, {unix.SYS_REMOVEXATTR, unix.EPERM}, {unix.SYS_LREMOVEXATTR, unix.EPERM},
}

// refusedOfOthers are refused besides to a worker that has its model open, which may be its user's
// only one, and to one that makes no files, and reads those of the store.
var refusedOfOthers = []denial{
	{unix.SYS_FCHMOD, unix.EPERM}, {unix.SYS_FCHOWN, unix.EPERM}, {unix.SYS_FSETXATTR, unix.EPERM}, {unix.SYS_FREMOVEXATTR, unix.EPERM},
}

// Offsets in struct seccomp_data, and what 32-bit programs' calls look like.
const (
	callOffset, archOffset = 0, 4
	x32Bit                 = 0x40000000
)

// filterCalls refuses calls to this thread, and to every program that it starts. Without the network all sockets are refused but those of
// socketpair: a Unix socket also leads to the services of this machine. It needs no_new_privs. A kernel without filters has none to give.
func filterCalls(network, others bool) error {
	deny := slices.Concat(refused, refusedHere)
	if others {
		deny = append(deny, refusedOfOthers...)
	}
	if !network {
		deny = append(deny, denial{unix.SYS_SOCKET, unix.EACCES})
	}
	program := filter(deny)
	fprog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(program)
	if errno != 0 && !errors.Is(errno, unix.ENOSYS) && !errors.Is(errno, unix.EINVAL) {
		return fmt.Errorf("seccomp: %w", errno)
	}
	return nil
}

// filter writes the program: calls of another architecture do not exist, those of the list fail, all others pass.
func filter(deny []denial) []unix.SockFilter {
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	give := func(value uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: value}
	}
	fail := func(errno unix.Errno) unix.SockFilter { return give(unix.SECCOMP_RET_ERRNO | uint32(errno)) }
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
		program = append(program, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: d.call, Jf: 1}, fail(d.errno))
	}
	return append(program, give(unix.SECCOMP_RET_ALLOW))
}
