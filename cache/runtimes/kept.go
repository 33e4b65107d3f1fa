package runtimes

import (
	"cmp"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/filestamp"
)

// directories are the directories with the files of a runtime as they were stamped, kept open
// because each hit compares them. The set of runtimes closes them when it has forgotten what is in
// them, or found something else there. The descriptors are closed when no comparison uses them, and
// the comparisons that follow, of requests that began before, look up each path.
type dirs struct {
	list   []stampedDir
	users  atomic.Int64 // of the descriptors: the owner, until it closes them, and comparisons
	closed atomic.Bool  // by the owner

	mounts   int   // descriptor of the mount table; -1: it cannot be read
	inotify  int   // reports changes of what is watched; -1: nothing is
	watchErr error // why something is not watched
	// from inotify: a path may have come to lead to the directory in another way
	eventsSeen atomic.Bool
	asking     atomic.Int64  // calls of reports that have not returned
	changes    atomic.Uint64 // that the kernel reported
	named      atomic.Uint64 // reports when all stamps were compared; 0: one was not equal
	compared   atomic.Int64  // when that was, after clock
}

// recently is how long a hit believes that the kernel reports each change of what is watched. The
// kernel does not report stores through a mapping before the file is unmapped and closed, nor
// writes through an overlay above the file system. So a library that a program has mapped for
// writing may pass for the earlier one for so long, as if it were written a moment later. A request
// that comes after the program has ended never gets a build for the earlier one. Work with the
// libraries that has ended compares all stamps.
const recently = time.Second

// maxWatched bounds the runtimes with an inotify instance each, of which a user has 128 by default.
const maxWatched = 16

// clock is what compared counts from, because the time of day may be set back.
var clock = time.Now()

// stampedDir is a directory with files of a runtime. Its own times count too: a library that is
// added beside the others may be one that the EP loads.
type stampedDir struct {
	path     string // ends in a slash
	open     int
	ownStamp cas.Stamp
	watched  bool // with all directories above
	files    []dirFile
}

type dirFile struct {
	name    string
	stamp   cas.Stamp
	watched bool
}

// openDirs groups the files by their directory. The kernel reports changes of them if watch is set.
func openDirs(files []stampedFile, watch bool) (*dirs, error) {
	at, began := make(map[string]int), time.Now()
	fs := &dirs{inotify: -1}
	// no os.File, because Go's poller would take the kernel's reports; an error makes it -1
	fs.mounts, _ = unix.Open("/proc/self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if watch {
		fs.inotify, fs.watchErr = unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	}
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
			fs.list = append(fs.list, stampedDir{path: dir, open: open})
			if fs.list[i].ownStamp, err = cas.StampFD(open); err != nil {
				fs.close()
				return nil, err
			}
		}
		fs.list[i].files = append(fs.list[i].files, dirFile{name: name, stamp: f.stamp})
	}
	for i := range fs.list {
		fs.watchDir(&fs.list[i], began)
	}
	return fs, nil
}

// watchDir has the kernel report changes of a directory that was stamped at that time or later, and
// of its files, so that a hit needs no system call for each. File systems without believable times
// are not watched, because network file systems among them report nothing. Nor is a directory that
// was not left alone, because two changes within one tick look like one. Links are looked up.
func (fs *dirs) watchDir(f *stampedDir, at time.Time) {
	_, believable := filestamp.FileSystem(f.open)
	if fs.inotify < 0 || !believable || !filestamp.LeftAlone(at, f.ownStamp) {
		return
	}
	open := "/proc/self/fd/" + strconv.Itoa(f.open) + "/"
	for i := range f.files {
		one := &f.files[i]
		// Before the stamp is compared, because no change may be in between.
		if fs.watch(open+one.name, unix.IN_MODIFY|unix.IN_ATTRIB|unix.IN_CLOSE_WRITE) {
			s, err := cas.StampAt(f.open, one.name)
			one.watched = err == nil && s == one.stamp && s.Dev == f.ownStamp.Dev
		}
	}
	f.watched = fs.watch(open+".", unix.IN_CREATE|unix.IN_DELETE|unix.IN_MOVE|unix.IN_ATTRIB)
	for dir := filepath.Clean(f.path); f.watched; dir = filepath.Dir(dir) {
		if f.watched = fs.watch(dir, unix.IN_MOVE_SELF); dir == "/" {
			break
		}
	}
	real, err := filepath.EvalSymlinks(f.path) // a link on the way is not watched
	f.watched = f.watched && err == nil && real == filepath.Clean(f.path)
}

