package watch

import (
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// notified is what How says of subjects that are not polled.
const notified = "inotify"

func lstat(path string) stamp {
	var st unix.Stat_t
	if err := retry(func() error { return unix.Lstat(path, &st) }); err != nil {
		return failedStamp(err)
	}
	s := stamp{
		dev: st.Dev, ino: st.Ino, mode: modeOf(st.Mode), size: st.Size,
		mtime: st.Mtim.Nano(), ctime: st.Ctim.Nano(),
	}
	if s.isLink() {
		target, err := os.Readlink(path)
		if err != nil {
			return failedStamp(err)
		}
		s.says = target
	}
	return s
}

func retry(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

func modeOf(m uint32) fs.FileMode {
	mode := fs.FileMode(m & 0o777)
	switch m & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		mode |= fs.ModeDir
	case unix.S_IFLNK:
		mode |= fs.ModeSymlink
	default:
		mode |= fs.ModeIrregular // a device, pipe or socket: there is nothing in it to compare
	}
	return mode
}

// folderID names a folder whatever path leads to it: the kernel keeps one watch
// for all of them.
type folderID struct{ dev, ino uint64 }

func (s stamp) id(string) folderID { return folderID{s.dev, s.ino} }

// readSmall reads the beginning of a file, without waiting for it: some files in
// /proc only say something when something happens.
func readSmall(path string, most int) ([]byte, error) {
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NOCTTY, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	b := make([]byte, most)
	for n := 0; ; {
		var m int
		err := retry(func() (err error) { m, err = unix.Read(fd, b[n:]); return err })
		if err != nil {
			return nil, err
		}
		if n += m; m == 0 || n == most {
			return b[:n], nil
		}
	}
}

// kindOf asks what file system a folder lies on.
func kindOf(path string) (fsKind, error) {
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Statfs(path, &st) }); err != nil {
		return fsKind{}, err
	}
	magic := uint32(st.Type) // wider on some machines, and with its sign on others
	if name, ok := shared[magic]; ok {
		return fsKind{deaf: name + " does not tell what other machines or its server change"}, nil
	}
	if name, ok := virtual[magic]; ok {
		return fsKind{deaf: name + " does not tell of changes", timeless: true}, nil
	}
	return fsKind{}, nil
}

// shared are file systems that change behind this kernel's back.
var shared = map[uint32]string{
	0x6969:     "NFS",
	0x517b:     "SMB",
	0xff534d42: "CIFS",
	0xfe534d42: "SMB",
	0x65735546: "FUSE", // and virtiofs
	0x01021997: "9P",
	0x00c36400: "Ceph",
	0x5346414f: "AFS",
	0x6b414653: "AFS",
	0x73757245: "Coda",
	0x0bd00bd0: "Lustre",
	0x47504653: "GPFS",
	0x01161970: "GFS2",
	0x7461636f: "OCFS2",
	0x20030528: "OrangeFS",
	0x19830326: "BeeGFS",
	0x786f4256: "vboxsf",
	0xbacbacbc: "vmhgfs",
}

// virtual are file systems whose files are made when they are read.
var virtual = map[uint32]string{
	0x62656572: "sysfs",
	0x9fa0:     "proc",
	0x64626720: "debugfs",
	0x62656570: "configfs",
	0x73636673: "securityfs",
	0x63677270: "cgroup",
}
