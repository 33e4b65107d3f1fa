package compilers

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/dialogue"
)

type cgroups struct {
	folder string
	memory bool // what of their resources can be limited
	pids   bool
	made   atomic.Uint64
}

// cgroup is that of one worker. A nil one is none, and everything about it is nothing.
type cgroup struct {
	path  string
	procs *os.File // cgroup.procs: a process that writes 0 goes there, by the right of who opened it
}

// ownName begins the names of cgroups that a daemon makes: then its process id, and a number.
const ownName = dialogue.CgroupName

func findCgroups(log *slog.Logger) *cgroups {
	own, err := ownCgroup()
	if err != nil {
		return nil // no version 2, or a system that hides it: no cgroups
	}
	folder := delegated(own)
	if folder == "" {
		return nil
	}
	c, err := useCgroups(folder, own)
	if err != nil {
		log.Debug("no cgroups for workers", "error", err)
		return nil
	}
	return c
}

func ownCgroup() (string, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	name := ""
	for line := range strings.Lines(string(text)) {
		if after, ok := strings.CutPrefix(line, "0::"); ok {
			name = strings.TrimSpace(after)
		}
	}
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer mounts.Close() // read only
	for lines := bufio.NewScanner(mounts); lines.Scan(); {
		before, after, _ := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(before) // id, parent, device, root, mount point
		if len(fields) < 5 || !strings.HasPrefix(after, "cgroup2 ") {
			continue
		}
		if relative, err := filepath.Rel(fields[3], name); err == nil && relative != ".." && !strings.HasPrefix(relative, "../") && name != "" {
			return filepath.Join(fields[4], relative), nil
		}
	}
	return "", fmt.Errorf("cgroup %q is not mounted: %w", name, os.ErrNotExist)
}

// delegated gives the folder that cgroups may be made in. systemd marks what it leaves to a service (Delegate=); the daemon may be in a subgroup of
// it (DelegateSubgroup=). Where there is no systemd nobody else makes cgroups beside.
func delegated(own string) string {
	for _, folder := range []string{filepath.Dir(own), own} {
		for _, name := range []string{"user.delegate", "trusted.delegate"} {
			value := make([]byte, 8)
			if n, err := unix.Getxattr(folder, name, value); err == nil && string(value[:n]) == "1" {
				return folder
			}
		}
	}
	if _, err := os.Stat("/run/systemd/system"); errors.Is(err, os.ErrNotExist) {
		return own
	}
	return ""
}

// useCgroups lets the cgroups below folder have limits, as far as it can, and tries to make one. A cgroup with processes, as the daemon's own, gives
// its children no limits; the daemon goes to one beside them if it is there alone.
func useCgroups(folder, own string) (*cgroups, error) {
	removeOld(folder)
	c := &cgroups{folder: folder}
	if folder == own && alone(own) {
		leaf := filepath.Join(folder, ownName+"daemon")
		if err := os.Mkdir(leaf, 0o755); err == nil || errors.Is(err, os.ErrExist) {
			// A refusal means that there are no limits, which is found out below.
			_ = os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
		}
	}
	for _, name := range []string{"memory", "pids"} {
		// One that is not there, or not to be had, is refused.
		_ = os.WriteFile(filepath.Join(folder, "cgroup.subtree_control"), []byte("+"+name), 0)
	}
	on, err := os.ReadFile(filepath.Join(folder, "cgroup.subtree_control"))
	if err != nil {
		return nil, err
	}
	for _, name := range strings.Fields(string(on)) {
		c.memory, c.pids = c.memory || name == "memory", c.pids || name == "pids"
	}
	trial, err := c.make(Limits{}.orDefault())
	if err != nil {
		return nil, err
	}
	_, err = os.Stat(filepath.Join(trial.path, "cgroup.kill"))
	trial.end()
	if err != nil {
		return nil, fmt.Errorf("cgroup.kill: %w", err) // before Linux 5.14
	}
	return c, nil
}

func alone(folder string) bool {
	if _, err := os.Stat(filepath.Join(folder, "cgroup.type")); err != nil {
		return false // the topmost has no type, and may have processes beside children
	}
	procs, err := os.ReadFile(filepath.Join(folder, "cgroup.procs"))
	return err == nil && strings.TrimSpace(string(procs)) == strconv.Itoa(os.Getpid())
}

func removeOld(folder string) {
	paths, err := filepath.Glob(filepath.Join(folder, ownName+"[0-9]*-*"))
	if err != nil {
		return // a folder whose name is a malformed pattern: it stays
	}
	for _, path := range paths {
		owner, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), ownName), "-")
		if pid, err := strconv.Atoi(owner); err == nil && errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			(&cgroup{path: path}).end()
		}
	}
}

// make makes a cgroup with the limits that can be had, for a process to go to.
func (c *cgroups) make(l Limits) (*cgroup, error) {
	g, err := c.limited(l)
	if err != nil {
		return nil, err
	}
	if g.procs, err = os.OpenFile(filepath.Join(g.path, "cgroup.procs"), os.O_WRONLY, 0); err != nil {
		g.end()
		return nil, err
	}
	return g, nil
}

func (c *cgroups) limited(l Limits) (*cgroup, error) {
	path := filepath.Join(c.folder, fmt.Sprintf("%s%d-%d", ownName, os.Getpid(), c.made.Add(1)))
	if err := os.Mkdir(path, 0o755); err != nil {
		return nil, err
	}
	g := &cgroup{path: path}
	settings := map[string]string{}
	if c.memory && l.Memory > 0 {
		settings["memory.max"] = strconv.FormatInt(l.Memory, 10)
		settings["memory.oom.group"] = "1" // a compile that lost one of its processes hangs
	}
	if c.pids && l.Processes > 0 {
		settings["pids.max"] = strconv.FormatInt(l.Processes, 10)
	}
	for name, value := range settings {
		if err := os.WriteFile(filepath.Join(path, name), []byte(value), 0); err != nil {
			g.end()
			return nil, err
		}
	}
	if c.memory && l.Memory > 0 {
		_ = os.WriteFile(filepath.Join(path, "memory.swap.max"), []byte("0"), 0) // not there where there is no swap
	}
	return g, nil
}

func (g *cgroup) end() usage {
	if g == nil {
		return usage{}
	}
	if g.procs != nil {
		_ = g.procs.Close() // nothing was written by this process
	}
	// Before Linux 5.14 it is not there; then cgroups are not used.
	if f, err := os.OpenFile(filepath.Join(g.path, "cgroup.kill"), os.O_WRONLY, 0); err == nil {
		_, _ = f.WriteString("1") // what is not killed keeps the cgroup from being removed, which the next start does
		_ = f.Close()             // likewise
	}
	for deadline := time.Now().Add(grace); time.Now().Before(deadline) && g.value("cgroup.events", "populated") != 0; {
		time.Sleep(time.Millisecond)
	}
	u := usage{cpu: time.Duration(g.value("cpu.stat", "usage_usec")) * time.Microsecond, outOfMemory: g.value("memory.events", "oom_kill") > 0}
	_ = unix.Rmdir(g.path) // one that stays is removed at the next start
	return u
}

func (g *cgroup) value(file, name string) int64 {
	text, err := os.ReadFile(filepath.Join(g.path, file))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		var key string
		var n int64
		if _, err := fmt.Sscan(line, &key, &n); err == nil && key == name {
			return n
		}
	}
	return 0
}

func kernelSince(major, minor int) bool {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return false
	}
	var has [2]int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &has[0], &has[1]); err != nil {
		return false
	}
	return has[0] > major || has[0] == major && has[1] >= minor
}
