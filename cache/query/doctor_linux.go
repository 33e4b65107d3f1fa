package query

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/internal/witness"
)

var fileSystems = map[int64]string{
	0xef53: "ext4", 0x58465342: "XFS", 0x9123683e: "btrfs", 0xf2f52010: "f2fs", 0x01021994: "tmpfs", 0x858458f6: "ramfs",
	0x794c7630: "overlay", 0x6969: "NFS", 0xff534d42: "CIFS", 0xfe534d42: "SMB", 0x65735546: "FUSE", 0x01021997: "9p",
	0x00c36400: "Ceph", 0x2fc12fc1: "ZFS", 0xe0f5e1e2: "erofs", 0x73717368: "squashfs",
}

func fileSystemOf(path string) (fileSystem, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return fileSystem{}, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	kind, ok := fileSystems[int64(st.Type)]
	if !ok {
		kind = fmt.Sprintf("a file system of type %#x", st.Type)
	}
	s := fileSystem{kind: kind, free: int64(st.Bavail) * st.Bsize, size: int64(st.Blocks) * st.Bsize, freeInodes: st.Ffree, inodes: st.Files,
		readOnly: st.Flags&unix.ST_RDONLY != 0, timesHold: witness.TimesHold(int64(st.Type))}
	switch kind {
	case "NFS", "CIFS", "SMB", "9p", "Ceph":
		s.network = true
	case "tmpfs", "ramfs":
		s.volatile = true
	}
	return s, nil
}

func ownerOf(path string) (owner, error) {
	info, err := os.Stat(path)
	if err != nil {
		return owner{}, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return owner{}, errors.ErrUnsupported
	}
	return owner{uid: st.Uid, mode: info.Mode()}, nil
}

func watchLimits() string {
	return "fs.inotify.max_user_watches, which is " + sysctl("fs/inotify/max_user_watches") +
		", or max_user_instances, which is " + sysctl("fs/inotify/max_user_instances")
}

func sysctl(name string) string {
	text, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(text))
}
