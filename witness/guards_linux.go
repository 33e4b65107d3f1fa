package witness

import (
	"errors"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Guards are read leases of the kernel's on models. While one stands nobody has written to the file since it was taken, neither by a
// descriptor nor through a mapping. Who wants to has to wait until it is given up, which happens at once: the kernel sends
// SIGIO, and we look now and then in case one got lost. The signal does nothing else: the Go runtime passes it to those who
// asked for it, and ignores it otherwise.
type Guards struct {
	mu  sync.Mutex
	all map[*Guard]bool // guarded by mu
	end chan struct{}   // ends the goroutine that looks after them; nil: there are none; guarded by mu
}

// lookAtGuards is how long a writer may have to wait where no signal came.
const lookAtGuards = 25 * time.Millisecond

// A Guard is the leases on the files of one request. They are on open files of the cache's own: whoever shares an open file can end its
// lease, write, and take it again. nil is a Guard on nothing, which does not stand.
type Guard struct {
	in    *Guards
	users int           // guarded by in.mu
	fds   []int         // none: it was given up; guarded by in.mu
	lost  chan struct{} // closed when it is given up for a writer
}

// Take guards all of the files. nil: one cannot be guarded, for it is open for writing, or another user's, or on a file system without leases.
func (gs *Guards) Take(files []*os.File) *Guard {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	g := &Guard{in: gs, users: 1, lost: make(chan struct{})}
	gs.add(g) // before the first lease, for the signal
	for _, f := range files {
		if !g.add(f) {
			g.giveUp()
			return nil
		}
	}
	return g
}

// add takes the lease on one file. The caller holds in.mu.
func (g *Guard) add(f *os.File) bool {
	if !CanBeGuarded(f) {
		return false
	}
	fd, err := OpenAgain(f)
	if err != nil {
		return false
	}
	g.fds = append(g.fds, fd)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_RDLCK)
	return err == nil
}

// CanBeGuarded tells whether nothing changes the file but this kernel, by what it knows to be open.
func CanBeGuarded(f *os.File) bool {
	var st unix.Statfs_t
	err := unix.Fstatfs(int(f.Fd()), &st)
	return err == nil && (believable[int64(st.Type)] || int64(st.Type) == unix.TMPFS_MAGIC)
}

// OpenAgain opens a file anew, for reading only, if we may. It does not wait for somebody else's lease.
func OpenAgain(f *os.File) (fd int, err error) {
	path := "/proc/self/fd/" + strconv.Itoa(int(f.Fd()))
	for {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return -1, &os.PathError{Op: "open again", Path: f.Name(), Err: err}
	}
	return fd, nil
}

// Share gives the guard to one user more.
func (g *Guard) Share() *Guard {
	if g == nil {
		return nil
	}
	g.in.mu.Lock()
	defer g.in.mu.Unlock()
	g.users++
	return g
}

// Release gives it up when its last user is done.
func (g *Guard) Release() {
	if g == nil {
		return
	}
	g.in.mu.Lock()
	defer g.in.mu.Unlock()
	if g.users--; g.users == 0 {
		g.giveUp()
	}
}

// Stands tells whether nobody has written since the guard was taken.
func (g *Guard) Stands() bool {
	if g == nil {
		return false
	}
	g.in.mu.Lock()
	defer g.in.mu.Unlock()
	g.look()
	return len(g.fds) > 0
}

// Lost is closed when the guard is given up for a writer; nil: there is no guard.
func (g *Guard) Lost() <-chan struct{} {
	if g == nil {
		return nil
	}
	return g.lost
}

// look gives the guard up if somebody waits to write. The caller holds in.mu.
func (g *Guard) look() {
	for _, fd := range g.fds {
		if kind, err := unix.FcntlInt(uintptr(fd), unix.F_GETLEASE, 0); err != nil || kind != unix.F_RDLCK {
			close(g.lost)
			g.giveUp()
			return
		}
	}
}

// giveUp ends the leases, once. The caller holds in.mu.
func (g *Guard) giveUp() {
	for _, fd := range g.fds {
		_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK) // the kernel may have ended it: it does not wait for ever
		_ = unix.Close(fd)                                               // opened for reading only: nothing can be lost
	}
	g.fds = nil
	g.in.remove(g)
}

// add begins to look after a guard. The caller holds mu.
func (gs *Guards) add(g *Guard) {
	if gs.all == nil {
		gs.all = make(map[*Guard]bool)
	}
	gs.all[g] = true
	if gs.end == nil {
		gs.end = make(chan struct{})
		wanted := make(chan os.Signal, 1)
		signal.Notify(wanted, unix.SIGIO)
		go gs.serve(wanted, gs.end)
	}
}

// remove ends that. The caller holds mu.
func (gs *Guards) remove(g *Guard) {
	if delete(gs.all, g); len(gs.all) == 0 && gs.end != nil {
		close(gs.end)
		gs.end = nil
	}
}

// Idle tells whether nothing is guarded, and nothing looked after.
func (gs *Guards) Idle() bool {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	return len(gs.all) == 0 && gs.end == nil
}

func (gs *Guards) serve(wanted chan os.Signal, end chan struct{}) {
	defer signal.Stop(wanted)
	tick := time.NewTicker(lookAtGuards)
	defer tick.Stop()
	for {
		select {
		case <-wanted:
		case <-tick.C:
		case <-end:
			return
		}
		gs.mu.Lock()
		for g := range gs.all {
			g.look()
		}
		gs.mu.Unlock()
	}
}
