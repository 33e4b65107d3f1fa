package views

import (
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Opener says which processes have a file open.
type Opener int

// These are the openers.
const (
	ByNobody Opener = iota
	ByDaemon        // and perhaps another process
	ByOther
)

// inode distinguishes files.
type inode struct{ dev, ino uint64 }

// UnlinkedOpenBytes sums the bytes on disk, in whole blocks, of files with names only in views of
// removed builds. Results that were never kept do not count: they end with the requests that wait
// for them.
func (vs *Store) UnlinkedOpenBytes() int64 {
	var sum, changing int64
	for range maxRecounts {
		if sum, changing = vs.countUnlinkedOpen(); changing == 0 {
			break
		}
	}
	return sum + changing // rather too much, for a moment
}

// maxRecounts bounds how often the names are counted because some are removed meanwhile.
const maxRecounts = 10

// droppedFile is a file in views of removed builds.
type droppedFile struct {
	paths  []string // its names there
	links  uint64   // all of its names, when the first of these was looked at
	blocks int64
}

// countUnlinkedOpen counts the names of each file, and then checks them again: a name that was just
// removed would miss in one number only. changing are bytes of files with changed names.
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

// sameLinks reports whether a file has all the names that were counted, and no more or fewer
// others.
func (vs *Store) sameLinks(id inode, f *droppedFile) bool {
	return !slices.ContainsFunc(f.paths, func(path string) bool {
		var st unix.Stat_t
		return unix.Lstat(path, &st) != nil || inode{st.Dev, st.Ino} != id ||
			uint64(st.Nlink) != f.links
	})
}

// openedBy finds out whether a file is open or mapped: a client may run the model without a lease.
// The kernel grants a write lease, given back at once, only if no other process has the file. It
// names none, so if the daemon reads the file others are unknown. Without own the daemon is
// ByOther too. It takes a path because a removal may close the directory's descriptor.
func openedBy(path string, own *OwnFiles) Opener {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return ByNobody
	}
	defer unix.Close(fd)
	for range 2 { // the daemon may be done with it between one look and the other
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK); err == nil {
			// closing gives it back too
			_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK)
			return ByNobody
		} else if err != unix.EAGAIN {
			return ByNobody // the file system grants none, so it is unknown
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
// because a daemon may have thousands of descriptors, and a plan may meet as many open files.
type OwnFiles struct {
	open map[inode]bool // nil: not looked up yet
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

// openDir opens a directory for reading, without the runtime's poller, which directories have no
// use for.
func openDir(path string) (*os.File, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: path, Err: err}
		}
		return os.NewFile(uintptr(fd), path), nil
	}
}
