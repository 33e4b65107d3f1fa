package views

import (
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Opener is who has a file open.
type Opener int

// Who may have it open.
const (
	ByNobody Opener = iota
	ByDaemon        // and perhaps somebody else
	BySomebody
)

// inode tells files apart.
type inode struct{ dev, ino uint64 }

// HeldBytes sums what is on the disk for the views of removed builds alone, in whole blocks: files whose only names are in such
// views. Results that were never kept do not count: they go with those who wait for them.
func (vs *Store) HeldBytes() int64 {
	var sum, changing int64
	for range looks {
		if sum, changing = vs.heldBytes(); changing == 0 {
			break
		}
	}
	return sum + changing // rather too much, for a moment
}

// looks bounds how often the names are counted where some go meanwhile.
const looks = 10

// heldFile is a file in views of removed builds.
type heldFile struct {
	paths  []string // its names there
	links  uint64   // all of its names, when the first of these was looked at
	blocks int64
}

// heldBytes counts the names of each file, and looks whether all was the same when the last one had been counted: one that goes in between, with another
// view, would be missing from the one number and not from the other. changing are bytes of files of which that cannot be said.
func (vs *Store) heldBytes() (sum, changing int64) {
	found := make(map[inode]*heldFile)
	for _, d := range vs.doomedViews() {
		for _, path := range d.paths() {
			var st unix.Stat_t
			if unix.Lstat(path, &st) != nil {
				continue // it has just gone
			}
			id := inode{st.Dev, st.Ino}
			if found[id] == nil {
				found[id] = &heldFile{links: uint64(st.Nlink), blocks: st.Blocks}
			}
			found[id].paths = append(found[id].paths, path)
		}
	}
	for id, f := range found {
		switch {
		case !vs.still(id, f):
			changing += f.blocks * 512
		case f.links == uint64(len(f.paths)):
			sum += f.blocks * 512
		}
	}
	return sum, changing
}

// still tells whether a file has all the names that were counted, and as many besides as it had.
func (vs *Store) still(id inode, f *heldFile) bool {
	return !slices.ContainsFunc(f.paths, func(path string) bool {
		var st unix.Stat_t
		return unix.Lstat(path, &st) != nil || inode{st.Dev, st.Ino} != id || uint64(st.Nlink) != f.links
	})
}

// openedBy tells who has a file open, or mapped: a client that has let go of its lease may still run the model. The kernel grants a write
// lease only on a file that nobody else has; it is given back at once. It does not say who has it, and so, where the daemon reads the file
// itself, nobody can tell of others. Without own it says bySomebody of the daemon as well. The file goes by its path: a descriptor of its
// folder may be closed meanwhile by who removes the view.
func openedBy(path string, own *OwnFiles) Opener {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return ByNobody
	}
	defer unix.Close(fd)
	for range 2 { // the daemon may be done with it between one look and the other
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK); err == nil {
			_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK) // closing gives it back too
			return ByNobody
		} else if err != unix.EAGAIN {
			return ByNobody // the file system grants none, and nobody can tell
		}
		if own == nil {
			return BySomebody
		}
		if own.has(fd) {
			return ByDaemon
		}
	}
	return BySomebody
}

// OwnFiles are the files that this process has open. They are looked up when somebody asks for the first time, and not again: a daemon may have
// thousands of descriptors, and a plan may meet as many files that are open.
type OwnFiles struct {
	open map[inode]bool // nil: not looked up yet
}

// has tells whether the process has the file of a descriptor open besides.
func (o *OwnFiles) has(fd int) bool {
	if o.open == nil {
		o.look(fd)
	}
	id, ok := fileOf(fd)
	return ok && o.open[id]
}

// look lists all but those of one descriptor.
func (o *OwnFiles) look(but int) {
	o.open = make(map[inode]bool)
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

func fileOf(fd int) (inode, bool) {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return inode{}, false
	}
	return inode{st.Dev, st.Ino}, true
}

// openFolder opens a folder for reading, without the runtime's poller, which folders have no use for.
func openFolder(path string) (*os.File, error) {
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
