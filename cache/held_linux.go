package cache

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// heldBytes sums what is on the disk for the views of removed builds alone, in whole blocks: files whose only names are in such
// views. Results that were never kept do not count: they go with those who wait for them.
func (c *Cache) heldBytes() (sum int64) {
	type file struct {
		names  uint64
		blocks int64
	}
	seen := make(map[fileID]*file)
	for _, d := range c.doomedViews() {
		for _, path := range d.paths() {
			var st unix.Stat_t
			if unix.Lstat(path, &st) != nil {
				continue // it has just gone
			}
			id := fileID{st.Dev, st.Ino}
			f := seen[id]
			if f == nil {
				f = &file{names: uint64(st.Nlink), blocks: st.Blocks}
				seen[id] = f
			}
			f.names--
		}
	}
	for _, f := range seen {
		if f.names == 0 {
			sum += f.blocks * 512
		}
	}
	return sum
}

// openedBy tells who has a file open, or mapped: a client that has let go of its lease may still run the model. The kernel grants a write
// lease only on a file that nobody else has; it is given back at once. It does not say who has it, and so, where the daemon reads the file
// itself, nobody can tell of others. Without own it says bySomebody of the daemon as well. The file goes by its path: a descriptor of its
// folder may be closed meanwhile by who removes the view.
func openedBy(path string, own *ownFiles) opener {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return byNobody
	}
	defer unix.Close(fd)
	for range 2 { // the daemon may be done with it between one look and the other
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK); err == nil {
			_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK) // closing gives it back too
			return byNobody
		} else if err != unix.EAGAIN {
			return byNobody // the file system grants none, and nobody can tell
		}
		if own == nil {
			return bySomebody
		}
		if own.has(fd) {
			return byDaemon
		}
	}
	return bySomebody
}

// ownFiles are the files that this process has open. They are looked up when somebody asks for the first time, and not again: a daemon may have
// thousands of descriptors, and a plan may meet as many files that are open.
type ownFiles struct {
	open map[fileID]bool // nil: not looked up yet
}

// has tells whether the process has the file of a descriptor open besides.
func (o *ownFiles) has(fd int) bool {
	if o.open == nil {
		o.look(fd)
	}
	id, ok := fileOf(fd)
	return ok && o.open[id]
}

// look lists all but those of one descriptor.
func (o *ownFiles) look(but int) {
	o.open = make(map[fileID]bool)
	folder, err := os.Open("/proc/self/fd")
	if err != nil {
		return
	}
	defer folder.Close()
	names, err := folder.Readdirnames(-1)
	if err != nil {
		return
	}
	for _, name := range names {
		if fd, err := strconv.Atoi(name); err == nil && fd != but {
			if id, ok := fileOf(fd); ok {
				o.open[id] = true
			}
		}
	}
}

func fileOf(fd int) (fileID, bool) {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return fileID{}, false
	}
	return fileID{st.Dev, st.Ino}, true
}

// fileOnDisk tells which file a path leads to, how many names it has, and what it takes on the disk in whole blocks.
func fileOnDisk(path string) (id fileID, names uint64, disk int64, ok bool) {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return fileID{}, 0, 0, false
	}
	return fileID{st.Dev, st.Ino}, uint64(st.Nlink), st.Blocks * 512, true
}
