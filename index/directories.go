package index

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// directory is one of the 256 directories of manifests, and what the database knows of it: the
// directory's times when both said the same. So Open need not list directories that have not
// changed, and notices manifests that a crash kept from the database, or that were deleted.
type directory struct {
	times        dirTimes
	timesPending bool // seen is so fresh that another change could have the same times

	// unread: a manifest lies here that we could not read and left. Then no
	// times are noted, so that every start finds it.
	unread atomic.Bool

	stale bool // the database has a retracted build: the next start lists the directory
}

// dirTimes as stored; At is when they were noted. Nanoseconds since 1970.
type dirTimes struct{ Mtime, Ctime, At int64 }

// timeGranularity is how long after a change a file system may give the next one the
// same time. The kernel's clock ticks every 10 ms at worst.
const timeGranularity = time.Second

func (t dirTimes) matches(now dirTimes) bool {
	return t.Mtime == now.Mtime && t.Ctime == now.Ctime && t.At-t.Mtime >= int64(timeGranularity)
}

// manifests are the files of builds, in 256 directories, and what the database knows of each
// directory.
type manifests struct {
	fs       cas.FS
	dir      string
	incoming string // manifests that have no name yet
	now      func() time.Time
	wake     func() // asks for a flush some seconds from now
	times    Table  // of directories

	shards cas.Shards

	changing sync.Mutex // held from a change of manifests until the database has it; guards dirs
	dirs     [256]directory
}

func (m *manifests) directory(i byte) string { return m.shards.Path(i) }

func (m *manifests) path(id BuildID) string {
	return filepath.Join(m.directory(id[0]), id.String())
}

// currentTimes returns the directory's times. Where they cannot be had, they never fit,
// and every Open lists the directory.
func (m *manifests) currentTimes(i byte) dirTimes {
	f, err := os.Open(m.directory(i))
	if err != nil {
		return dirTimes{}
	}
	s, err := cas.StampOf(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return dirTimes{}
	}
	return dirTimes{s.Mtime, s.Ctime, m.now().UnixNano()}
}

// recordTimes records the times of changed directories again, once they are old
// enough to be distinguished from those of the next change.
func (m *manifests) recordTimes() {
	m.changing.Lock()
	defer m.changing.Unlock()
	for i := range m.dirs {
		f := &m.dirs[i]
		if !f.timesPending || f.unread.Load() || f.stale {
			f.timesPending = false
			continue
		}
		now := m.currentTimes(byte(i))
		if now.At-now.Mtime < int64(timeGranularity) {
			m.wake() // later
			continue
		}
		f.timesPending = false
		// else another process was here
		if now.Mtime == f.times.Mtime && now.Ctime == f.times.Ctime {
			// If this is lost, the directory is listed again.
			_ = m.times.Save([]byte{byte(i)}, encodeRow(now))
		}
	}
}

// noteChanged has the times of a directory that has just changed noted again later.
func (m *manifests) noteChanged(i byte, t dirTimes) {
	m.dirs[i].times, m.dirs[i].timesPending = t, true
	m.wake()
}

// putTimes records that the database has all that the directory had at that time.
func (m *manifests) putTimes(tx *bbolt.Tx, i byte, t dirTimes) error {
	if m.dirs[i].unread.Load() || m.dirs[i].stale {
		return drop(tx, bucketDirs, []byte{i})
	}
	return put(tx, bucketDirs, []byte{i}, encodeRow(t))
}

// list returns the ids of the manifests in a directory, none where that was never made. Other names
// are left for Check to report.
func (m *manifests) list(i byte) ([]BuildID, error) {
	names, err := m.fs.ReadDir(m.directory(i))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	ids := make([]BuildID, 0, len(names))
	for _, name := range names {
		if id, err := ParseBuildID(name); err == nil && id[0] == i {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// read reads one manifest. The error is a *NewerError, a *DamageError, or whatever the system said.
func (m *manifests) read(id BuildID) (Build, error) {
	name := filepath.Join(manifestsName, id.String()[:2], id.String())
	file, err := readFile(m.fs, m.path(id), headerSize+maxManifest+manifestSumSize)
	if err != nil {
		return Build{}, err
	}
	b, err := decodeManifest(name, file)
	if err == nil && b.ID != id {
		err = &DamageError{File: name, Reason: "it is the manifest of build " + b.ID.String()}
	}
	return b, err
}

// staged is the path of a manifest that has no name yet.
func (m *manifests) staged(id BuildID) string { return filepath.Join(m.incoming, id.String()) }

// stage writes a manifest that has no name yet, durably.
func (m *manifests) stage(id BuildID, file []byte) error {
	err := cas.WriteFile(m.fs, m.staged(id), file)
	if err != nil {
		// After a failed sync the file's bytes cannot be trusted: try again with a new one.
		err = cas.WriteFile(m.fs, m.staged(id), file)
	}
	return err
}

// link gives a staged manifest its name. A start sees it then, though a power cut may take it back.
func (m *manifests) link(id BuildID) error {
	err := m.shards.Make(id[0], false)
	if err == nil {
		err = m.fs.Link(m.staged(id), m.path(id))
	}
	if errors.Is(err, fs.ErrNotExist) { // the directory was deleted
		if err = m.shards.Make(id[0], true); err == nil {
			err = m.fs.Link(m.staged(id), m.path(id))
		}
	}
	return err
}

// sync makes durable what names directories have, and returns why it is not, by directory.
func (m *manifests) sync(dirs map[byte]bool) map[byte]error {
	order := slices.Sorted(maps.Keys(dirs))
	paths := make([]string, len(order))
	for i, dir := range order {
		paths[i] = m.directory(dir)
	}
	failed := make(map[byte]error)
	for i, err := range cas.SyncDirs(m.fs, paths) {
		failed[order[i]] = err
	}
	return failed
}

func (m *manifests) uncommit(id BuildID) error {
	return errors.Join(m.fs.Remove(m.path(id)), m.fs.SyncDir(m.directory(id[0])))
}
