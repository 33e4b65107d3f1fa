package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/index"
)

// The state directory may be removed or replaced under a running daemon, in whole or in part. Open
// files stay, but no names: builds are served and not kept, and another daemon may begin on the
// path. Nothing is mended in place: the caller closes and reopens the cache, which makes the
// missing parts and rebuilds the index.

// permanentDirs are directories that a running store never makes. Others are made when needed.
var permanentDirs = []string{"objects", filepath.Join("objects", "incoming"), "manifests",
	"recipes", filepath.Join("recipes", "incoming")}

// ReopenNeeded receives once why the store has to be closed and opened again: what of the state
// directory is gone, or is not this store's any more, within seconds, after which the store serves
// and keeps nothing; or that the index is to be made again.
func (st *Store) ReopenNeeded() <-chan string { return st.reopenNeeded }

// IndexDiscarded is what ReopenNeeded sends when the index is to be made again.
const IndexDiscarded = "the index is rebuilt"

// RebuildIndex has the next Open rebuild the index, and ReopenNeeded request that.
func (st *Store) RebuildIndex(why string) error {
	_, _, err := st.index.Repair(index.Finding{Kind: index.RebuildKind, Detail: why}, false)
	if err == nil {
		st.reopen(IndexDiscarded)
	}
	return err
}

// reopen reports whether it is the first that has ReopenNeeded ask for that.
func (st *Store) reopen(why string) bool {
	select {
	case st.reopenNeeded <- why:
		return true
	default: // reported, or about to be
		return false
	}
}

// CheckStateDirectory finds out whether the state directory is still the one that was opened.
// ReopenNeeded reports that it is not.
func (st *Store) CheckStateDirectory() {
	if why := st.MissingPart(); why != "" {
		if st.reopen(why) {
			st.log.Error("the state directory or a part of it was "+
				"removed", "state", st.dir, "what", why)
		}
		return
	}
	// A journal that alone was deleted is written again, because all of it is in memory as well.
	if restored, err := st.index.Journal.RewriteIfDeleted(false); err != nil {
		st.log.Error("the journal was deleted, and cannot be restored", "error", err)
	} else if restored {
		st.log.Warn("the journal was deleted while the daemon ran; it is "+
			"restored", "path", st.path("journal"))
	}
}

// MissingPart returns a part of the state directory that is missing or replaced; "": none. One that
// cannot be looked at is not missing.
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
