package compilers

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/workerproto"
)

// host has the ways to isolate workers on this machine. They are found by trying, because
// containers may forbid what the kernel supports.
type host struct {
	mu         sync.Mutex  // guards ways
	isolations []isolation // those that did not fail, the best first
}

type isolation struct {
	namespace bool // in a pid namespace, so that all its processes end with the first
	user      bool // within a user namespace, which lets an ordinary user make one
}

// newHost lists all ways, the best first. Those that fail are dropped later.
func newHost(o ORTOptions) *host {
	h := &host{isolations: []isolation{{}}}
	if !o.Sandbox.NoNamespaces {
		h.isolations = []isolation{{namespace: true}, {namespace: true, user: true}, {}}
	}
	if o.Socket != "" { // systemd ends the processes that an instance leaves
		h.isolations = []isolation{{}}
	}
	if o.User != nil { // a user namespace has only one user
		h.isolations = slices.DeleteFunc(h.isolations, func(i isolation) bool { return i.user })
	}
	return h
}

func (h *host) current() isolation {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.isolations[0]
}

func (h *host) drop(iso isolation) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.isolations[0] != iso {
		return true // another job dropped it before
	}
	if len(h.isolations) == 1 {
		return false
	}
	h.isolations = h.isolations[1:]
	return true
}

// isNamespaceError reports whether namespaces may be the cause: none are left, or not allowed.
func isNamespaceError(err error) bool {
	about := []error{unix.EPERM, unix.EINVAL, unix.ENOSPC, unix.ENOSYS, unix.EUSERS, unix.EACCES}
	return slices.ContainsFunc(about, func(e error) bool { return errors.Is(err, e) })
}

// start starts a worker with these descriptors: an empty standard input, one pipe for all output,
// the dialogue on 3 and 4, and on 5 its model, if that is an open file.
func (o *ORT) start(req workerproto.Request, dir string, idle <-chan struct{}) (*worker, error) {
	for {
		way := o.host.current()
		w, err := o.startIn(way, req, dir, idle)
		if err == nil || !isNamespaceError(err) || !o.host.drop(way) {
			return w, err
		}
		o.opts.Log.Debug("workers get less isolation", "wanted", way, "error", err)
	}
}

func (o *ORT) startIn(iso isolation, req workerproto.Request, dir string,
	idle <-chan struct{}) (*worker, error) {
	p := o.preparation(iso, isWaiting(idle))
	p.Confine, p.Model = o.confinement(req, dir), req.ModelFile != nil
	for _, ep := range req.EPs {
		p.Libraries = append(p.Libraries, ep.Library)
	}
	preparation, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	requestRead, requestWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer requestRead.Close() // the worker has a duplicate
	answerRead, answerWrite, err := os.Pipe()
	if err != nil {
		requestWrite.Close() // no request was written
		return nil, err
	}
	defer answerWrite.Close() // as above
	stderrRead, stderrWrite, err := os.Pipe()
	if err != nil {
		requestWrite.Close() // no request was written
		answerRead.Close()
		return nil, err
	}
	defer stderrWrite.Close() // the worker has a duplicate
	w := &worker{request: requestWrite, answers: answerRead, printed: stderrRead,
		stderr: &Tail{Limit: max(o.opts.Limits.StderrBytes, 0)}, exited: make(chan struct{}),
		answered: make(chan struct{})}
	files := []*os.File{stderrWrite, requestRead, answerWrite}
	if req.ModelFile != nil {
		files = append(files, req.ModelFile)
	}
	private := filepath.Join(dir, privateDir)
	launch := workerproto.Launch{Dir: private, Env: append(environment(private), o.opts.Env...),
		Prepare: string(preparation)}
	if o.opts.Socket != "" {
		w.process, err = o.startUnit(launch, files)
	} else {
		w.process, err = o.startChild(launch, files, iso)
	}
	if err != nil {
		requestWrite.Close() // no request was written
		answerRead.Close()
		stderrRead.Close()
		return nil, err
	}
	return w, nil
}

// child is a worker that is a child of this process.
type child struct {
	cmd   *exec.Cmd
	kills int64 // MemoryKills before it was started
}

