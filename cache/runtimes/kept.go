package runtimes

import (
	"errors"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/filestamp"
)

// folders are the directories with the files of a runtime as they were stamped, kept open because each
// hit compares them. The set of runtimes closes them when it has forgotten what is in them, or found
// something else there. The descriptors are closed when no comparison uses them, and the comparisons
// that follow, of requests that began before, look up each path.
type folders struct {
	list   []stampedFolder
	users  atomic.Int64 // of the descriptors: the owner, until it closes them, and comparisons
	closed atomic.Bool  // by the owner

	mounts     int           // descriptor of the mount table; -1: it cannot be read
	inotify    int           // inotify descriptor for the kept files; -1: there is none
	inotifyErr error         // why not
	asking     atomic.Int64  // calls of reports that have not returned
	changes    atomic.Uint64 // of mounts and kept files, that were counted
	named      atomic.Uint64 // reports when all files were as stamped under their names; 0: not since
	compared   atomic.Int64  // when all files' stamps were compared last, after clock
}

// recently is how long a hit believes that the kernel reports each change of a kept file. The kernel
// does not report stores through a mapping before the file is unmapped and closed, nor writes through
// an overlay above the file system. So a library that a program has mapped for writing may pass for
// the earlier one for so long, as if it were written a moment later. A request that comes after the
// program has ended never gets a build for the earlier one. Without inotify each request compares
// all stamps, as all work with the libraries does when it has ended.
const recently = time.Second

// clock is what compared counts from, because the time of day may be set back.
var clock = time.Now()

// inotifyInstances bounds the inotify instances of this process, because its user has 128 by default.
var inotifyInstances = make(chan struct{}, 16)

var errNoInstance = errors.New("libraries of other runtimes use all inotify instances of the daemon")

// stampedFolder is a directory with files of a runtime. Its own times count too: a library that is added
// beside the others may be one that the EP loads.
type stampedFolder struct {
	path     string // ends in a slash
	open     int
	ownStamp cas.Stamp
	names    []string
	stamps   []cas.Stamp
	openFDs  []int // descriptors of the files; -1 for one that is not kept
}

// openFolders groups the files by their directory.
func openFolders(files []stampedFile) (*folders, error) {
	at, began := make(map[string]int), time.Now()
	fs := &folders{}
	// no os.File, because Go's poller would take the kernel's reports; an error makes it -1
	fs.mounts, _ = unix.Open("/proc/self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	fs.users.Store(1)
	fs.changes.Store(1)
	fs.openInotify()
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
			if fs.list[i].ownStamp, err = cas.StampFD(open); err != nil {
				fs.close()
				return nil, err
			}
		}
		folder := &fs.list[i]
		folder.names = append(folder.names, name)
		folder.stamps = append(folder.stamps, f.stamp)
		folder.openFDs = append(folder.openFDs, -1)
	}
	for i := range fs.list {
		fs.openFiles(&fs.list[i], began)
	}
	return fs, nil
}

// openInotify has the kernel report changes of kept files, so that a hit needs no system call for each.
func (fs *folders) openInotify() {
	fs.inotify, fs.inotifyErr = -1, errNoInstance
	select {
	case inotifyInstances <- struct{}{}:
		fs.inotify, fs.inotifyErr = unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if fs.inotifyErr != nil {
			<-inotifyInstances
		}
	default:
	}
}

func (fs *folders) closeInotify() {
	if fs.inotify >= 0 {
		_ = unix.Close(fs.inotify) // it was only read
		fs.inotify = -1
		<-inotifyInstances
	}
}

// openFiles opens the files of a folder that was stamped at that time or later, because to look up
// their names takes half of the daemon's work for a hit. No others can be under the names
// unnoticed: that moves the folder's times, which are compared at each hit. They count on some file
// systems, and if the folder had been left alone, because two changes within one tick look like
// one. Mounts are reported by the kernel. Links are looked up. A replaced file's space is freed
// with the folder's descriptors.
func (fs *folders) openFiles(f *stampedFolder, at time.Time) {
	_, believable := filestamp.FileSystem(f.open)
	if !believable || !filestamp.LeftAlone(at, f.ownStamp) {
		return
	}
	for i, name := range f.names {
		fd, _ := unix.Openat(f.open, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0) // or -1
		if fs.inotify >= 0 && fd >= 0 {
			// Before the stamp is compared, because no change may be in between.
			const heard = unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_CLOSE_WRITE
			path := "/proc/self/fd/" + strconv.Itoa(fd)
			_, fs.inotifyErr = unix.InotifyAddWatch(fs.inotify, path, heard)
			if fs.inotifyErr != nil {
				fs.closeInotify()
			}
		}
		if s, err := cas.StampFD(fd); err == nil && s == f.stamps[i] {
			f.openFDs[i] = fd
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
	fs.closeInotify()
	_ = unix.Close(fs.mounts)
	for _, f := range fs.list {
		for _, fd := range append(f.openFDs, f.open) {
			_ = unix.Close(fd)
		}
	}
}

// look says how files are compared with their stamps.
type look int

const (
	byPath   look = iota // the descriptors are closed
	byName               // in the folder that is open
	byFile               // that is kept
	byReport             // the kernel has reported no change of the kept ones
)

// unchanged compares the stamp of every file of the runtime. Where they were compared within that
// time, it believes the kernel, which has reported no change since then. It is on the path of each
// hit, so files are kept open, or looked up in folders that are. The folders are looked up by path,
// because one may have been put in another's place.
func (fs *folders) unchanged(within time.Duration) bool {
	how, began, reports := byPath, time.Since(clock), uint64(0)
	if fs.retain() {
		defer fs.release()
		reports = fs.reports()
		switch {
		case reports != fs.named.Load():
			how = byName
		case fs.inotify < 0 || began-time.Duration(fs.compared.Load()) >= within:
			how = byFile
		default:
			how = byReport
		}
	}
	for i := range fs.list {
		if !fs.list[i].unchanged(how) {
			fs.named.Store(0)
			return false
		}
	}
	if how != byReport {
		fs.named.Store(reports)
		fs.compared.Store(int64(began))
	}
	return true
}

func (f *stampedFolder) unchanged(how look) bool {
	now, err := cas.StampPath(f.path)
	if err != nil || now != f.ownStamp {
		return false
	}
	for i, name := range f.names {
		switch {
		case how == byPath:
			now, err = cas.StampPath(f.path + name)
		case how == byName || f.openFDs[i] < 0:
			now, err = cas.StampThrough(f.open, name)
		case how == byFile:
			now, err = cas.StampFD(f.openFDs[i])
		default:
			continue
		}
		if err != nil || now != f.stamps[i] {
			return false
		}
	}
	return true
}

// reports returns another number after each change of the mounts that this process sees, and of kept
// files. The kernel reports a change to one of the calls, which may not have counted it yet when
// another call looks. So a call that is not alone returns a number of its own.
func (fs *folders) reports() uint64 {
	fs.asking.Add(1)
	poll := [2]unix.PollFd{{Fd: int32(fs.mounts), Events: unix.POLLPRI},
		{Fd: int32(fs.inotify), Events: unix.POLLIN}}
	n, err := unix.Poll(poll[:], 0)
	if n != 0 || err != nil || fs.mounts < 0 { // an interrupted call may have taken a report
		var events [4096]byte
		if poll[1].Revents != 0 {
			// The events are not looked at, because each file is compared now. Others stay queued.
			_, _ = unix.Read(fs.inotify, events[:])
		}
		fs.changes.Add(1)
	}
	if fs.asking.Add(-1) > 0 {
		return fs.changes.Add(1)
	}
	return fs.changes.Load()
}
