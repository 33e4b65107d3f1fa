package logs

import (
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// maxLog bounds the log of a daemon that a client started; the one before it is kept beside it.
const maxLog = 1 << 20

// appending opens a log. It neither follows a link nor waits for the reader of a FIFO.
const appending = os.O_WRONLY | os.O_CREATE | os.O_APPEND | unix.O_NOFOLLOW | unix.O_NONBLOCK

// Path returns the path of the log of a daemon that a client started.
func Path(state string) string { return filepath.Join(state, "epcached.log") }

// Open opens the log for appending, a new one if the old one is full.
func Open(state string) (*os.File, error) {
	path := Path(state)
	if info, err := os.Lstat(path); err == nil && info.Size() > maxLog {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, err
		}
	}
	return os.OpenFile(path, appending, 0o600)
}

// File writes to standard error, which is the log, and begins a new file there when it is full, so
// that the file also gets the Go runtime's report of a crash.
type File struct {
	Path string
	Out  *os.File // standard error

	mu sync.Mutex // held while it is written and replaced
}

// Write appends a record. It drops a record that cannot be written, because a full disk must not
// stop the daemon.
func (l *File) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if info, err := l.Out.Stat(); err == nil && info.Size()+int64(len(p)) > maxLog {
		if os.Rename(l.Path, l.Path+".1") == nil {
			_ = l.Begin() // otherwise the old file grows, and the next record retries
		}
	}
	_, _ = l.Out.Write(p)
	return len(p), nil
}

// Begin switches to the file that has the name now, and creates it if there is none.
func (l *File) Begin() error {
	fresh, err := os.OpenFile(l.Path, appending, 0o600)
	if err != nil {
		return err
	}
	defer fresh.Close() // its duplicates stay open
	for _, number := range []int{int(l.Out.Fd()), int(os.Stdout.Fd())} {
		if err := unix.Dup3(int(fresh.Fd()), number, 0); err != nil {
			return err
		}
	}
	return nil
}
