package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/flock"
)

// stateReadme is in every state directory, for people that find it and wonder.
const stateReadme = `This directory is the store of epcached, which keeps compiled ONNX Runtime
models.

All of it can be compiled again. Do not delete single files while the daemon runs: it would notice,
and recompile the builds that had them. To empty the store:

    epcachectl rm --all

or stop the daemon and remove the whole directory.

objects/     the compiled models' bytes, each file under the BLAKE3 digest of its content
recipes/     instructions to rebuild packed models from files in objects
unpacked/    rebuilt copies of packed models that are in use; may be deleted at any time
manifests/   one record for each compiled model, its only record together with the journal
views/       directories that applications load from: hard links to objects
staging/     work in progress, emptied at start
quarantine/  files that failed a check, each with a note
reserve      empty space, used to remove models when the disk is full
index.db     a database of the manifests, which is rebuilt if it is missing
`

// checkOwnership fails for root where another user owns the state directory or what lies directly
// in it, or may write there, because root would write through the links that this user puts into
// their place.
func checkOwnership(dir string) error {
	info, err := os.Stat(dir)
	if os.Geteuid() != 0 || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var entries []fs.DirEntry
	if err == nil {
		err = checkFileOwnership(dir, info)
	}
	if err == nil {
		entries, err = os.ReadDir(dir) // no other user changes these from here on
	}
	for _, e := range entries {
		if info, err = e.Info(); err == nil {
			err = checkFileOwnership(filepath.Join(dir, e.Name()), info)
		}
		if err != nil {
			return err
		}
	}
	return err
}

func checkFileOwnership(path string, info fs.FileInfo) error {
	e := apierr.New(apierr.NotAllowed, nil, "%s ", path).
		WithHint("run the daemon as the owner of its state directory, or name another one: --state")
	switch owner := cas.Owner(info); {
	case owner != 0:
		e.Text += fmt.Sprintf("belongs to uid %d, and root writes only to its own files", owner)
	case info.Mode()&fs.ModeSymlink != 0:
		e.Text += "is a symbolic link, which root does not follow"
	case info.Mode().Perm()&0o022 != 0:
		e.Text += fmt.Sprintf("may be written by other users (mode %04o)", info.Mode().Perm())
		e.Hint = "chmod go-w " + path + ", if no other user has written there"
	default:
		return nil
	}
	return e
}

// makeLayout makes the directories and notes that every state directory has.
func makeLayout(dir string) error {
	if err := checkOwnership(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	for name, text := range map[string]string{
		"README": stateReadme,
		"CACHEDIR.TAG": "Signature: 8a477f597d28d172789f06886806bc55\n# This directory is a " +
			"cache of epcached. See https://bford.info/cachedir/\n",
	} {
		if err := writeNote(filepath.Join(dir, name), text); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "staging"), 0o700); err != nil {
		return err
	}
	return os.MkdirAll(filepath.Join(dir, "views"), 0o711)
}

// writeNote leaves a text for people and for programs that make backups. One that is there stays as
// it is, unless it is empty: a full disk left it so.
func writeNote(path, text string) error {
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

// checkLock fails where a daemon holds the state directory's lock, and does not keep it: a daemon
// that starts later leaves alone what the lease on a view holds.
func checkLock(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, "lock"),
		os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		// none was ever made, or this user may not look: then a lease is what there is
		return nil //nolint:nilerr
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

// lockState takes the state directory for this process; the lock goes with the process. No other
// user may open the file, because a lock of theirs would keep the daemon from starting.
func lockState(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", f.Name())
	}
	if err == nil && info.Mode().Perm() != 0o600 { // earlier versions let all users read it
		err = f.Chmod(0o600)
	}
	ok := false
	if err == nil {
		ok, err = flock.TryLock(f)
	}
	for began := time.Now(); err == nil && !ok && time.Since(began) < lockPatience; ok,
		err = flock.TryLock(f) {
		time.Sleep(lockPause)
	}
	if err == nil && !ok {
		err = lockedError(dir, f)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	// It is as long as the longest, so that nothing of another text is left. A full disk may keep
	// it out.
	_, _ = fmt.Fprintf(f, "process %-10d\n", os.Getpid())
	return f, nil
}
