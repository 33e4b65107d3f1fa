//go:build linux && (amd64 || arm64)

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/workerproto"
)

// Sets of Landlock access rights.
const (
	fileRights = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE |
		unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE |
		unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	readRights = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE |
		unix.LANDLOCK_ACCESS_FS_READ_DIR
	deviceRights = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_READ_DIR | unix.LANDLOCK_ACCESS_FS_TRUNCATE |
		unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	// Devices, sockets and FIFOs cannot be made: an artefact has none.
	writeRights = readRights | deviceRights | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_REFER |
		unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_DIR |
		unix.LANDLOCK_ACCESS_FS_MAKE_SYM |
		unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR
)

// landlockABI returns the version of Landlock that the kernel offers; 0: none.
func landlockABI() int {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0,
		unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(abi)
}

// handledRights returns all rights that a version can restrict.
func handledRights(abi int, network bool) unix.LandlockRulesetAttr {
	fs := uint64(unix.LANDLOCK_ACCESS_FS_MAKE_SYM)<<1 - 1 // all rights of the first version
	for since, right := range map[int]uint64{2: unix.LANDLOCK_ACCESS_FS_REFER,
		3: unix.LANDLOCK_ACCESS_FS_TRUNCATE, 5: unix.LANDLOCK_ACCESS_FS_IOCTL_DEV} {
		if abi >= since {
			fs |= right
		}
	}
	a := unix.LandlockRulesetAttr{Handled_access_fs: fs}
	if abi >= 4 && !network {
		a.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP |
			unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if abi >= 6 {
		a.Scoped = unix.LANDLOCK_SCOPE_SIGNAL
		if !network {
			a.Scoped |= unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
		}
	}
	return a
}

// landlock restricts this thread, and every program that it starts, to the given files, and to the
// one that is open as model. Without Landlock in the kernel it does nothing, which is not an error.
func landlock(c *workerproto.Confinement, model int) error {
	abi := landlockABI()
	if abi == 0 {
		return nil
	}
	attr := handledRights(abi, c.Network)
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)),
		unsafe.Sizeof(attr), 0)
	if errno != 0 {
		return fmt.Errorf("landlock: %w", errno)
	}
	rules := ruleset{fd: int(fd), handled: attr.Handled_access_fs}
	defer unix.Close(rules.fd) // only needed until it is in effect
	for _, list := range []struct {
		paths  []string
		rights uint64
	}{{append(c.Read, "/proc/self/exe"), readRights}, {devices(), deviceRights},
		{c.Write, writeRights}} {
		for _, path := range list.paths {
			if err := rules.allow(path, list.rights); err != nil && !isAbsent(err) {
				return err
			}
		}
	}
	if model != noModel {
		// Landlock has no rules for a memory file, which is not on a mounted file system.
		if err := rules.allowOpen(model, "model", unix.LANDLOCK_ACCESS_FS_READ_FILE); err != nil &&
			!errors.Is(err, unix.EBADFD) {
			return err
		}
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return fmt.Errorf("landlock: %w", errno)
	}
	return nil
}

// deviceFiles are prefixes of names in /dev: accelerators, and devices that every program expects.
var deviceFiles = []string{
	"null", "zero", "full", "random", "urandom",
	"dri", "accel", "kfd", "nvidia", "dxg", "dma_heap", "udmabuf", "ion", "kgsl", "fastrpc",
	"adsprpc", "cdsprpc", "mali", "galcore", "apex_", "hailo", "rknpu",
}

func devices() []string {
	entries, _ := os.ReadDir("/dev") // on an error there are no devices to allow
	var found []string
	for _, e := range entries {
		if slices.ContainsFunc(deviceFiles, func(name string) bool {
			return strings.HasPrefix(e.Name(), name)
		}) {
			found = append(found, "/dev/"+e.Name())
		}
	}
	return found
}

// isAbsent reports whether a path does not exist for this user, so that no rule is needed.
func isAbsent(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) ||
		errors.Is(err, unix.EACCES) || errors.Is(err, unix.ELOOP)
}

type ruleset struct {
	fd      int
	handled uint64
}

// allow permits the rights that the kernel supports, for a file or for all files below a directory.
func (r ruleset) allow(path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("landlock %q: %w", path, err)
	}
	defer unix.Close(fd) // a descriptor that only names the file
	return r.allowOpen(fd, path, rights)
}

// allowOpen is allow for the file of a descriptor. name is its name in errors.
func (r ruleset) allowOpen(fd int, name string, rights uint64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("landlock %q: %w", name, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= fileRights
	}
	attr := unix.LandlockPathBeneathAttr{Allowed_access: rights & r.handled, Parent_fd: int32(fd)}
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(r.fd),
		unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&attr)), 0, 0, 0); errno != 0 {
		return fmt.Errorf("landlock %q: %w", name, errno)
	}
	return nil
}

// trySandbox tries the accesses that the sandbox should refuse.
func (j *job) trySandbox() error {
	c := workerproto.Confined{Landlock: landlockABI(), UID: uint32(os.Getuid())}
	defer func() { j.result.Confined = &c }()
	_, err := os.ReadFile(j.req.Model)
	c.Reads = err == nil
	if f, err := os.OpenFile(j.req.Output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err == nil {
		c.Writes = true
		_ = f.Close() // no data was written
	}
	if fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
		c.Connects = true
		_ = unix.Close(fd) // it was not used
	}
	c.Memory, _ = strconv.ParseInt(readCgroup("memory.max"), 10, 64) // "max" is no bound
	// unreadable values count as missing
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch name {
		case "Seccomp":
			c.Seccomp = value == strconv.Itoa(unix.SECCOMP_MODE_FILTER)
		case "CapEff":
			held, err := strconv.ParseUint(value, 16, 64)
			c.Privileged = err != nil || held&^keptCapabilities != 0
		}
	}
	return nil
}
