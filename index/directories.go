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

// directory is one of the 256 directories of manifests. The database has its times from when both
// agreed, so that Open need not list unchanged directories, and notices manifests that were
// deleted, or that a crash kept from the database.
type directory struct {
	times        dirTimes
	timesPending bool // times are so recent that another change could have the same ones

	// unread is set if the directory has an unreadable manifest. Then no times are recorded, so
	// that every start reads it again.
	unread atomic.Bool

	stale bool // the database has a retracted build: the next start lists the directory
}

// dirTimes as stored; At is when they were recorded. Nanoseconds since 1970.
type dirTimes struct{ Mtime, Ctime, At int64 }

// timeGranularity is how long after a change a file system may record the same time for another
// one. The kernel's clock ticks every 10 ms at worst.
const timeGranularity = time.Second

func (t dirTimes) matches(now dirTimes) bool {
	return t.Mtime == now.Mtime && t.Ctime == now.Ctime && t.At-t.Mtime >= int64(timeGranularity)
}

// manifests has the manifest files, in 256 directories, and the state of each directory.
type manifests struct {
	fs       cas.FS
	dir      string
	incoming string // directory of staged manifests
	now      func() time.Time
	wake     func() // requests a flush in a few seconds
	times    Table  // recorded times of directories

	shards cas.Shards

	changing sync.Mutex // held from a change of manifests until the database has it; guards dirs
	dirs     [256]directory
}

func (m *manifests) directory(i byte) string { return m.shards.Path(i) }

func (m *manifests) path(id BuildID) string {
	return filepath.Join(m.directory(id[0]), id.String())
}

// currentTimes returns the directory's times. If they cannot be read, the result never matches, so
// that every Open lists the directory.
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
			m.wake() // retry later
			continue
		}
		f.timesPending = false
		// otherwise another process has changed it
		if now.Mtime == f.times.Mtime && now.Ctime == f.times.Ctime {
			// If this is lost, the directory is listed again.
			_ = m.times.Save([]byte{byte(i)}, encodeRow(now))
		}
	}
}

// noteChanged marks the times of a directory that has just changed to be recorded later.
func (m *manifests) noteChanged(i byte, t dirTimes) {
	m.dirs[i].times, m.dirs[i].timesPending = t, true
	m.wake()
}

// putTimes records that the database matches the directory as of these times.
func (m *manifests) putTimes(tx *bbolt.Tx, i byte, t dirTimes) error {
	if m.dirs[i].unread.Load() || m.dirs[i].stale {
		return drop(tx, bucketDirs, []byte{i})
	}
	return put(tx, bucketDirs, []byte{i}, encodeRow(t))
}

// list returns the ids of the manifests in a directory, none if that does not exist. Check reports
// other names.
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

// read reads one manifest. The error is a *NewerError, a *DamageError, or one of the system.
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

// link renames a staged manifest to its name. It is durable only after sync.
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

// sync makes the names in these directories durable, and returns the errors by directory.
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
