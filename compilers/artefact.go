package compilers

import (
	"bytes"
	"context"
	"fmt"
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

	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/bytesize"
)

// Collect lists the output of a compiler in dir, without the names in inputs, and reads the graphs.
// It does not trust the output: links, devices and files beyond the limits are ErrOutput, and a
// graph without EPContext nodes is a *NoNodesError without EPs. Files begin with the graphs, in
// order; names in sub-directories use slashes. An error in one of several graphs is a *MemberError.
// With a *NoNodesError, the last of models is the one without nodes.
func Collect(ctx context.Context, dir string, graphs, inputs []string,
	limits Limits) (files []string, models []*epmodel.Model, err error) {
	others, found, err := listOutput(dir, graphs, inputs, limits.orDefault())
	if err != nil {
		return nil, nil, err
	}
	for i, graph := range graphs {
		if !found[graph] {
			return nil, nil, memberError(i, len(graphs), &missingGraphError{graph})
		}
		model, err := readGraph(ctx, filepath.Join(dir, graph))
		if err != nil {
			return nil, nil, memberError(i, len(graphs), err)
		}
		models = append(models, model)
		if len(model.Contexts) == 0 {
			return nil, models, memberError(i, len(graphs), &NoNodesError{OpTypes: model.OpTypes})
		}
	}
	return append(slices.Clone(graphs), others...), models, nil
}

type missingGraphError struct{ graph string }

func (e *missingGraphError) Error() string {
	return fmt.Sprintf("output directory: %v: the graph %q is missing", ErrOutput, e.graph)
}

func (e *missingGraphError) Unwrap() error { return ErrOutput }

func listOutput(dir string, graphs, inputs []string, limits Limits) (others []string,
	found map[string]bool, err error) {
	var total int64
	found = map[string]bool{}
	err = walkOutput(dir, inputs, func(name string, info fs.FileInfo) error {
		// Any other kind of file, or one with several links, could lead to the daemon's own files.
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%w: %q is not a regular file", ErrOutput, info.Name())
		}
		if statOf(info).Nlink > 1 {
			return fmt.Errorf("%w: %q has another hard link", ErrOutput, info.Name())
		}
		if total += info.Size(); limits.Output >= 0 && total > limits.Output {
			return overOutput(limits.Output)
		}
		if limits.Files >= 0 && len(others) >= limits.Files {
			return fmt.Errorf("%w: more than %d files", ErrOutputLimit, limits.Files)
		}
		if slices.Contains(graphs, name) {
			found[name] = true
			return nil
		}
		others = append(others, filepath.ToSlash(name))
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("output directory: %w", err)
	}
	slices.Sort(others)
	return others, found, nil
}

func overOutput(limit int64) error {
	return fmt.Errorf("%w: more than %s", ErrOutputLimit, bytesize.Text(limit))
}

// walkOutput calls each for all files below the directory, except the names in skip.
func walkOutput(dir string, skip []string, each func(name string, info fs.FileInfo) error) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		switch {
		case err != nil:
			return err
		case slices.Contains(skip, name) && entry.IsDir():
			return fs.SkipDir
		case slices.Contains(skip, name), entry.IsDir():
			return nil
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		return each(name, info)
	})
}

func readGraph(ctx context.Context, path string) (*epmodel.Model, error) {
	f, source, err := openSource(path)
	if err != nil {
		return nil, fmt.Errorf("graph: %w", err)
	}
	defer f.Close() // opened for reading, so no data can be lost
	model, err := epmodel.Read(ctx, filepath.Base(path), source)
	if err != nil {
		return nil, fmt.Errorf("graph: %w", err)
	}
	NameSources(model)
	return model, nil
}

// The clock for the times of files advances in steps of up to 10 ms. These are the interval and the
// number of the checks whether it has.
const (
	clockTick = time.Millisecond
	maxTicks  = 50
)

const maxTries = 8

// outputWatch watches a job's directory for the moment at which the worker has written the graph.
// ONNX Runtime writes that last, and then releases the session; loading the graph in the meantime
// saves a tenth of a miss.
type outputWatch struct {
	dir   string
	graph []byte           // its name as in inotify events, with a final zero
	skip  []string         // names in the directory that are not output
	done  func(size int64) // Job.Written

	events  *os.File
	ended   sync.WaitGroup
	earlier map[string]fileStamp // the files when done was called; nil: it was not called
}

type fileStamp struct {
	ino          uint64
	size         int64
	mtime, ctime syscall.Timespec
}

func watchWriting(ctx context.Context, job Job, before []string, log *slog.Logger) *outputWatch {
	if job.Written == nil {
		return nil
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil { // a user's inotify instances are limited
		log.Debug("cannot watch for the writing of a graph", "error", err)
		return nil
	}
	w := &outputWatch{dir: job.Dir, graph: append([]byte(job.Output), 0),
		skip: append(slices.Clone(before), privateDir),
		done: job.Written, events: os.NewFile(uintptr(fd), "inotify")}
	if _, err := unix.InotifyAddWatch(fd, job.Dir,
		unix.IN_CLOSE_WRITE|unix.IN_MOVED_TO|unix.IN_ONLYDIR); err != nil {
		log.Debug("cannot watch for the writing of a graph", "error", err)
		_ = w.events.Close() // nothing was written
		return nil
	}
	w.ended.Go(func() { w.check(ctx) })
	return w
}

func (w *outputWatch) check(ctx context.Context) {
	buffer := make([]byte, 64<<10)
	for tries := 0; tries < maxTries; {
		n, err := w.events.Read(buffer)
		if err != nil {
			return // it is closed
		}
		if !bytes.Contains(buffer[:n], w.graph) {
			continue
		}
		tries++
		then, err := stampsSettled(ctx, w.dir, w.skip)
		if err != nil {
			return
		}
		if then != nil {
			w.earlier = then
			var size int64
			for _, s := range then {
				size += s.size
			}
			w.done(size)
			return
		}
	}
}

// end stops watching after the worker's end, and reports whether no file has changed since the call
// of done.
func (w *outputWatch) end() (settled bool) {
	if w == nil {
		return false
	}
	_ = w.events.Close() // look returns; nothing was written
	w.ended.Wait()
	if w.earlier == nil {
		return false
	}
	now, _, err := stamps(w.dir, w.skip)
	return err == nil && maps.Equal(w.earlier, now)
}

func stamps(dir string, skip []string) (found map[string]fileStamp, last int64, err error) {
	found = make(map[string]fileStamp)
	err = walkOutput(dir, skip, func(name string, info fs.FileInfo) error {
		st := statOf(info)
		found[name] = fileStamp{st.Ino, st.Size, st.Mtim, st.Ctim}
		last = max(last, st.Mtim.Nano(), st.Ctim.Nano())
		return nil
	})
	return found, last, err
}

// stampsSettled returns stamps that any later change will alter: it waits until the kernel's clock
// for file times has advanced since the last change. It returns nil on a file system with a clock
// of its own.
func stampsSettled(ctx context.Context, dir string, skip []string) (map[string]fileStamp, error) {
	for range maxTicks {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
			return nil, err
		}
		if found, last, err := stamps(dir, skip); err != nil || now.Nano() > last {
			return found, err
		}
		select {
		case <-time.After(clockTick):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return nil, nil
}
