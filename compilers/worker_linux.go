package compilers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/workerproto"
	"github.com/epcached/epcached/internal/bytesize"
)

// killGrace is how long a killed process, or a pipe that another one holds, may take to end.
const killGrace = 2 * time.Second

// workerProcess is the process that looks after a worker.
type workerProcess interface {
	wait() // until it has ended
	raise(nice int)
	stop()                        // has it end the worker, and all that it started
	kill()                        // with all of its group
	reap() workerproto.ExitReport // after wait
}

type worker struct {
	process  workerProcess
	ended    workerproto.ExitReport
	request  *os.File // our ends of the dialogue
	answers  *os.File
	printed  *os.File
	stderr   *Tail
	exited   chan struct{} // closed when the process has ended, before it is reaped
	answered chan struct{} // closed when nothing more is read from it
	event    workerproto.Event
	eventErr error
	eps      []workerproto.EPResult // written by the reader, read when it is done
	// bytes that it took until they were registered; by the reader
	phaseBefore int64
	member      int // of a group, from 1: which model it works on; by the reader
	readers     sync.WaitGroup
}

// runWorker has a worker do the request. If the worker fails after it was refused a system call
// that is not known, work retries without that refusal.
func (o *ORT) runWorker(ctx context.Context, req workerproto.Request, dir string, pace Pace,
	progress func(string)) (answer, error) {
	o.leave.Do(func() {
		for _, e := range o.leftDirs { // those that the store could remove are gone
			o.removeScratch(filepath.Join(o.opts.Scratch, e.Name()))
		}
	})
	before, err := os.ReadDir(dir)
	if err != nil {
		return answer{}, fmt.Errorf("job's directory: %w", err)
	}
	first, err := o.workOnce(ctx, req, dir, pace, progress)
	if err == nil || ctx.Err() != nil || errors.Is(err, ErrTimeout) ||
		!strings.Contains(first.log, workerproto.CallRefused) {
		return first, err
	}
	o.opts.Log.Warn("a worker with a system call filter failed, and is retried without the filter",
		"ep", strings.Join(epNames(req.EPs), ", "), "error", err)
	left, _ := os.ReadDir(dir) // an unreadable directory cannot be cleaned
	for _, e := range left {
		if !slices.ContainsFunc(before, func(b os.DirEntry) bool { return b.Name() == e.Name() }) {
			o.removeScratch(filepath.Join(dir, e.Name()))
		}
	}
	req.AnyCall = true
	second, err := o.workOnce(ctx, req, dir, pace, progress)
	if err == nil {
		o.unknown.Store(librariesOf(req.EPs), true)
	}
	return second, err
}

