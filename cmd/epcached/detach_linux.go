package main

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// detach starts the program in a session of its own, with nothing of the caller's open but the log and the way to tell that it is ready.
func detach(program string, args []string, log, told *os.File) error {
	cmd := exec.Command(program, args...)
	cmd.Env = environment()
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{told}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	runtime.LockOSThread() // priorities and processors belong to the thread, and are inherited from it
	defer runtime.UnlockOSThread()
	shedInherited()
	if err := cmd.Start(); err != nil {
		return err
	}
	return cmd.Process.Release()
}

// shedInherited resets what the application that happened to start the daemon was limited to, because
// the daemon serves other applications as well. It is best effort: an ordinary user may not lower a
// niceness, nor raise a hard limit.
func shedInherited() {
	usual := &unix.SchedAttr{Policy: unix.SCHED_NORMAL}
	if unix.SchedSetAttr(0, usual, 0) != nil {
		if left, err := unix.Getpriority(unix.PRIO_PROCESS, 0); err == nil {
			usual.Nice = int32(20 - left) // the system call returns 20 less the niceness
			_ = unix.SchedSetAttr(0, usual, 0)
		}
	}
	const thread = 1 // IOPRIO_WHO_PROCESS, which means a thread
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, thread, 0, 0)
	var all unix.CPUSet
	all.Fill()
	_ = unix.SchedSetaffinity(0, &all) // the kernel leaves those of the cgroup
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0)
	for _, resource := range []int{unix.RLIMIT_AS, unix.RLIMIT_CPU, unix.RLIMIT_DATA, unix.RLIMIT_FSIZE} {
		var limit unix.Rlimit
		if unix.Getrlimit(resource, &limit) == nil {
			limit.Cur = limit.Max
			_ = unix.Setrlimit(resource, &limit)
		}
	}
}

// starter gives the way to who started this process. Workers do not get it.
func starter() (*os.File, error) {
	const number = 3
	unix.CloseOnExec(number)
	unix.Umask(0o022) // the application's may leave files open to all
	if _, err := unix.FcntlInt(number, unix.F_GETFD, 0); err != nil {
		return nil, errors.New("--detached is for the process that --autostart starts")
	}
	return os.NewFile(number, "starter"), nil
}
