package main

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
)

// maxLog bounds the log of a daemon that a client started; the one before it is kept beside it.
const maxLog = 1 << 20

func logPath(state string) string { return filepath.Join(state, "epcached.log") }

// openLog opens the log for appending, a new one where the old one is full.
func openLog(state string) (*os.File, error) {
	path := logPath(state)
	if info, err := os.Lstat(path); err == nil && info.Size() > maxLog {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, err
		}
	}
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
}

// logFile writes to standard error, which is the log, and begins a new file there when it is full. That way the file also has what the
// Go runtime says of a crash.
type logFile struct {
	path string
	out  *os.File

	mu sync.Mutex // held while it is written and replaced
}

// Write appends a record. What cannot be written is lost: a full disk is no reason to stop.
func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if info, err := l.out.Stat(); err == nil && info.Size()+int64(len(p)) > maxLog {
		_ = l.renew() // the old one goes on growing, and the next record tries again
	}
	_, _ = l.out.Write(p)
	return len(p), nil
}

func (l *logFile) renew() error {
	if err := os.Rename(l.path, l.path+".1"); err != nil {
		return err
	}
	return l.begin()
}

// begin goes on with the file that has the name now, and makes it where there is none.
func (l *logFile) begin() error {
	fresh, err := os.OpenFile(l.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(putInPlace(fresh, l.out), fresh.Close())
}