func (o *ORT) startChild(l workerproto.Launch, files []*os.File, iso isolation) (*child, error) {
	cmd := exec.Command(o.opts.Worker, "prepare", l.Prepare)
	cmd.Dir, cmd.Env = l.Dir, l.Env
	cmd.SysProcAttr = o.attributes(iso)
	own, err := duplicates(files) // the start may continue after the caller has closed its files
	if err != nil {
		return nil, err
	}
	cmd.Stderr, cmd.ExtraFiles = own[0], own[1:]
	c := &child{cmd, MemoryKills()}
	started, timeout := make(chan error, 1), time.NewTimer(o.startTimeout)
	defer timeout.Stop()
	select {
	case o.launcher.calls <- func() { started <- cmd.Start(); closeAll(own) }:
	case <-timeout.C:
		closeAll(own)
		return nil, errStartBlocked
	}
	select {
	case err := <-started:
		return c, err
	case <-timeout.C:
	}
	go func() {
		if <-started == nil {
			c.kill()
			c.reap()
		}
	}()
	return nil, errStartBlocked
}

// errStartBlocked is returned while the kernel keeps a new process from running its program. The
// new process first closes the daemon's descriptors, which blocks while a FUSE server does not
// answer.
var errStartBlocked = errors.New("the kernel starts no process: a client's file may be on a FUSE " +
	"file system that does not answer")

// duplicates returns descriptors of the same open files, which the caller closes.
func duplicates(files []*os.File) (own []*os.File, err error) {
	for _, f := range files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			closeAll(own)
			return nil, err
		}
		own = append(own, os.NewFile(uintptr(fd), f.Name()))
	}
	return own, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // the worker has a duplicate
	}
}

