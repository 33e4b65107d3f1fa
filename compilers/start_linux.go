package compilers

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/dialogue"
)

// host is what of this system's means a compiler's workers get. It is found out by trying: containers and security modules forbid more than the
// kernel tells.
type host struct {
	mu   sync.Mutex  // guards ways
	ways []isolation // that were not refused, the best first

	groups *cgroups // nil: none
}

// isolation is a way to have processes that cannot stay behind.
type isolation struct {
	namespace bool // a pid namespace, whose first process takes all others along when it ends
	user      bool // within a user namespace, in which an ordinary user may make it
}

// newHost lists the ways from the best on; those that turn out to be forbidden are dropped.
func newHost(o ORTOptions) *host {
	h := &host{ways: []isolation{{}}, groups: findCgroups(o.Log)}
	if !o.Sandbox.NoNamespaces {
		h.ways = []isolation{{namespace: true}, {namespace: true, user: true}, {}}
	}
	if o.User != nil { // in a user namespace there is only one user
		h.ways = slices.DeleteFunc(h.ways, func(i isolation) bool { return i.user })
	}
	return h
}

func (h *host) current() isolation {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ways[0]
}

func (h *host) refuse(way isolation) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ways[0] != way {
		return true // another job was told the same before
	}
	if len(h.ways) == 1 {
		return false
	}
	h.ways = h.ways[1:]
	return true
}

// forbidden tells whether an error may be about namespaces: none are left, or nobody may make them.
func forbidden(err error) bool {
	about := []error{unix.EPERM, unix.EINVAL, unix.ENOSPC, unix.ENOSYS, unix.EUSERS, unix.EACCES}
	return slices.ContainsFunc(about, func(e error) bool { return errors.Is(err, e) })
}

// start starts a worker whose descriptors are: nothing to read, one pipe for everything printed, the dialogue on 3 and 4, and on 5 its model, if
// that is an open file.
func (o *ORT) start(req dialogue.Request, folder string, idle <-chan struct{}) (*worker, error) {
	for {
		way := o.host.current()
		w, err := o.startIn(way, req, folder, idle)
		if err == nil || !forbidden(err) || !o.host.refuse(way) {
			return w, err
		}
		o.opts.Log.Debug("workers get less isolation", "wanted", way, "error", err)
	}
}

func (o *ORT) startIn(way isolation, req dialogue.Request, folder string, idle <-chan struct{}) (_ *worker, err error) {
	group := o.group(way)
	defer func() {
		if err != nil {
			group.end()
		}
	}()
	p := o.preparation(way, waits(idle))
	p.Confine, p.Cgroup, p.Model = o.confinement(req, folder), group != nil, req.ModelFile != nil
	preparation, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	requestRead, requestWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer requestRead.Close() // the worker has its own
	answerRead, answerWrite, err := os.Pipe()
	if err != nil {
		requestWrite.Close() // nothing was written
		return nil, err
	}
	defer answerWrite.Close() // likewise
	private := filepath.Join(folder, privateFolder)
	w := &worker{group: group, request: requestWrite, answers: answerRead, stderr: &Tail{Limit: max(o.opts.Limits.StderrBytes, 0)}, exited: make(chan struct{}), answered: make(chan struct{})}
	w.cmd = exec.Command(o.opts.Worker, "prepare", string(preparation))
	w.cmd.Dir = private
	w.cmd.Env = append(environment(private), o.opts.Env...)
	w.cmd.Stderr = w.stderr
	w.cmd.ExtraFiles = []*os.File{requestRead, answerWrite}
	if req.ModelFile != nil {
		w.cmd.ExtraFiles = append(w.cmd.ExtraFiles, req.ModelFile)
	}
	if group != nil {
		w.cmd.ExtraFiles = append(w.cmd.ExtraFiles, group.procs)
	}
	w.cmd.WaitDelay = grace
	w.cmd.SysProcAttr = o.attributes(way)
	if err := o.launcher.on(w.cmd.Start); err != nil {
		requestWrite.Close() // nothing was written
		answerRead.Close()
		return nil, err
	}
	return w, nil
}

func (o *ORT) attributes(way isolation) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if way.namespace {
		a.Cloneflags |= unix.CLONE_NEWPID
	} else {
		a.Pdeathsig = syscall.SIGTERM // what it looks after does not end with it
	}
	if way.user {
		uid, gid := os.Geteuid(), os.Getegid()
		a.Cloneflags |= unix.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
	}
	if u := o.opts.User; u != nil {
		a.Credential = &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
	}
	return a
}

func (o *ORT) preparation(way isolation, idle bool) dialogue.Preparation {
	l := o.opts.Limits
	p := dialogue.Preparation{Data: uint64(max(l.Memory, 0)), FileSize: uint64(max(l.Output, 0)), OpenFiles: uint64(max(l.OpenFiles, 0)),
		Stack: uint64(max(l.Stack, 0)), Nice: max(l.Nice, 0), Idle: idle, First: way.namespace}
	if l.CPU > 0 {
		p.CPU = uint64(math.Ceil(l.CPU.Seconds()))
	}
	if o.countsProcesses(way) {
		p.Processes = uint64(max(l.Processes, 0))
	}
	if idle {
		p.Nice = lowest
	}
	return p
}

// countsProcesses tells whether the kernel's count of a user's processes is one of workers alone. Since Linux 5.14 each user namespace counts for
// itself. Root's are never limited.
func (o *ORT) countsProcesses(way isolation) bool {
	if u := o.opts.User; u != nil {
		return u.UID != 0 && int(u.UID) != os.Geteuid()
	}
	return way.user && os.Geteuid() != 0 && kernelSince(5, 14)
}

// group makes a cgroup for one worker, where there are any to be had and they are of use: for limits, or to find all of its processes.
func (o *ORT) group(way isolation) *cgroup {
	c := o.host.groups
	if c == nil || way.namespace && !c.memory && !c.pids {
		return nil
	}
	g, err := c.make(o.opts.Limits)
	if err != nil {
		o.opts.Log.Debug("worker gets no cgroup", "error", err)
		return nil
	}
	return g
}

type usage struct {
	cpu         time.Duration
	outOfMemory bool // one was killed for the memory limit
}
