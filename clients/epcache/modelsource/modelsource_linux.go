// Package modelsource opens source models and their external data for requests. It is apart from
// the Go client, so that programs which only send requests do not contain that.
package modelsource

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Source is a source model that this process opened with its own rights, because the daemon opens
// no client's file by name.
type Source struct {
	File *os.File
	// Opened with the model, so that no later rename leads elsewhere: the directory of its path,
	// and that of its real path if it is another one.
	dirs  []*os.File
	named *os.File // replaces dirs in the search
}

const forReading = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY

// Open opens a model. It does not block on a FIFO.
func Open(path string) (*Source, error) {
	dir, err := openAt(unix.AT_FDCWD, filepath.Dir(path), filepath.Dir(path),
		unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	s := &Source{dirs: []*os.File{dir}}
	if s.File, err = openAt(int(dir.Fd()), filepath.Base(path), path, forReading); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	// Without the second directory its files are missing, which the error about them says.
	if real, err := realPath(s.File); err == nil {
		if here, err := realPath(dir); err == nil && here != filepath.Dir(real) {
			if other, err := openAt(unix.AT_FDCWD, filepath.Dir(real), filepath.Dir(real),
				unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW); err == nil {
				s.dirs = append(s.dirs, other)
			}
		}
	}
	return s, nil
}

// SearchIn has External search in this directory only, as a session option of ONNX Runtime does.
func (s *Source) SearchIn(dir string) (err error) {
	if s.named != nil {
		s.named.Close() // opened for searching
	}
	s.named, err = openAt(unix.AT_FDCWD, dir, dir, unix.O_PATH|unix.O_DIRECTORY)
	return err
}

// External opens external data by its location in the model. As in ONNX Runtime it has to lie below
// the directory of the model's path, or below that of its real path, because caches of model hubs
// consist of links; a file elsewhere may be one that only this user can read.
func (s *Source) External(location string) (*os.File, error) {
	if !filepath.IsLocal(filepath.FromSlash(location)) {
		return nil, fmt.Errorf("file %q lies outside the model's directory", location)
	}
	search, allowed := s.dirs, s.dirs
	if s.named != nil {
		search, allowed = []*os.File{s.named}, append(slices.Clip(s.dirs), s.named)
	}
	var failed error
	for _, dir := range search {
		// uncleaned, because the system resolves "s/../w.bin" after following "s"
		f, err := openAt(int(dir.Fd()), location, dir.Name()+"/"+location, forReading)
		if err == nil {
			if err = checkBelow(f, allowed); err == nil {
				return f, nil
			}
			f.Close() // opened for reading
		}
		if failed == nil || errors.Is(failed, fs.ErrNotExist) {
			failed = fmt.Errorf("file %q in %q: %w", location, dir.Name(), plain(err))
		}
	}
	return nil, failed
}

// Close closes the model. Files from External stay open.
func (s *Source) Close() error {
	for _, dir := range append(s.dirs, s.named) {
		dir.Close() // opened for searching; nil is refused
	}
	return s.File.Close()
}

// checkBelow compares the path of the open file, because a name may lead elsewhere by now.
func checkBelow(f *os.File, allowed []*os.File) error {
	real, err := realPath(f)
	if err != nil {
		return err
	}
	for _, dir := range allowed {
		above, err := realPath(dir)
		if err != nil {
			return err
		}
		if strings.HasPrefix(real, strings.TrimSuffix(above, "/")+"/") {
			return nil
		}
	}
	return fmt.Errorf("it escapes model directory: it is a link to %q", real)
}

// plain removes the path from an error, because the message names it already.
func plain(err error) error {
	if path, is := errors.AsType[*fs.PathError](err); is {
		return path.Err
	}
	return err
}

func realPath(f *os.File) (string, error) {
	return os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
}

func openAt(at int, name, spelled string, flags int) (*os.File, error) {
	for {
		fd, err := unix.Openat(at, name, flags|unix.O_CLOEXEC, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, &fs.PathError{Op: "open", Path: spelled, Err: err}
		}
		return os.NewFile(uintptr(fd), spelled), nil
	}
}