func (c *child) wait() {
	for {
		// WNOWAIT leaves the process a zombie, so that its pid, and with it its group's, is not
		// reused before the group is killed.
		err := unix.Waitid(unix.P_PID, c.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

func (c *child) raise(nice int) { raise(c.cmd.Process.Pid, nice) }

// stop signals the process that supervises the worker, which ends the worker and all its
// descendants, also those that left the group. The pid is valid, because the process has not been
// reaped.
func (c *child) stop() { _ = syscall.Kill(c.cmd.Process.Pid, syscall.SIGTERM) }

// ESRCH: no process is left
func (c *child) kill() { _ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL) }

func (c *child) reap() workerproto.ExitReport {
	_ = c.cmd.Wait() // ProcessState has the result
	awaitGroup(c.cmd.Process.Pid)
	state := c.cmd.ProcessState
	ended := workerproto.ExitReport{Status: state.ExitCode(),
		CPU: state.UserTime() + state.SystemTime()}
	if own, _ := state.Sys().(syscall.WaitStatus); own.Signaled() {
		ended.Status = workerproto.ExitSignal + int(own.Signal())
	}
	ended.OutOfMemory = ended.Status == workerproto.ExitSignal+int(syscall.SIGKILL) &&
		MemoryKills() > c.kills
	return ended
}

func (o *ORT) attributes(iso isolation) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if iso.namespace {
		a.Cloneflags |= unix.CLONE_NEWPID
	} else {
		// SIGTERM, because the supervised processes do not end with it
		a.Pdeathsig = syscall.SIGTERM
	}
	if iso.user {
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

func (o *ORT) preparation(iso isolation, idle bool) workerproto.Preparation {
	l := o.opts.Limits
	p := workerproto.Preparation{Data: uint64(max(l.Memory+o.stacks, 0)),
		FileSize: uint64(max(l.Output, 0)), OpenFiles: uint64(max(l.OpenFiles, 0)),
		Stack: uint64(max(l.Stack, 0)), Nice: max(l.Nice, 0), Idle: idle, First: iso.namespace,
		Group: o.opts.Socket != ""}
	if l.CPU > 0 {
		p.CPU = uint64(math.Ceil(l.CPU.Seconds()))
	}
	if o.countsProcesses(iso) {
		p.Processes = uint64(max(l.Processes, 0))
	}
	if idle {
		p.Nice = lowestPriority
	}
	return p
}

// countsProcesses reports whether the kernel's count of the user's processes contains only workers,
// so that a limit on it is possible. Since Linux 5.14 each user namespace has its own count. Root's
// processes are never limited.
func (o *ORT) countsProcesses(iso isolation) bool {
	if u := o.opts.User; u != nil {
		return u.UID != 0 && int(u.UID) != os.Geteuid()
	}
	return iso.user && os.Geteuid() != 0 && kernelSince(5, 14)
}

var errClosed = errors.New("compiler is closed")

// launcher starts processes from one thread. The kernel kills a worker when the thread that started
// it ends (Pdeathsig), and Go may end threads at any time. This thread ends only with the launcher.
type launcher struct {
	calls chan func() // functions to run on the thread, between begin and end
	mu    sync.Mutex  // guards closed, and orders close with begin
	done  bool
	jobs  sync.WaitGroup
}

func newLauncher() *launcher {
	l := &launcher{calls: make(chan func())}
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends with this goroutine
		for call := range l.calls {
			call()
		}
	}()
	return l
}

// begin announces a job; close waits until its end is called.
func (l *launcher) begin() (end func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done {
		return nil, errClosed
	}
	l.jobs.Add(1)
	return l.jobs.Done, nil
}

func (l *launcher) close() {
	l.mu.Lock()
	first := !l.done
	l.done = true
	l.mu.Unlock()
	l.jobs.Wait()
	if first {
		close(l.calls)
	}
}

// privateDir is a worker's working directory, home and TMPDIR; It is removed before the output is
// collected.
const privateDir = ".worker"

// Spelling returns the path by which the worker of a Job with this Directory names a model:
// relative to the worker's working directory. ONNX Runtime hashes that spelling into names of nodes
// and graphs, so two compiles of one model write equal bytes if the relative path between their
// directories and models is the same.
func Spelling(dir, model string) string {
	return relative(filepath.Join(dir, privateDir), model)
}

func relative(workingDirectory, path string) string {
	if spelled, err := filepath.Rel(workingDirectory, path); err == nil {
		return spelled
	}
	return path // cannot happen for two absolute paths on Unix
}

func spelled(req workerproto.Request, workingDirectory string) workerproto.Request {
	if req.Do != workerproto.Compile {
		return req
	}
	req.Model = relative(workingDirectory, req.Model)
	req.Share = slices.Clone(req.Share)
	for i := range req.Share {
		req.Share[i].Model = relative(workingDirectory, req.Share[i].Model)
	}
	return req
}

const lowestPriority = 19

func isWaiting(idle <-chan struct{}) bool {
	select {
	case <-idle:
		return false
	default:
		return idle != nil
	}
}

// restorePriority gives the worker the usual priority once idle is closed.
func (o *ORT) restorePriority(w *worker, idle <-chan struct{}) {
	if !isWaiting(idle) {
		return
	}
	select {
	case <-idle:
		w.process.raise(max(o.opts.Limits.Nice, ownNiceness()))
	case <-w.exited:
	}
}

// raise sets the priority of a worker's process group to that of the niceness. The I/O and session
// priorities can always be raised, niceness only by root or with RLIMIT_NICE. Best effort: a
// failure only delays waiting requests.
func raise(pid, nice int) {
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/autogroup", []byte(strconv.Itoa(nice)), 0)
	// class none, which follows the niceness
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ioprioGroup, uintptr(pid), 0)
	// of every thread in the group
	_ = unix.Setpriority(unix.PRIO_PGRP, pid, nice)
}

func ownNiceness() int {
	left, err := unix.Getpriority(unix.PRIO_PROCESS, os.Getpid())
	if err != nil {
		return 0
	}
	return 20 - left // the system call returns 20 - nice
}

const ioprioGroup = 2 // IOPRIO_WHO_PGRP
func kernelSince(major, minor int) bool {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return false
	}
	var has [2]int
	_, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &has[0], &has[1])
	return err == nil && slices.Compare(has[:], []int{major, minor}) >= 0
}
