// Package filestamp reports whether files were written to while they were read, or may have been
// since.
//
// A model belongs to an application, which may write to it at any time, by descriptor or through a
// mapping. A stamp (size, times, inode) shows that if the file system has reliable times, dirty
// pages were written back, and the file had not changed for a while before.
//
// A Watched is for one goroutine. Start reading at Watch.
package filestamp

import (
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
)

// Watched are files that are being read, with their stamps from before.
type Watched struct {
	began     time.Time // before the first stamp
	files     []*os.File
	stamps    []cas.Stamp
	writeBack bool // the files are written back before each stamp
}

// Watch begins to watch files. reliable says that their file systems have reliable times. Files are
// written back only if their stamps can be trusted, because that may take as long as reading them.
// For others Unchanged only notices changes of times, and misses stores through a mapping.
func Watch(files []*os.File, began time.Time, reliable bool) (*Watched, error) {
	w := &Watched{files: files, began: began}
	var err error
	if w.stamps, err = w.stamp(); err != nil {
		return nil, err
	}
	if !reliable || !LeftAlone(w.began, w.stamps...) {
		return w, nil
	}
	w.writeBack = true
	w.stamps, err = w.stamp()
	return w, err
}

func (w *Watched) stamp() ([]cas.Stamp, error) {
	var stamps []cas.Stamp
	for _, f := range w.files {
		if w.writeBack {
			// A store through a mapping to a dirty page changes no time. Writing back
			// write-protects the pages, so that every later store faults and changes the times.
			if err := WriteBack(f); err != nil {
				return nil, err
			}
		}
		s, err := cas.StampOf(f)
		if err != nil {
			return nil, err
		}
		stamps = append(stamps, s)
	}
	return stamps, nil
}

// Unchanged returns an error if a file has changed since Watch.
func (w *Watched) Unchanged() error {
	now, err := w.stamp()
	if err != nil {
		return err
	}
	for i, f := range w.files {
		if now[i] != w.stamps[i] {
			return fmt.Errorf("%q: its size or times changed", f.Name())
		}
	}
	return nil
}

// Reliable reports whether equal stamps prove equal bytes from now on: the file systems have
// reliable times, and no file had changed for a while before the reading began. Times in the future
// are not trusted. The beginning of reading counts, and not its end, because a page that was
// dirtied between the writing back and the stamp can be changed again without a trace.
func (w *Watched) Reliable() bool { return w.writeBack && LeftAlone(w.began, w.stamps...) }

// quietTime is how long a file must have been unchanged before its times are trusted, because a
// file system's clock may tick slowly, and two changes within one tick look like one.
const quietTime = 2 * time.Second

// LeftAlone reports whether files with these stamps had been unchanged for quietTime at a time.
func LeftAlone(at time.Time, stamps ...cas.Stamp) bool {
	limit := at.Add(-quietTime).UnixNano()
	return !slices.ContainsFunc(stamps, func(s cas.Stamp) bool {
		return s.Mtime > limit || s.Ctime > limit
	})
}

// The file systems on which unchanged times mean unchanged content, when mounted writable. Images
// (erofs, squashfs) may carry equal times and inode numbers for different files; overlay, tmpfs,
// FUSE and network file systems do not guarantee it.
var reliable = map[int64]bool{
	0xef53:     true, // ext4
	0x58465342: true, // XFS
	0x9123683e: true, // btrfs
	0xf2f52010: true, // f2fs
}

// FileSystem returns the id of an open file's file system, and whether its times are reliable.
func FileSystem(fd int) ([8]byte, bool) {
	var id [8]byte
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return id, false
	}
	if !reliable[int64(st.Type)] || st.Flags&unix.ST_RDONLY != 0 {
		return id, false
	}
	binary.LittleEndian.PutUint32(id[:4], uint32(st.Fsid.Val[0]))
	binary.LittleEndian.PutUint32(id[4:], uint32(st.Fsid.Val[1]))
	return id, true
}

// WriteBack writes back dirty pages, so that later stores through a mapping change the file's
// times.
func WriteBack(f *os.File) error {
	err := unix.Fdatasync(int(f.Fd()))
	if err == unix.EINVAL || err == unix.EROFS {
		// a file system without write-back; its times are not trusted anyway
		return nil
	}
	return err
}

// ReliableTimes reports whether equal times mean equal content on file systems of a statfs kind.
func ReliableTimes(kind int64) bool { return reliable[kind] }
