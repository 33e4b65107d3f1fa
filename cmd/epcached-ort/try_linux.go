//go:build linux && (amd64 || arm64)

package main

import (
	"bufio"
	"bytes"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/dialogue"
)

// try tries what a worker should be kept from.
func (j *job) try() error {
	c := dialogue.Confined{Landlock: landlockABI(), UID: uint32(os.Getuid())}
	defer func() { j.result.Confined = &c }()
	_, err := os.ReadFile(j.req.Model)
	c.Reads = err == nil
	if f, err := os.OpenFile(j.req.Output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err == nil {
		c.Writes = true
		_ = f.Close() // nothing was written
	}
	if fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
		c.Connects = true
		_ = unix.Close(fd) // it was not used
	}
	if group, err := os.ReadFile("/proc/self/cgroup"); err == nil {
		c.Cgroup = bytes.Contains(group, []byte("/"+dialogue.CgroupName)) && !bytes.Contains(group, []byte("/"+dialogue.CgroupName+"daemon"))
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil // what it would tell is taken for missing
	}
	for lines := bufio.NewScanner(bytes.NewReader(status)); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		switch name {
		case "Seccomp":
			c.Seccomp = value == strconv.Itoa(unix.SECCOMP_MODE_FILTER)
		case "NSpid":
			c.Namespace = len(strings.Fields(value)) > 1
		case "CapEff":
			held, err := strconv.ParseUint(value, 16, 64)
			c.Privileged = err != nil || held&^keptCapabilities != 0
		}
	}
	return nil
}
