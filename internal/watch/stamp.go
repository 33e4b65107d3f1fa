package watch

import (
	"crypto/sha256"
	"errors"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// stamp is what is compared to find changes that no event told.
type stamp struct {
	dev, ino     uint64
	mode         fs.FileMode
	size         int64
	mtime, ctime int64  // nanoseconds since 1970
	content      string // a link's target, the content where times say nothing, or the error: it cannot be looked at
	failed       bool   // says is an error
}

func lstat(path string) stamp {
	info, err := os.Lstat(path)
	if err != nil {
		return failedStamp(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	s := stamp{
		dev: st.Dev, ino: st.Ino, mode: info.Mode(), size: st.Size,
		mtime: st.Mtim.Nano(), ctime: st.Ctim.Nano(),
	}
	if s.isLink() {
		if s.content, err = os.Readlink(path); err != nil {
			return failedStamp(err)
		}
	}
	return s
}

func failedStamp(err error) stamp {
	if no, is := errors.AsType[syscall.Errno](err); is {
		err = no // the same words for the same reason, whatever the path
	}
	return stamp{content: err.Error(), failed: true}
}

func (s stamp) isLink() bool   { return !s.failed && s.mode&fs.ModeSymlink != 0 }
func (s stamp) isFolder() bool { return !s.failed && s.mode.IsDir() }

// identity is what matters of a folder that is only passed: that it is the same one.
func (s stamp) identity() stamp {
	return stamp{dev: s.dev, ino: s.ino, mode: s.mode, content: s.content, failed: s.failed}
}

// withoutTimes is the stamp of something in /sys or /proc: numbers and times there
// are made up when a process looks, and again after memory was short.
func (s stamp) withoutTimes() stamp { return stamp{mode: s.mode, content: s.content, failed: s.failed} }

// withContent adds what a small file says to its stamp.
func (s stamp) withContent(path string) stamp {
	if s.failed || !s.mode.IsRegular() {
		return s
	}
	b, err := readSmall(path)
	if err != nil {
		s.content = err.Error()
		return s
	}
	sum := sha256.Sum256(b)
	s.content = string(sum[:])
	return s
}

// smallFile is how much of a file in /sys or /proc is compared, in bytes.
const smallFile = 4096

// readSmall reads the beginning of a file, and waits for nothing, as some files in /proc would.
func readSmall(path string) ([]byte, error) {
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NOCTTY, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	b := make([]byte, smallFile)
	for n := 0; ; {
		var m int
		err := retry(func() (err error) { m, err = unix.Read(fd, b[n:]); return err })
		if err != nil {
			return nil, err
		}
		if n += m; m == 0 || n == len(b) {
			return b[:n], nil
		}
	}
}

func retry(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

// fsKind is what matters of a file system.
type fsKind struct {
	noEvents string // why watching finds nothing on it; "" where it does
	noTimes  bool   // what lies on it is compared by content
}

// kindOf asks what file system a folder lies on. The next look finds that one is gone.
func kindOf(path string) fsKind {
	var st unix.Statfs_t
	if retry(func() error { return unix.Statfs(path, &st) }) != nil {
		return fsKind{}
	}
	magic := uint32(st.Type) // wider on some machines, and with its sign on others
	if name, ok := shared[magic]; ok {
		return fsKind{noEvents: name + " does not report changes by other machines or its server"}
	}
	if name, ok := virtual[magic]; ok {
		return fsKind{noEvents: name + " does not report changes", noTimes: true}
	}
	return fsKind{}
}

// shared are file systems that change behind this kernel's back. FUSE stands for virtiofs as well.
var shared = map[uint32]string{
	0x6969: "NFS", 0x517b: "SMB", 0xff534d42: "CIFS", 0xfe534d42: "SMB", 0x65735546: "FUSE",
	0x01021997: "9P", 0x00c36400: "Ceph", 0x5346414f: "AFS", 0x6b414653: "AFS", 0x73757245: "Coda",
	0x0bd00bd0: "Lustre", 0x47504653: "GPFS", 0x01161970: "GFS2", 0x7461636f: "OCFS2",
	0x20030528: "OrangeFS", 0x19830326: "BeeGFS", 0x786f4256: "vboxsf", 0xbacbacbc: "vmhgfs",
}

// virtual are file systems that make their files when they are read.
var virtual = map[uint32]string{
	0x62656572: "sysfs", 0x9fa0: "proc", 0x64626720: "debugfs", 0x62656570: "configfs",
	0x73636673: "securityfs", 0x63677270: "cgroup",
}
