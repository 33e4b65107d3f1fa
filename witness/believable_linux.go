package witness

import (
	"encoding/binary"
	"os"

	"golang.org/x/sys/unix"
)

// The file systems on which unchanged times mean unchanged content, when mounted writable. Images (erofs,
// squashfs) may carry equal times and inode numbers for different files; overlay, tmpfs, FUSE and network file
// systems make no promise that would do.
var believable = map[int64]bool{
	0xef53:     true, // ext4
	0x58465342: true, // XFS
	0x9123683e: true, // btrfs
	0xf2f52010: true, // f2fs
}

// Believable gives the file system's id, and whether its times may be believed.
func Believable(f *os.File) ([8]byte, bool) {
	var id [8]byte
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return id, false
	}
	if !believable[int64(st.Type)] || st.Flags&unix.ST_RDONLY != 0 {
		return id, false
	}
	binary.LittleEndian.PutUint32(id[:4], uint32(st.Fsid.Val[0]))
	binary.LittleEndian.PutUint32(id[4:], uint32(st.Fsid.Val[1]))
	return id, true
}

// Settle writes back what is dirty, so that later stores through a mapping move the file's times.
func Settle(f *os.File) error {
	err := unix.Fdatasync(int(f.Fd()))
	if err == unix.EINVAL || err == unix.EROFS {
		return nil // a file system that has nothing to write back; its times are not believed anyway
	}
	return err
}

// TimesHold tells whether unchanged times mean unchanged content on file systems of a kind, as statfs tells it.
func TimesHold(kind int64) bool { return believable[kind] }
