package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/index"
)

// A user may remove or replace the state directory of a running daemon, or parts of it. Open files
// remain usable, but their names are gone: builds are served but not stored, and another daemon may
// start with the same path. The store does not repair that in place. The caller closes and reopens
// the cache, which makes the missing parts and rebuilds the index.

// permanentDirs are directories that only Open makes. Others are made when needed.
var permanentDirs = []string{"objects", filepath.Join("objects", "incoming"), "manifests",
	"recipes", filepath.Join("recipes", "incoming")}

// ReopenNeeded receives once why the store has to be closed and opened again: a part of the state
// directory is missing or replaced, which is noticed within seconds, or the index has to be
// rebuilt. From then on the store neither serves nor stores builds.
func (st *Store) ReopenNeeded() <-chan string { return st.reopenNeeded }

// IndexDiscarded is the text from ReopenNeeded if the index has to be rebuilt.
const IndexDiscarded = "the index is rebuilt"

// RebuildIndex marks the index, so that the next Open rebuilds it, and signals ReopenNeeded.
func (st *Store) RebuildIndex(why string) error {
	_, _, err := st.index.Repair(index.Finding{Kind: index.RebuildKind, Detail: why}, false)
	if err == nil {
		st.reopen(IndexDiscarded)
	}
	return err
}

// reopen signals ReopenNeeded, and reports whether it is the first call that does.
func (st *Store) reopen(why string) bool {
	select {
	case st.reopenNeeded <- why:
		return true
	default: // signalled already
		return false
	}
}

// CheckStateDirectory checks that the state directory is still the one that was opened, and signals
// ReopenNeeded if not.
func (st *Store) CheckStateDirectory() {
	if why := st.MissingPart(); why != "" {
		if st.reopen(why) {
			st.log.Error("the state directory or a part of it was "+
				"removed", "state", st.dir, "what", why)
		}
		return
	}
	// If only the journal was deleted, it is written again, because memory has all of it.
	if restored, err := st.index.Journal.RewriteIfDeleted(false); err != nil {
		st.log.Error("the journal was deleted, and cannot be restored", "error", err)
	} else if restored {
		st.log.Warn("the journal was deleted while the daemon ran; it is "+
			"restored", "path", st.path("journal"))
	}
}

// MissingPart returns a part of the state directory that is missing or replaced; "" if none. A part
// that cannot be checked does not count as missing.
func (st *Store) MissingPart() string {
	if _, err := os.Stat(st.dir); errors.Is(err, fs.ErrNotExist) {
		return "the directory no longer exists"
	}
	for _, name := range permanentDirs {
		if _, err := os.Stat(st.path(name)); errors.Is(err, fs.ErrNotExist) {
			return fmt.Sprintf("%s no longer exists", name)
		}
	}
	now, err := os.Stat(st.path("lock"))
	if errors.Is(err, fs.ErrNotExist) {
		return "lock no longer exists"
	}
	if ours, failed := st.lock.Stat(); err == nil && failed == nil && !os.SameFile(now, ours) {
		return "another directory has replaced it, or another process uses it"
	}
	return ""
}
