package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/epcached/epcached/internal/flock"
)

// stateReadme stands in every state directory, for whoever finds it and wonders.
const stateReadme = `This folder is the store of epcached, which keeps compiled ONNX Runtime models.

Nothing in it is the only copy of anything: what is missing is compiled again. Still, do not delete single files
while the daemon runs if it can be helped; it notices and mends, and that costs a compile. To empty it:

    epcachectl rm --all

or stop the daemon and remove the whole folder.

objects/     the compiled models' bytes, each file under the BLAKE3 digest of its content
recipes/     how to put packed models together again from files in objects
unpacked/    packed models that are in use, put together; may be deleted at any time
manifests/   one record for each compiled model; with the journal they are the truth
views/       what applications load from: hard links to objects
staging/     work in progress, emptied at start
quarantine/  what failed a check, with a note why
reserve      nothing; room for removing models when the disk is full
index.db     made from the manifests; when it is missing it is made again
`

// layDown makes the folders and notes that every state directory has.
func layDown(dir string) error {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	for name, text := range map[string]string{
		"README":       stateReadme,
		"CACHEDIR.TAG": "Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache of epcached. See https://bford.info/cachedir/\n",
	} {
		if err := note(filepath.Join(dir, name), text); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "staging"), 0o700); err != nil {
		return err
	}
	return os.MkdirAll(filepath.Join(dir, "views"), 0o711)
}

// note leaves a text for people and for programs that make backups. One that is there stays as it
// is, unless it is empty: a full disk left it so.
func note(path, text string) error {
	if info, err := os.Lstat(path); err == nil && (info.Size() > 0 || !info.Mode().IsRegular()) {
		return nil
	}
	return os.WriteFile(path, []byte(text), 0o644)
}

// LockedError says that another process has the state directory.
type LockedError struct {
	Directory string
	Holder    string // what the other process wrote about itself: "process 4711"; may be empty
}

// Error names the directory and the process that has it.
func (e *LockedError) Error() string {
	who := e.Holder
	if who == "" {
		who = "another process"
	}
	return fmt.Sprintf("state directory %q is in use by %s", e.Directory, who)
}

func lockedError(dir string, lock *os.File) error {
	holder := make([]byte, 128)
	n, _ := lock.ReadAt(holder, 0) // the text is a courtesy
	return &LockedError{Directory: dir, Holder: strings.TrimSpace(string(holder[:n]))}
}

// lookAtLock fails where a daemon holds the state directory's lock, and does not keep it: a daemon
// that starts later leaves alone what the lease on a view holds.
func lookAtLock(dir string) error {
	f, err := os.Open(filepath.Join(dir, "lock"))
	if err != nil {
		return nil //nolint:nilerr // none was ever made, or this user may not look: then a lease is what there is
	}
	defer f.Close()
	if free, err := flock.TryShare(f); err == nil && !free {
		return lockedError(dir, f)
	}
	return nil
}

// How long to wait for a process that is just ending, or that was killed and has children that have
// not begun yet: they hold its lock until they do.
const (
	lockPatience = 2 * time.Second
	lockPause    = 20 * time.Millisecond
)

// lockState takes the state directory for this process; the lock goes with the process.
func lockState(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	ok, err := flock.TryLock(f)
	for began := time.Now(); err == nil && !ok && time.Since(began) < lockPatience; ok, err = flock.TryLock(f) {
		time.Sleep(lockPause)
	}
	if err == nil && !ok {
		err = lockedError(dir, f)
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = fmt.Fprintf(f, "process %d\n", os.Getpid())
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
