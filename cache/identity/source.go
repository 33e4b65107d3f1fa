package identity

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/index"
)

// Sources remembers source models by paths, and opens them again. It is safe for concurrent use.
type Sources struct {
	uid     uint32        // the daemon's user
	opening chan struct{} // one token for each open
}

// NewSources returns Sources for a daemon of this user.
func NewSources(uid uint32) *Sources {
	return &Sources{uid: uid, opening: make(chan struct{}, maxBlocking)}
}

// Why a file cannot be remembered by its path, or opened again.
var (
	ErrNoPath     = errors.New("no path")
	ErrPrivate    = errors.New("other users may not read it")
	ErrUnanswered = errors.New("a file system that may never answer")
)

// RememberPaths remembers the paths of a model's files. It reads the paths from the descriptors,
// and uses no path that a client states. own says that the request comes from the daemon's own
// user. For other users it remembers only files that all may read, because the daemon may be able
// to open files that the client may not.
func (s *Sources) RememberPaths(ctx context.Context, f Files, own bool) (index.Source, error) {
	out := index.Source{Kind: index.SourceReference}
	var err error
	if out.Path, err = s.path(ctx, f.Graph, own); err != nil {
		return index.Source{}, err
	}
	for _, location := range slices.Sorted(maps.Keys(f.External)) {
		path, err := s.path(ctx, f.External[location], own)
		if err == nil && !utf8.ValidString(location) {
			err = errors.New("not UTF-8")
		}
		if err != nil {
			return index.Source{}, fmt.Errorf("external data %q: %w", location, err)
		}
		if out.External == nil {
			out.External = make(map[string]string)
		}
		out.External[location] = path
	}
	return out, nil
}

// Open opens files that RememberPaths remembered, with the same own. The caller closes them.
func (s *Sources) Open(ctx context.Context, from *index.Source, own bool) (Files, error) {
	open := func(path string) (*os.File, error) {
		return s.open(ctx, func() (*os.File, error) { return reopenPath(path, s.uid, own) })
	}
	f := Files{External: make(map[string]*os.File)}
	var err error
	if f.Graph, err = open(from.Path); err != nil {
		return Files{}, err
	}
	for location, path := range from.External {
		if f.External[location], err = open(path); err != nil {
			CloseAll(f)
			return Files{}, fmt.Errorf("external data %q: %w", location, err)
		}
	}
	return f, nil
}

func (s *Sources) path(ctx context.Context, f *os.File, own bool) (string, error) {
	path, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrNoPath, err)
	}
	again, err := s.open(ctx, func() (*os.File, error) {
		if err := requireAt(path, f); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNoPath, err)
		}
		return reopenPath(path, s.uid, own)
	})
	if err != nil {
		return "", err
	}
	return path, again.Close()
}

// Bounds of opens by remembered paths, which may lead to a file system that never answers.
const (
	openTime    = 5 * time.Second
	maxBlocking = 8 // opens that have not returned within openTime
)

func (s *Sources) open(ctx context.Context, open func() (*os.File, error)) (*os.File, error) {
	select {
	case s.opening <- struct{}{}:
	default:
		return nil, fmt.Errorf("%w: %d opens of other files have not returned", ErrUnanswered,
			maxBlocking)
	}
	ctx, end := context.WithTimeout(ctx, openTime)
	defer end()
	type opened struct {
		file *os.File
		err  error
	}
	done := make(chan opened)
	go func() {
		f, err := open()
		<-s.opening
		select {
		case done <- opened{f, err}:
		case <-ctx.Done():
			if f != nil {
				_ = f.Close() // opened for reading, so no data can be lost
			}
		}
	}()
	select {
	case o := <-done:
		return o.file, o.err
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: not opened in %s", ErrUnanswered, openTime)
	}
}

// requireAt fails if the path is not absolute, or is not the open file's any more, because it was
// unlinked, renamed or replaced. It also fails if the caller has closed the file in the meantime.
func requireAt(path string, f *os.File) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%q is not a path", path)
	}
	opened, err := f.Stat()
	if err != nil {
		return err
	}
	named, err := os.Lstat(path)
	if err == nil && !os.SameFile(opened, named) {
		err = fmt.Errorf("%q is another file", path)
	}
	return err
}

// reopenPath opens a file by a remembered path. Another file may have replaced it: a link is not
// followed, and a pipe does not block. If the path was remembered for a request of the daemon's own
// user (own), the file must belong to that user or root, or be readable by all. Otherwise it must
// be readable by all, and not lie on a file system that another user serves.
func reopenPath(path string, uid uint32, own bool) (*os.File, error) {
	fd, err := unix.Open(path,
		unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	var st unix.Stat_t
	var on unix.Statfs_t
	if err = unix.SetNonblock(fd, false); err == nil { // otherwise Go's runtime tries to poll it
		err = unix.Fstat(fd, &st)
	}
	if err == nil {
		err = unix.Fstatfs(fd, &on)
	}
	switch {
	case err != nil:
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		err = errors.New("not a regular file")
	case own && (st.Uid == uid || st.Uid == 0):
		return os.NewFile(uintptr(fd), path), nil
	case st.Mode&0o004 == 0:
		err = fmt.Errorf("it is owned by user %d: %w", st.Uid, ErrPrivate)
	case on.Type == unix.FUSE_SUPER_MAGIC:
		err = fmt.Errorf("it is on FUSE: %w", ErrUnanswered)
	default:
		return os.NewFile(uintptr(fd), path), nil
	}
	_ = unix.Close(fd) // opened for reading, so no data can be lost
	return nil, &os.PathError{Op: "open", Path: path, Err: err}
}

// Duplicate returns another descriptor of the open file.
func Duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, &os.PathError{Op: "dup", Path: f.Name(), Err: err}
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
