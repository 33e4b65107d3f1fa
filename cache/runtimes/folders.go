package runtimes

import (
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/witness"
)

// folders are the directories with the files of a runtime as they were stamped, kept open because each
// hit compares them. The set of runtimes closes them when it has forgotten what is in them, or found
// something else there. The descriptors are closed when no comparison uses them, and the comparisons
// that follow, of requests that began before, look up each path.
type folders struct {
	list   []stampedFolder
	users  atomic.Int64 // of the descriptors: the owner, until it closes them, and comparisons
	closed atomic.Bool  // by the owner

	mounts  int           // descriptor of the mount table; -1: it cannot be read
	asking  atomic.Int64  // calls of mountChanges that have not returned
	changes atomic.Uint64 // of the mounts, that were counted
	named   atomic.Uint64 // mountChanges when all files were looked up by their names
}

// stampedFolder is a directory with files of a runtime. Its own times count too: a library that is added
// beside the others may be one that the EP loads.
type stampedFolder struct {
	path   string // ends in a slash
	open   int
	own    cas.Stamp
	names  []string
	stamps []cas.Stamp
	kept   []int // descriptors of the files; -1 for one that is not kept
}

// openFolders groups the files by their directory.
func openFolders(files []stampedFile) (*folders, error) {
	at, began := make(map[string]int), time.Now()
	fs := &folders{}
	// no os.File, because Go's poller would take the kernel's reports; an error makes it -1
	fs.mounts, _ = unix.Open("/proc/self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	fs.users.Store(1)
	fs.changes.Store(1)
	for _, f := range files {
		dir, name := filepath.Split(f.path)
		i, ok := at[dir]
		if !ok {
			open, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			if err != nil {
				fs.close()
				return nil, err
			}
			i = len(fs.list)
			at[dir] = i
			fs.list = append(fs.list, stampedFolder{path: dir, open: open})
			if fs.list[i].own, err = cas.StampFD(open); err != nil {
				fs.close()
				return nil, err
			}
		}
		folder := &fs.list[i]
		folder.names = append(folder.names, name)
		folder.stamps = append(folder.stamps, f.stamp)
		folder.kept = append(folder.kept, -1)
	}
	for i := range fs.list {
		fs.list[i].keep(began)
	}
	return fs, nil
}

// keep opens the files of a folder that was stamped at that time or later, because to look up their names
// takes half of the daemon's work for a hit. No others can be under the names unnoticed: that moves the
// folder's times, which are compared at each hit. They count on some file systems, and if the folder had
// been left alone, because two changes within one tick look like one. Mounts are reported by the kernel.
// Links are looked up. A replaced file's space is freed with the folder's descriptors.
func (f *stampedFolder) keep(at time.Time) {
	if _, believable := witness.Believable(f.open); !believable || !witness.LeftAlone(at, f.own) {
		return
	}
	for i, name := range f.names {
		fd, _ := unix.Openat(f.open, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0) // or -1
		if s, err := cas.StampFD(fd); err == nil && s == f.stamps[i] {
			f.kept[i] = fd
		} else {
			_ = unix.Close(fd) // a link, or another file by now
		}
	}
}

// close has the descriptors closed as soon as no comparison uses them. The owner may call it again.
func (fs *folders) close() {
	if !fs.closed.Swap(true) {
		fs.release()
	}
}

func (fs *folders) retain() bool {
	for {
		users := fs.users.Load()
		if users == 0 || fs.users.CompareAndSwap(users, users+1) {
			return users > 0
		}
	}
}

func (fs *folders) release() {
	if fs.users.Add(-1) > 0 {
		return
	}
	// They were only looked at.
	_ = unix.Close(fs.mounts)
	for _, f := range fs.list {
		for _, fd := range append(f.kept, f.open) {
			_ = unix.Close(fd)
		}
	}
}

// unchanged compares the stamp of every file of the runtime. It is on the path of each hit, so files are kept open, or
// looked up in folders that are; the folders themselves by path, because one may have been put in another's place.
func (fs *folders) unchanged() bool {
	open, byName, changes := fs.retain(), true, uint64(0)
	if open {
		defer fs.release()
		changes = fs.mountChanges()
		byName = changes != fs.named.Load()
	}
	for i := range fs.list {
		if !fs.list[i].unchanged(open, byName) {
			return false
		}
	}
	fs.named.Store(changes)
	return true
}

func (f *stampedFolder) unchanged(open, byName bool) bool {
	now, err := cas.StampPath(f.path)
	if err != nil || now != f.own {
		return false
	}
	for i, name := range f.names {
		switch {
		case !open:
			now, err = cas.StampPath(f.path + name)
		case byName || f.kept[i] < 0:
			now, err = cas.StampThrough(f.open, name)
		default:
			now, err = cas.StampFD(f.kept[i])
		}
		if err != nil || now != f.stamps[i] {
			return false
		}
	}
	return true
}

// mountChanges returns another number after each change of the mounts that this process sees. The kernel
// reports a change to one of the calls, which may not have counted it yet when another call looks. So a
// call that is not alone returns a number of its own.
func (fs *folders) mountChanges() uint64 {
	fs.asking.Add(1)
	poll := [1]unix.PollFd{{Fd: int32(fs.mounts), Events: unix.POLLPRI}}
	n, err := unix.Poll(poll[:], 0)
	if n != 0 || err != nil || fs.mounts < 0 { // an interrupted call may have taken a report
		fs.changes.Add(1)
	}
	if fs.asking.Add(-1) > 0 {
		return fs.changes.Add(1)
	}
	return fs.changes.Load()
}