func (fs *dirs) watch(path string, events uint32) bool {
	_, err := unix.InotifyAddWatch(fs.inotify, path, events|unix.IN_DONT_FOLLOW|unix.IN_MASK_ADD)
	fs.watchErr = cmp.Or(fs.watchErr, err)
	return err == nil
}

// close has the descriptors closed as soon as no comparison uses them. The owner may call it again.
func (fs *dirs) close() {
	if !fs.closed.Swap(true) {
		fs.release()
	}
}

func (fs *dirs) retain() bool {
	for {
		users := fs.users.Load()
		if users == 0 || fs.users.CompareAndSwap(users, users+1) {
			return users > 0
		}
	}
}

func (fs *dirs) release() {
	if fs.users.Add(-1) > 0 {
		return
	}
	// They were only looked at.
	_ = unix.Close(fs.mounts)
	_ = unix.Close(fs.inotify)
	for _, f := range fs.list {
		_ = unix.Close(f.open)
	}
}

// unchanged compares the stamp of every file of the runtime. Where they were compared within that
// time, it believes the kernel, which has reported no change since then. It is on the path of each
// hit, so directories are kept open. They are looked up by path themselves, because one may have
// been put in another's place.
func (fs *dirs) unchanged(within time.Duration) bool {
	open, quick, began, reports := fs.retain(), false, time.Since(clock), uint64(0)
	if open {
		defer fs.release()
		reports = fs.reports()
		quick = reports == fs.named.Load() && began-time.Duration(fs.compared.Load()) < within
	}
	for i := range fs.list {
		if !fs.dirUnchanged(&fs.list[i], open, quick) {
			fs.named.Store(0)
			return false
		}
	}
	if !quick {
		fs.named.Store(reports)
		fs.compared.Store(int64(began))
	}
	return true
}

func (fs *dirs) dirUnchanged(f *stampedDir, open, quick bool) bool {
	if !quick || !f.watched || fs.eventsSeen.Load() {
		if now, err := cas.StampPath(f.path); err != nil || now != f.ownStamp {
			return false
		}
	}
	for i := range f.files {
		one := &f.files[i]
		if quick && one.watched {
			continue
		}
		now, err := cas.Stamp{}, error(nil)
		if open {
			now, err = cas.StampThrough(f.open, one.name)
		} else {
			now, err = cas.StampPath(f.path + one.name)
		}
		if err != nil || now != one.stamp {
			return false
		}
	}
	return true
}

// reports returns another number after each change of the mounts that this process sees, and of
// what is watched. The kernel reports a change to one of the calls, which may not have counted it
// yet when another call looks. So a call that is not alone returns a number of its own.
func (fs *dirs) reports() uint64 {
	fs.asking.Add(1)
	poll := [2]unix.PollFd{{Fd: int32(fs.mounts), Events: unix.POLLPRI},
		{Fd: int32(fs.inotify), Events: unix.POLLIN}}
	n, err := unix.Poll(poll[:], 0)
	if n != 0 || err != nil || fs.mounts < 0 { // an interrupted call may have taken a report
		var events [4096]byte
		if poll[1].Revents != 0 {
			// The events are not looked at, because each stamp is compared now. Others stay queued.
			_, _ = unix.Read(fs.inotify, events[:])
			fs.eventsSeen.Store(true)
		}
		fs.changes.Add(1)
	}
	if fs.asking.Add(-1) > 0 {
		return fs.changes.Add(1)
	}
	return fs.changes.Load()
}
