package main

import (
	"errors"
	"os"
	"os/exec"
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
	if err := cmd.Start(); err != nil {
		return err
	}
	return cmd.Process.Release()
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

// putInPlace makes an open file's number stand for another file.
func putInPlace(fresh, old *os.File) error {
	for _, number := range []int{int(old.Fd()), int(os.Stdout.Fd())} {
		if err := unix.Dup3(int(fresh.Fd()), number, 0); err != nil {
			return err
		}
	}
	return nil
}
