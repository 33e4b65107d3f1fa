package compilers

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The clock that files get their times from goes on in steps of up to 10 ms: how often it is looked whether it has, and at most.
const (
	tick      = time.Millisecond
	mostTicks = 50
)

// mostTries is how often a graph may be written before nobody looks any more.
const mostTries = 8

// writing looks at a job's folder while its worker compiles, for the moment at which the graph is written. ONNX Runtime does that last, and then
// takes the session apart, which takes a while.
type writing struct {
	folder string
	graph  string
	skip   []string         // names in the folder that are not output
	done   func(size int64) // Job.Written

	events *os.File
	ended  sync.WaitGroup
	then   map[string]fileStamp // what was there when done was called; nil: it was not
}

// fileStamp is another one after each change of a file's content.
type fileStamp struct {
	ino          uint64
	size         int64
	mtime, ctime syscall.Timespec
}

// watchWriting begins to look, nil where nobody wants to know, or where it cannot be seen.
func watchWriting(ctx context.Context, job Job, before []string, log *slog.Logger) *writing {
	if job.Written == nil {
		return nil
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil { // a user has a limited number of them
		log.Debug("it is not seen when a graph is written", "error", err)
		return nil
	}
	w := &writing{folder: job.Folder, graph: job.Output, skip: append(slices.Clone(before), privateFolder), done: job.Written, events: os.NewFile(uintptr(fd), "inotify")}
	if _, err := unix.InotifyAddWatch(fd, job.Folder, unix.IN_CLOSE_WRITE|unix.IN_MOVED_TO|unix.IN_ONLYDIR); err != nil {
		log.Debug("it is not seen when a graph is written", "error", err)
		_ = w.events.Close() // nothing was written
		return nil
	}
	w.ended.Go(func() { w.look(ctx) })
	return w
}

// look waits for the graph, and tells of it.
func (w *writing) look(ctx context.Context) {
	buffer := make([]byte, 64<<10)
	for tries := 0; tries < mostTries; {
		n, err := w.events.Read(buffer)
		if err != nil {
			return // it is closed
		}
		if !w.graphIn(buffer[:n]) {
			continue
		}
		tries++
		then, err := w.stamps()
		if err != nil || !afterAll(ctx, then) {
			return // what is wrong there is found when the compile is over
		}
		if again, err := w.stamps(); err != nil || !maps.Equal(then, again) {
			continue
		}
		w.then = then
		w.done(sizeOf(then))
		return
	}
}

// graphIn tells whether one of the kernel's records is about the graph.
func (w *writing) graphIn(records []byte) bool {
	for len(records) >= unix.SizeofInotifyEvent {
		length := int(binary.NativeEndian.Uint32(records[12:]))
		records = records[unix.SizeofInotifyEvent:]
		if length > len(records) {
			return false
		}
		if string(bytes.TrimRight(records[:length], "\x00")) == w.graph {
			return true
		}
		records = records[length:]
	}
	return false
}

// end stops looking, and tells whether the graph and all beside it are what they were when it was told of them. The worker has ended.
func (w *writing) end() (settled bool) {
	if w == nil {
		return false
	}
	_ = w.events.Close() // look returns; nothing was written
	w.ended.Wait()
	if w.then == nil {
		return false
	}
	now, err := w.stamps()
	return err == nil && maps.Equal(w.then, now)
}

// stamps are those of everything in the folder that is output.
func (w *writing) stamps() (map[string]fileStamp, error) {
	found := make(map[string]fileStamp)
	err := filepath.WalkDir(w.folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(w.folder, path)
		if err != nil {
			return err
		}
		if slices.Contains(w.skip, name) {
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if entry.IsDir() {
			return nil
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return errors.ErrUnsupported
		}
		found[name] = fileStamp{st.Ino, st.Size, st.Mtim, st.Ctim}
		return nil
	})
	return found, err
}

func sizeOf(stamps map[string]fileStamp) (size int64) {
	for _, s := range stamps {
		size += s.size
	}
	return size
}

// afterAll waits until a change of any of the files would give it another stamp: until the clock that the kernel takes their times from has
// gone on since the last change.
func afterAll(ctx context.Context, stamps map[string]fileStamp) bool {
	var last int64
	for _, s := range stamps {
		last = max(last, s.ctime.Nano(), s.mtime.Nano())
	}
	for range mostTicks {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
			return false
		}
		if now.Nano() > last {
			return true
		}
		select {
		case <-time.After(tick):
		case <-ctx.Done():
			return false
		}
	}
	return false // a file system with a clock of its own
}