func (o *ORT) workOnce(ctx context.Context, req workerproto.Request, dir string, pace Pace,
	progress func(string)) (answer, error) {
	end, err := o.launcher.begin()
	if err != nil {
		return answer{}, err
	}
	defer end()
	if err := ctx.Err(); err != nil {
		return answer{}, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if o.opts.User != nil || req.Do == workerproto.Command {
		// The way to the model is made before the worker starts, and a tool does not wait for it.
		if !await(ctx, pace.Ready) {
			return answer{}, context.Cause(ctx)
		}
		pace.Ready = nil
	}
	name := strings.Join(epNames(req.EPs), ", ")
	go watchTime(ctx, name, o.opts.Limits.Wall, pace.Ready, cancel)
	private := filepath.Join(dir, privateDir)
	if err := os.Mkdir(private, 0o700); err != nil {
		return answer{}, fmt.Errorf("worker's directory: %w", err)
	}
	defer o.removeScratch(private)
	if err := o.chown(private, nil, o.opts.User); err != nil {
		return answer{}, err
	}
	given, closeWay, err := o.grantModelAccess(req, dir)
	if err != nil {
		return answer{}, err
	}
	defer closeWay()
	if given.Fill != nil {
		given.Args = given.Fill(given.Model)
	}
	if given.ModelFile != nil {
		if err := os.Symlink(workerproto.ModelLink, given.Model); err != nil {
			return answer{}, fmt.Errorf("model for the worker: %w", err)
		}
		defer os.Remove(given.Model) // if that fails it goes with the job's directory
	}
	given.Waits = pace.Ready != nil
	w, err := o.start(given, dir, pace.Idle)
	if err != nil {
		return answer{}, fmt.Errorf("%w: %q: %w", ErrStart, o.opts.Worker, err)
	}
	w.converse(spelled(given, private), pace.Ready, progress)
	if local, is := w.process.(*child); is {
		go watchMemory(ctx, local.cmd.Process.Pid, o.opts.Limits.Memory, cancel)
	}
	go watchOutput(ctx, dir, o.opts.Limits.Output, cancel)
	w.wait(ctx, func() { o.restorePriority(w, pace.Idle) })
	done, err := w.result(ctx, name, o.opts.Limits)
	if w.member > 0 {
		err = memberError(w.member-1, len(req.Share)+1, err)
	}
	return done, err
}

func watchTime(ctx context.Context, name string, wall time.Duration, ready <-chan struct{},
	cancel context.CancelCauseFunc) {
	if wall <= 0 || !await(ctx, ready) {
		return
	}
	timer := time.NewTimer(wall)
	defer timer.Stop()
	select {
	case <-timer.C:
		cancel(fmt.Errorf("%s: %w: %v", name, ErrTimeout, wall))
	case <-ctx.Done():
	}
}

// await waits until ready is closed, and reports whether that was before the end of ctx. nil is
// ready.
func await(ctx context.Context, ready <-chan struct{}) bool {
	if ready == nil {
		return true
	}
	select {
	case <-ready:
		return true
	case <-ctx.Done():
		return false
	}
}

// environment is the same for every worker, whatever the daemon was started with, except for limits
// of instruction sets. GOTRACEBACK: a crash in vendor code never gets to Go's handlers (see
// cmd/epcached-ort); for the rest, "crash" would spend ten seconds on filling standard error with
// the registers of every thread. ONNX Runtime's telemetry keeps a database, and syncs it a dozen
// times in each process; its last words would be that it cannot keep a device ID.
func environment(private string) []string {
	fixed := []string{"PATH=/usr/bin:/bin", "LANG=C.UTF-8", "GOTRACEBACK=single",
		"ORT_DISABLE_TELEMETRY=1", "PWD=" + private, "HOME=" + private, "TMPDIR=" + private,
		"XDG_CACHE_HOME=" + private, "GLIBC_TUNABLES=" + tunables}
	return append(fixed, InstructionLimits()...)
}

// tunables have glibc's malloc use huge pages where the kernel gives them on request, and keep
// freed memory, because a compile allocates and frees buffers of megabytes all the time, and each
// new page is a fault. They halve the faults and save some 10 % of the processor time of a compile
// of 10 MB with OpenVINO. A worker's life is short, and so memory is not kept for long.
const tunables = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:" +
	"glibc.malloc.trim_threshold=536870912"

// converse sends the request, and has a waiting worker continue when ready is closed, and
// reads what comes, both beside the caller: a worker may read or write as slowly as it likes, or
// not at all.
func (w *worker) converse(req workerproto.Request, ready <-chan struct{}, progress func(string)) {
	w.readers.Go(func() { _, _ = io.Copy(w.stderr, w.printed) }) // to its end, or the deadline
	w.readers.Add(2)
	go func() {
		defer w.readers.Done()
		defer w.request.Close()
		// A worker that does not take its request ends without a result, which says more than this
		// error.
		if err := workerproto.WriteRequest(w.request, req); err != nil || ready == nil {
			return
		}
		select {
		case <-ready:
			_ = workerproto.WriteGo(w.request) // as above
		case <-w.answered:
		}
	}()
	go func() {
		defer w.readers.Done()
		defer close(w.answered)
		w.event, w.eventErr = workerproto.ReadEvents(w.answers, func(e workerproto.Event) {
			if e.EPs != nil {
				w.eps, w.phaseBefore = e.EPs, e.Memory
			}
			if e.Phase != "" {
				w.member = e.Member
				if progress != nil {
					progress(e.Phase)
				}
			}
		})
	}()
}

// wait returns when the process has ended and is reaped, its group is killed, and the dialogue is
// read. It ends the process when ctx ends, and when the worker has said its last word, or talks
// nonsense, and does not exit. Meanwhile raise may give the process another priority.
func (w *worker) wait(ctx context.Context, raise func()) {
	raised := make(chan struct{})
	go func() {
		defer close(raised)
		raise()
	}()
	go func() {
		defer close(w.exited)
		w.process.wait()
	}()
	select {
	case <-w.exited:
	case <-ctx.Done():
	case <-w.answered:
		select {
		case <-w.exited:
		case <-ctx.Done():
		case <-time.After(killGrace):
		}
	}
	w.process.stop()
	select {
	case <-w.exited:
	case <-time.After(killGrace):
	}
	w.process.kill()
	<-w.exited
	<-raised // the number is the process's until it is reaped
	// Another process may hold the pipes, if it left the group; it is not waited for.
	deadline := time.Now().Add(killGrace)
	for _, pipe := range []*os.File{w.answers, w.printed} {
		_ = pipe.SetReadDeadline(deadline) // pipes have deadlines
	}
	_ = w.request.SetWriteDeadline(deadline) // a pipe too; it may be closed already
	w.ended = w.process.reap()
	w.readers.Wait()
	_ = w.answers.Close() // read to its end
	_ = w.printed.Close()
}

// awaitGroup waits until a killed group has ended, so that none of it writes into the job's
// directory.
func awaitGroup(pid int) {
	for range 100 {
		if err := syscall.Kill(-pid, 0); errors.Is(err, syscall.ESRCH) || !groupRuns(pid) {
			return
		}
		time.Sleep(killGrace / 100)
	}
}

// groupRuns looks for members of a process group that are not zombies, which many containers keep.
func groupRuns(group int) bool {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return true // a malformed pattern, which it is not
	}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // ended meanwhile
		}
		var state string
		var parent, pgrp int
		rest := stat[bytes.LastIndexByte(stat, ')')+1:] // the name before it may hold anything
		if _, err := fmt.Sscan(string(rest), &state, &parent, &pgrp); err == nil && pgrp == group &&
			state != "Z" && state != "X" {
			return true
		}
	}
	return false
}

