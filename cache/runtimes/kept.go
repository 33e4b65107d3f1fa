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

// dirs has the directories with a runtime's files and their stamps. They are kept open because each
// hit compares the stamps. The Set calls close when it drops the runtime or finds other contents.
// The descriptors are closed when no comparison uses them any more; later comparisons, of requests
// that began before, look up each path.
type dirs struct {
	list   []stampedDir
	users  atomic.Int64 // users of the descriptors: comparisons, and the owner until it calls close
	closed atomic.Bool  // the owner has called close

	mounts   int   // descriptor of the mount table; -1: it cannot be read
	inotify  int   // inotify descriptor; -1: nothing is watched
	watchErr error // why a directory is not watched
	// eventsSeen: inotify has reported an event, so paths may resolve differently now.
	eventsSeen atomic.Bool
	asking     atomic.Int64  // calls of reports that have not returned
	changes    atomic.Uint64 // number of changes that the kernel has reported
	// value of changes at the last comparison of all stamps; 0: a stamp differed
	named    atomic.Uint64
	compared atomic.Int64 // time of the last comparison
}

// recently is how long after a comparison of all stamps a hit relies on the kernel's reports of
// changes. The kernel does not report stores through a mapping before the file is unmapped and
// closed, nor writes through an overlay above the file system. So while a program has a library
// mapped for writing, its changes may be noticed this much later. A request that arrives after that
// program has ended never gets a build for the old library. After work with the libraries, all
// stamps are compared.
const recently = time.Second

// maxWatched bounds the runtimes with an inotify instance each, of which a user has 128 by default.
const maxWatched = 16

// clock is the start of the monotonic times in compared, because the time of day may be set back.
var clock = time.Now()

// stampedDir is a directory with files of a runtime. Its own times are compared too, because the EP
// may load a library that is added beside the others.
type stampedDir struct {
	path     string // ends in a slash
	open     int
	ownStamp cas.Stamp
	watched  bool // and all its parent directories
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
	// Not an os.File, because Go's poller would consume the kernel's reports. It is -1 on an error.
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

// watchDir has inotify watch a directory and its files, which were stamped at the time at or later,
// so that a hit needs no system call for each file. Three kinds are not watched: file systems
// without reliable times, because network file systems among them report no changes; directories
// that changed just now, because two changes within one tick of the clock look like one; and links,
// which are looked up each time.
func (fs *dirs) watchDir(f *stampedDir, at time.Time) {
	_, believable := filestamp.FileSystem(f.open)
	if fs.inotify < 0 || !believable || !filestamp.LeftAlone(at, f.ownStamp) {
		return
	}
	open := "/proc/self/fd/" + strconv.Itoa(f.open) + "/"
	for i := range f.files {
		one := &f.files[i]
		// Watch first and compare the stamp then, so that no change in between is missed.
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
	real, err := filepath.EvalSymlinks(f.path) // links in the path are not watched
	f.watched = f.watched && err == nil && real == filepath.Clean(f.path)
}

func (fs *dirs) watch(path string, events uint32) bool {
	_, err := unix.InotifyAddWatch(fs.inotify, path, events|unix.IN_DONT_FOLLOW|unix.IN_MASK_ADD)
	fs.watchErr = cmp.Or(fs.watchErr, err)
	return err == nil
}

// close closes the descriptors as soon as no comparison uses them. Further calls do nothing.
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
	// Opened for reading, so no data can be lost.
	_ = unix.Close(fs.mounts)
	_ = unix.Close(fs.inotify)
	for _, f := range fs.list {
		_ = unix.Close(f.open)
	}
}

// unchanged reports whether the stamps of all files of the runtime are unchanged. If they were
// compared within that time and the kernel has reported no change since, it compares nothing. It is
// on the path of each hit, so the directories are kept open. Their own paths are looked up, because
// another directory may have replaced one.
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

// reports returns a number that differs after each change of this process's mounts or of watched
// files. The kernel reports a change to only one of several concurrent calls, and the others may
// return before that call has counted it. Therefore concurrent calls return unique numbers.
func (fs *dirs) reports() uint64 {
	fs.asking.Add(1)
	poll := [2]unix.PollFd{{Fd: int32(fs.mounts), Events: unix.POLLPRI},
		{Fd: int32(fs.inotify), Events: unix.POLLIN}}
	n, err := unix.Poll(poll[:], 0)
	if n != 0 || err != nil || fs.mounts < 0 { // an interrupted call may have consumed a report
		var events [4096]byte
		if poll[1].Revents != 0 {
			// The events are discarded, because each stamp is compared now. Further events stay
			// queued.
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
