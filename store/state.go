package store

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/flock"
)

// stateReadme is the text of a README in every state directory.
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

// checkOwnership fails for root if another user owns the state directory or an entry of it, may
// write there, or can replace a directory above it, because root would write through links that
// this user creates. For every user it fails if an entry that the store uses is a link. Sockets and
// other links are exempt, because the store opens none of them, and a killed daemon leaves its own.
func checkOwnership(dir string) error {
	root := os.Geteuid() == 0
	if info, err := os.Stat(dir); err == nil && root {
		if err := checkFileOwnership(dir, info); err != nil {
			return err
		}
	}
	// the root of a user namespace has a "/" of another user, and protects no files of others
	if info, err := os.Stat("/"); err == nil && root && cas.Owner(info) == 0 {
		if err := cas.CheckPath(dir); err != nil {
			return apierr.New(apierr.NotAllowed, err, "another user can replace %s", dir).
				WithHint("name a directory that only root can replace: --state")
		}
	}
	for _, below := range []string{"", "objects", "manifests", "recipes", "views", "unpacked",
		"unpacked/objects"} {
		// no other user can change these from here on
		entries, _ := os.ReadDir(filepath.Join(dir, below)) // none, if it fails
		for _, e := range entries {
			link := e.Type() == fs.ModeSymlink && ownName.MatchString(e.Name())
			info, err := e.Info()
			if err == nil && (link || root && e.Type()&(fs.ModeSymlink|fs.ModeSocket) == 0) {
				err = checkFileOwnership(filepath.Join(dir, below, e.Name()), info)
			}
			if err = cas.Ignore(fs.ErrNotExist, err); err != nil {
				return err
			}
		}
	}
	return nil
}

// ownName matches the names that the daemon opens in a state directory, and enters below it.
var ownName = regexp.MustCompile(`^(README|CACHEDIR\.TAG|lock|reserve|recipes|objects|unpacked|` +
	`views|staging|quarantine|manifests|(journal|index\.db|epcached\.log).*|.*\.(lock|start)|` +
	`[0-9a-f]{2}|incoming|shared|unkept|uid-.*)$`)

func checkFileOwnership(path string, info fs.FileInfo) error {
	e := apierr.New(apierr.NotAllowed, nil, "%s ", path).
		WithHint("run the daemon as the owner of its state directory, or name another one: --state")
	switch owner := cas.Owner(info); {
	case info.Mode().Type() == fs.ModeSymlink:
		e.Text += "is a symbolic link, which the store does not follow"
		e.Hint = "remove the link, or name another state directory: --state"
	case owner != 0:
		e.Text += fmt.Sprintf("belongs to uid %d, and root writes only to its own files", owner)
	case info.Mode().Perm()&0o022 != 0:
		e.Text += fmt.Sprintf("may be written by other users (mode %04o)", info.Mode().Perm())
		e.Hint = "chmod go-w " + path + ", if no other user has written there"
	default:
		return nil
	}
	return e
}

// entryName matches what may be in a directory in which a store is made: parts of a store that was
// not completed, logs, locks and settings, and what belongs to the file system or to tools.
var entryName = regexp.MustCompile(`^(README|CACHEDIR\.TAG|lock|reserve|recipes|objects|unpacked|` +
	`views|staging|quarantine|lost\+found|epcached\..*|.*\.(lock|start)|\..*)$`)

// checkForeignFiles fails for a directory that has other files and is no store. Sockets and empty
// directories are no such files.
func checkForeignFiles(dir string) (err error) {
	entries, _ := os.ReadDir(dir) // no store can be made if this fails, or it does not exist yet
	for _, e := range entries {
		inside, _ := os.ReadDir(filepath.Join(dir, e.Name())) // none in a file
		switch name := e.Name(); {
		case name == "manifests", name == "journal", name == "index.db":
			return nil
		case !entryName.MatchString(name) && (e.Type().IsRegular() || len(inside) > 0):
			err = apierr.New(apierr.BadRequest, nil, "%s is not a store, and has other files: %q",
				dir, name).WithHint("name a new or empty directory: --state")
		}
	}
	return err
}

// MakeDirectory makes the state directory dir, or checks an existing one: that no other user can
// change it, that it has no other files, and that no link leads out of it.
func MakeDirectory(dir string) error {
	if err := cmp.Or(checkOwnership(dir), checkForeignFiles(dir)); err != nil {
		return err
	}
	return os.MkdirAll(dir, 0o711)
}

// makeLayout makes the directories and notes that every state directory has.
func makeLayout(dir string) error {
	if err := MakeDirectory(dir); err != nil {
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

// writeNote writes a text for users, or for backup programs. It does not change an existing file,
// unless that is empty because the disk was full.
func writeNote(path, text string) error {
	if info, err := os.Lstat(path); err == nil && (info.Size() > 0 || !info.Mode().IsRegular()) {
		return nil
	}
	return os.WriteFile(path, []byte(text), 0o644)
}

// LockedError says that another process has the state directory open.
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
	n, _ := lock.ReadAt(holder, 0) // best effort
	return &LockedError{Directory: dir, Holder: strings.TrimSpace(string(holder[:n]))}
}

// checkLock fails if a daemon holds the state directory's lock. It does not take the lock, because
// leases on views suffice against a daemon that starts later.
func checkLock(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, "lock"),
		os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		// No lock was ever made, or this user may not read it. Then only leases protect views.
		return nil //nolint:nilerr
	}
	defer f.Close()
	if free, err := flock.TryShare(f); err == nil && !free {
		return lockedError(dir, f)
	}
	return nil
}

// How long to wait for the lock of a process that is ending, or that was killed just after fork,
// because its children hold the lock until their exec.
const (
	lockPatience = 2 * time.Second
	lockPause    = 20 * time.Millisecond
)

// lockState locks the state directory for this process, until that ends. No other user may open the
// file, because a lock of another user would prevent the daemon from starting.
func lockState(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = apierr.New(apierr.NotAllowed, nil, "%s is not a regular file", f.Name()).
			WithHint("remove it: rm %s", f.Name())
	}
	if err == nil && info.Mode().Perm() != 0o600 { // earlier versions made it readable for all
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
	// The width is fixed, so that it overwrites any earlier text. Best effort: a full disk may
	// prevent it.
	_, _ = fmt.Fprintf(f, "process %-10d\n", os.Getpid())
	return f, nil
}