func (w *worker) result(ctx context.Context, name string, limits Limits) (answer, error) {
	a := answer{log: w.stderr.String(), before: w.phaseBefore, cpu: w.ended.CPU.Seconds()}
	a.EPs = w.eps // until there is a result
	code, signal := exitOf(w.ended.Status)
	switch {
	case w.eventErr == nil && w.event.Result != nil && code == workerproto.ExitDone:
		a.Result = *w.event.Result
		return a, nil
	case w.eventErr == nil && w.event.Refusal != nil && code == workerproto.ExitRefused:
		return a, &RefusedError{Doing: w.event.Refusal.Doing, Code: w.event.Refusal.Code,
			Text: w.event.Refusal.Text}
	case ctx.Err() != nil:
		return a, context.Cause(ctx)
	case errors.Is(w.eventErr, workerproto.ErrMalformed):
		return a, fmt.Errorf("%s: %w", name, w.eventErr)
	case w.ended.OutOfMemory:
		return a, fmt.Errorf("%s: %w: %s", name, ErrMemory, bytesize.Text(limits.Memory))
	case signal == syscall.SIGXCPU, signal == syscall.SIGKILL && limits.CPU > 0 &&
		w.ended.CPU >= limits.CPU:
		return a, fmt.Errorf("%s: %w: %v", name, ErrCPU, limits.CPU)
	case signal == syscall.SIGXFSZ:
		return a, fmt.Errorf("%s: %w", name, overOutput(limits.Output))
	}
	e := &ExitError{Compiler: name, Code: code, Stderr: a.log}
	switch {
	case signal != 0:
		e.Signal, e.Name = signal.String(), unix.SignalName(signal)
	case code == workerproto.ExitSetup: // before anything of the vendor's was loaded
		return a, fmt.Errorf("%w: %w", ErrStart, e)
	}
	return a, e
}

// exitOf returns how the worker ended: -1 with a signal, or its exit status. The process that looks
// after it passes on what it saw.
func exitOf(status int) (code int, signal syscall.Signal) {
	if status > workerproto.ExitSignal {
		return -1, syscall.Signal(status - workerproto.ExitSignal)
	}
	return status, 0
}

// watchOutput cancels a job if its directory grows too large. Each file is limited besides.
func watchOutput(ctx context.Context, dir string, limit int64, cancel context.CancelCauseFunc) {
	if limit < 0 {
		return
	}
	ticker := time.NewTicker(500 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if dirSize(dir) > limit {
				cancel(overOutput(limit))
				return
			}
		}
	}
}

// dirSize counts allocated bytes, not the size of sparse files, nor files that vanish meanwhile.
func dirSize(dir string) int64 {
	var total int64
	_ = filepath.WalkDir(dir, func(_ string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return nil
		}
		if info, err := entry.Info(); err == nil {
			total += statOf(info).Blocks * 512
		}
		return nil
	})
	return total
}
