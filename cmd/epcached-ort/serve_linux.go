//go:build linux && (amd64 || arm64)

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/workerproto"
)

// serve is the main process of an instance of the workers' unit. Its standard input is a connection
// of the daemon, which sends the program to start; the connection's end ends the worker. systemd
// kills all processes left in the unit's cgroup when serve returns.
func serve() error {
	conn := os.NewFile(0, "connection")
	if err := workerproto.Send(conn, workerproto.ExitReport{}); err != nil {
		return err
	}
	fds, err := receive()
	if err != nil {
		return fmt.Errorf("descriptors: %w", err)
	}
	in := bufio.NewReader(conn)
	var launch workerproto.Launch
	if err := workerproto.Receive(in, &launch); err != nil {
		return err
	}
	if launch.Prepare == "" {
		cleanPrivate(launch.Dir)
		return workerproto.Send(conn, workerproto.ExitReport{})
	}
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	files := append([]uintptr{uintptr(null), fds[0]}, fds...)
	args := []string{os.Args[0], "prepare", launch.Prepare}
	worker, err := syscall.ForkExec("/proc/self/exe", args, &syscall.ProcAttr{
		Dir: launch.Dir, Env: launch.Env, Files: files, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("start a worker: %w", err)
	}
	for _, fd := range fds {
		_ = unix.Close(int(fd)) // the worker has a duplicate; its end must be noticed
	}
	go obeyDaemon(in, worker)
	status, usage, err := wait(worker)
	if err != nil {
		return fmt.Errorf("wait for the worker: %w", err)
	}
	cleanPrivate(launch.Dir)
	killed := regexp.MustCompile(`(?m)^oom_kill [1-9]`).MatchString(readCgroup("memory.events"))
	cpu := time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	ended := workerproto.ExitReport{Status: status.ExitStatus(), CPU: cpu, OutOfMemory: killed}
	if status.Signaled() {
		ended.Status = workerproto.ExitSignal + int(status.Signal())
	}
	return workerproto.Send(conn, ended)
}

// receive takes the worker's descriptors from 2 on.
func receive() (fds []uintptr, err error) {
	const most = workerproto.ModelFD - 1
	first, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(most*4))
	n, oobn, _, _, err := unix.Recvmsg(0, first, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || n == 0 || first[0] != workerproto.Handle || len(messages) != 1 {
		return nil, errors.Join(err, workerproto.ErrMalformed)
	}
	rights, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(rights) < most-1 {
		return nil, errors.Join(err, workerproto.ErrMalformed)
	}
	for _, fd := range rights {
		fds = append(fds, uintptr(fd))
	}
	return fds, nil
}

// obeyDaemon obeys the daemon until the connection ends, which ends the worker.
func obeyDaemon(in *bufio.Reader, worker int) {
	for {
		word, err := in.ReadByte()
		if err != nil {
			_ = unix.Kill(worker, unix.SIGTERM) // it may have ended
			time.Sleep(2 * reapTimeout)
			os.Exit(workerproto.ExitSetup) // systemd kills the processes that remain
		}
		if word == workerproto.Raise { // best effort: LimitNICE= of the unit bounds it
			_ = os.WriteFile("/proc/"+strconv.Itoa(worker)+"/autogroup", []byte("0"), 0)
			_ = unix.Setpriority(unix.PRIO_PGRP, worker, 0)
		}
	}
}

// cleanPrivate removes the files that a worker left in its private directory, and lets the daemon,
// which is in the group, access the rest of the job's directory regardless of the modes that the
// vendor's code has set.
func cleanPrivate(private string) {
	entries, _ := os.ReadDir(private) // empty if it does not exist
	for _, e := range entries {
		_ = os.RemoveAll(filepath.Join(private, e.Name())) // the daemon reports what remains
	}
	_ = filepath.WalkDir(filepath.Dir(private),
		func(path string, entry fs.DirEntry, err error) error {
			if err == nil && (entry.IsDir() || entry.Type().IsRegular()) {
				if info, err := entry.Info(); err == nil {
					mode := info.Mode().Perm()
					_ = os.Chmod(path, mode|mode>>3&0o070) // fails for the daemon's own files
				}
			}
			return nil // it was removed
		})
}

// readCgroup returns the content of a file of this process's cgroup (version 2), or "".
func readCgroup(file string) string {
	own, _ := os.ReadFile("/proc/self/cgroup")
	_, path, found := strings.Cut("\n"+string(own), "\n0::")
	path, _, _ = strings.Cut(path, "\n")
	if !found {
		return ""
	}
	text, _ := os.ReadFile(filepath.Join("/sys/fs/cgroup", path, file))
	return strings.TrimSpace(string(text))
}
