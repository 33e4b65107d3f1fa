package views

import (
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Opener classifies the processes that have a file open.
type Opener int

const (
	ByNobody Opener = iota
	ByDaemon        // perhaps other processes too
	ByOther
)

// inode identifies a file.
type inode struct{ dev, ino uint64 }

// UnlinkedOpenBytes sums the disk bytes, in whole blocks, of files that have links only in views of
// removed builds. It omits builds that were never stored, because they end with the requests that
// wait for them.
func (vs *Store) UnlinkedOpenBytes() int64 {
	var sum, changing int64
	for range maxRecounts {
		if sum, changing = vs.countUnlinkedOpen(); changing == 0 {
			break
		}
	}
	return sum + changing // may be too much for a moment
}

// maxRecounts bounds the retries of counting links while some are being removed.
const maxRecounts = 10

// droppedFile is a file in views of removed builds.
type droppedFile struct {
	paths  []string // its links in these views
	links  uint64   // link count at the first of these
	blocks int64
}

// countUnlinkedOpen counts the links of each file in dropped views, and then checks them again,
// because links may be removed in between. changing are the bytes of files whose links changed.
func (vs *Store) countUnlinkedOpen() (sum, changing int64) {
	found := make(map[inode]*droppedFile)
	for _, d := range vs.droppedViews() {
		for _, path := range d.paths() {
			var st unix.Stat_t
			if unix.Lstat(path, &st) != nil {
				continue // it was just removed
			}
			id := inode{st.Dev, st.Ino}
			if found[id] == nil {
				found[id] = &droppedFile{links: uint64(st.Nlink), blocks: st.Blocks}
			}
			found[id].paths = append(found[id].paths, path)
		}
	}
	for id, f := range found {
		switch {
		case !vs.sameLinks(id, f):
			changing += f.blocks * 512
		case f.links == uint64(len(f.paths)):
			sum += f.blocks * 512
		}
	}
	return sum, changing
}

// sameLinks reports whether a file still has exactly the links that were counted.
func (vs *Store) sameLinks(id inode, f *droppedFile) bool {
	return !slices.ContainsFunc(f.paths, func(path string) bool {
		var st unix.Stat_t
		return unix.Lstat(path, &st) != nil || inode{st.Dev, st.Ino} != id ||
			uint64(st.Nlink) != f.links
	})
}

// openedBy finds out whether a file is open or mapped, because a client may use the model without a
// lease. It tries to take a write lease, which the kernel grants only if no descriptor of the file
// is open. The kernel does not say which process has it, so while the daemon reads the file, other
// processes are unknown. Without own the daemon counts as ByOther. It takes a path because a
// removal may close the directory's descriptor.
func openedBy(path string, own *OwnFiles) Opener {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return ByNobody
	}
	defer unix.Close(fd)
	for range 2 { // again, because the daemon may have closed it between the two checks
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK); err == nil {
			// closing the file releases it too
			_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK)
			return ByNobody
		} else if err != unix.EAGAIN {
			return ByNobody // the file system has no leases, so it is unknown
		}
		if own == nil {
			return ByOther
		}
		if own.has(fd) {
			return ByDaemon
		}
	}
	return ByOther
}

// OwnFiles are the files that this process has open. They are listed once, when first needed,
// because the daemon may have thousands of descriptors, and a plan may check as many files.
type OwnFiles struct {
	open map[inode]bool // nil: not listed yet
}

// has reports whether another descriptor of the process has the same file open.
func (o *OwnFiles) has(fd int) bool {
	if o.open == nil {
		o.list(fd)
	}
	id, ok := fileOf(fd)
	return ok && o.open[id]
}

// list lists all but those of one descriptor.
func (o *OwnFiles) list(except int) {
	o.open = make(map[inode]bool)
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return
	}
	for _, name := range names {
		if fd, err := strconv.Atoi(name); err == nil && fd != except {
			if id, ok := fileOf(fd); ok {
				o.open[id] = true
			}
		}
	}
}

func fileOf(fd int) (inode, bool) {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return inode{}, false
	}
	return inode{st.Dev, st.Ino}, true
}

// openDir opens a directory for reading, without Go's poller, because directories do not support
// it. It follows no link at the end of the path.
func openDir(path string) (*os.File, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC,
			0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: path, Err: err}
		}
		return os.NewFile(uintptr(fd), path), nil
	}
}
