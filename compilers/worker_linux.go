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

// killGrace is how long to wait for a killed process, or for a pipe that another process holds
// open.
const killGrace = 2 * time.Second

// workerProcess is the process that supervises a worker.
type workerProcess interface {
	wait() // blocks until it has ended
	raise(nice int)
	stop()                        // has it end the worker and its descendants
	kill()                        // kills it and its group
	reap() workerproto.ExitReport // after wait
}

type worker struct {
	process     workerProcess
	ended       workerproto.ExitReport
	request     *os.File // the daemon's ends of the dialogue
	answers     *os.File
	printed     *os.File
	stderr      *Tail
	exited      chan struct{} // closed when the process has ended, before it is reaped
	answered    chan struct{} // closed when its dialogue is read completely
	event       workerproto.Event
	eventErr    error
	phase       string
	eps         []workerproto.EPResult // written by the reader, read after its end
	phaseBefore int64                  // its bytes when the EPs were registered; the reader's
	member      int                    // current model of a group, from 1; written by the reader
	readers     sync.WaitGroup
}

// runWorker runs the request in a worker. If the worker fails after the sandbox refused it an
// unknown system call, it retries without that filter.
func (o *ORT) runWorker(ctx context.Context, req workerproto.Request, dir string, pace Pace,
	progress func(string)) (answer, error) {
	o.leave.Do(func() {
		for _, e := range o.leftDirs { // those that the store could not remove
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
	left, _ := os.ReadDir(dir) // best effort
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
		// Access to the model is granted before the worker starts, and tools cannot wait for the
		// model.
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
		defer os.Remove(given.Model) // otherwise removed with the job's directory
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

// await waits until ready is closed, and reports whether that happened before the end of ctx. A nil
// channel is ready.
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

// environment returns the environment of workers. It does not depend on the daemon's, except for
// limits of instruction sets. GOTRACEBACK is not "crash", because that would print the registers of
// every thread for ten seconds. ONNX Runtime's telemetry is disabled, because it syncs a database a
// dozen times in each process, and its error would be the last line of output.
func environment(private string) []string {
	fixed := []string{"PATH=/usr/bin:/bin", "LANG=C.UTF-8", "GOTRACEBACK=single",
		"ORT_DISABLE_TELEMETRY=1", "PWD=" + private, "HOME=" + private, "TMPDIR=" + private,
		"XDG_CACHE_HOME=" + private, "GLIBC_TUNABLES=" + tunables}
	return append(fixed, InstructionLimits()...)
}

// tunables make glibc's malloc use huge pages if possible, and keep freed memory, because a compile
// allocates and frees large buffers all the time, and each new page costs a page fault. They halve
// the faults and save about 10 % of the processor time of a compile of 10 MB with OpenVINO. Keeping
// memory is harmless, because workers are short-lived.
const tunables = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:" +
	"glibc.malloc.trim_threshold=536870912"

// converse sends the request, tells a waiting worker to continue when ready is closed, and reads
// the answers. It does so in goroutines, because a worker may read or write slowly, or not at all.
func (w *worker) converse(req workerproto.Request, ready <-chan struct{}, progress func(string)) {
	w.readers.Go(func() { _, _ = io.Copy(w.stderr, w.printed) }) // to its end, or the deadline
	w.readers.Go(func() {
		defer w.request.Close()
		// The error is ignored, because a worker that does not read its request ends without a
		// result, which has a better error.
		if err := workerproto.WriteRequest(w.request, req); err != nil || ready == nil {
			return
		}
		select {
		case <-ready:
			_ = workerproto.WriteGo(w.request) // as above
		case <-w.answered:
		}
	})
	w.readers.Go(func() {
		defer close(w.answered)
		w.event, w.eventErr = workerproto.ReadEvents(w.answers, func(e workerproto.Event) {
			if e.EPs != nil {
				w.eps, w.phaseBefore = e.EPs, e.Memory
			}
			if e.Phase != "" {
				w.member, w.phase = e.Member, " while "+e.Phase
				if progress != nil {
					progress(e.Phase)
				}
			}
		})
	})
}

// wait returns when the process has ended and is reaped, its group is killed, and the dialogue is
// read. It ends the process when ctx ends, or when the worker has sent its last event, or a
// malformed one, and does not exit. raise runs at the same time to change the process's priority.
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
	<-raised // before reaping, after which the pid may be reused
	// A process that left the group may hold the pipes open; wait for it only this long.
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

// awaitGroup waits until a killed group has ended, so that it does not write into the job's
// directory any more.
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
		return true // only for a malformed pattern
	}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // ended in the meantime
		}
		var state string
		var parent, pgrp int
		// the name before it may have any characters
		rest := stat[bytes.LastIndexByte(stat, ')')+1:]
		if _, err := fmt.Sscan(string(rest), &state, &parent, &pgrp); err == nil && pgrp == group &&
			state != "Z" && state != "X" {
			return true
		}
	}
	return false
}

func (w *worker) result(ctx context.Context, name string, limits Limits) (answer, error) {
	a := answer{log: w.stderr.String(), before: w.phaseBefore, cpu: w.ended.CPU.Seconds()}
	a.EPs = w.eps // known even without a result
	code, signal := w.ended.Status, syscall.Signal(0)
	if code > workerproto.ExitSignal { // the supervising process passes on the worker's status
		code, signal = -1, syscall.Signal(code-workerproto.ExitSignal)
	}
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
		return a, fmt.Errorf("%s: %w: %s", name, ErrMemory, w.memoryLimit(limits))
	case signal == syscall.SIGXCPU, signal == syscall.SIGKILL && limits.CPU > 0 &&
		w.ended.CPU >= limits.CPU:
		return a, fmt.Errorf("%s: %w: %v", name, ErrCPU, limits.CPU)
	case signal == syscall.SIGXFSZ:
		return a, fmt.Errorf("%s: %w", name, overOutput(limits.Output))
	}
	e := &ExitError{Compiler: name, Code: code, Stderr: a.log, Phase: w.phase}
	switch {
	case signal != 0:
		e.Signal, e.Name = signal.String(), unix.SignalName(signal)
	case code == workerproto.ExitSetup: // before any vendor library was loaded
		return a, fmt.Errorf("%w: %w", ErrStart, e)
	}
	return a, e
}

// memoryLimit says at which limit the kernel killed the worker.
func (w *worker) memoryLimit(limits Limits) string {
	if _, is := w.process.(*child); is {
		return "killed by the kernel, because " + bytesize.Text(MachineMemory()) +
			" are all that this machine or container has"
	}
	return bytesize.Text(limits.Memory)
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
