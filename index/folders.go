package index

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// folder is one of the 256 folders of manifests, and what the database knows
// of it: the folder's times when both said the same. So Open need not list
// folders that have not changed, and notices manifests that a crash kept from
// the database, or that somebody deleted.
type folder struct {
	turn    turn // held from a change in the folder until the database has it
	seen    folderTimes
	touched bool // seen is so fresh that another change could have the same times

	// unread: a manifest lies here that we could not read and left. Then no
	// times are noted, so that every start finds it.
	unread atomic.Bool
}

// folderTimes as stored: mtime, ctime, when noted; nanoseconds since 1970, 8
// bytes each.
type folderTimes struct{ mtime, ctime, at int64 }

func encodeFolder(t folderTimes) []byte {
	return numbers(uint64(t.mtime), uint64(t.ctime), uint64(t.at))
}

func decodeFolder(b []byte) (folderTimes, bool) {
	f := fields{b: b}
	t := folderTimes{f.i64(), f.i64(), f.i64()}
	return t, f.end()
}

// fresh is how long after a change a file system may give the next one the
// same time. The kernel's clock ticks every 10 ms at worst.
const fresh = time.Second

func (t folderTimes) same(now folderTimes) bool {
	return t.mtime == now.mtime && t.ctime == now.ctime && t.at-t.mtime >= int64(fresh)
}

func (x *Index) folderPath(i byte) string { return filepath.Join(x.manifests, fmt.Sprintf("%02x", i)) }

func (x *Index) manifestPath(id BuildID) string {
	return filepath.Join(x.folderPath(id[0]), id.String())
}

// lookAt returns the folder's times. Where they cannot be had, they never fit,
// and every Open lists the folder.
func (x *Index) lookAt(i byte) folderTimes {
	f, err := os.Open(x.folderPath(i))
	if err != nil {
		return folderTimes{}
	}
	s, err := cas.StampOf(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return folderTimes{}
	}
	return folderTimes{s.Mtime, s.Ctime, x.now().UnixNano()}
}

// settleFolders notes the times of changed folders again, once they are old
// enough to be told from those of the next change.
func (x *Index) settleFolders() {
	for i := range x.folders {
		f := &x.folders[i]
		f.turn.lock(x.db.waits)
		if f.touched {
			x.settle(byte(i), f)
		}
		f.turn.unlock()
	}
}

func (x *Index) settle(i byte, f *folder) {
	if f.unread.Load() {
		f.touched = false
		return
	}
	now := x.lookAt(i)
	if now.at-now.mtime < int64(fresh) {
		x.wake() // later
		return
	}
	f.touched = false
	if now.mtime == f.seen.mtime && now.ctime == f.seen.ctime { // else somebody else was here
		// Lost, the folder is listed once more, that is all.
		_ = x.soft.put(bucketFolders, []byte{i}, encodeFolder(now))
	}
}

// reconcile compares the database with every folder that is not as it was, and
// looks at no name of the others. A database that was made just now, of the
// folders as they are, is taken as it is. One that lacks many builds is made anew.
func (x *Index) reconcile(made bool) error {
	kept, err := read(x.db, func(tx *bbolt.Tx) (kept [256]folderTimes, err error) {
		for i := range kept {
			v, err := get(tx, bucketFolders, []byte{byte(i)})
			if err != nil {
				return kept, err
			}
			if t, ok := decodeFolder(v); ok {
				kept[i] = t
			}
		}
		return kept, nil
	})
	if err != nil {
		return err
	}
	var work []difference
	missing := 0
	for i := range x.folders {
		now := x.lookAt(byte(i))
		if !made && !kept[i].same(now) {
			d, err := x.compare(byte(i), now)
			if err != nil {
				return err
			}
			work, missing = append(work, d), missing+len(d.add)
			kept[i] = now
			if x.lacksMany(missing) {
				x.log.Info("index.db is made anew: it lacks many of the builds that are there", "store", x.dir)
				if err := x.db.refill(); err != nil {
					return err
				}
				return x.reconcile(true)
			}
		}
		if f := &x.folders[i]; kept[i].at-kept[i].mtime < int64(fresh) {
			f.seen, f.touched = kept[i], true
			x.wake()
		}
	}
	return x.settleAll(work, missing)
}

// difference is what the database has to learn of one folder.
type difference struct {
	folder byte
	now    folderTimes
	add    []BuildID
	gone   []BuildID
}

// settleAll has the database learn everything: one transaction, and its sync, for many
// small differences, and several for a large one.
func (x *Index) settleAll(all []difference, missing int) error {
	var work []settled
	size, done, told := 0, 0, x.now()
	for _, d := range all {
		for last := false; !last; {
			part := d.add[:min(len(d.add), flushPage)]
			d.add = d.add[len(part):]
			last = len(d.add) == 0
			s := settled{folder: d.folder}
			for _, id := range part {
				if b, ok := x.loadManifest(id); ok {
					s.add = append(s.add, b)
				}
			}
			if last {
				s.gone, s.now = d.gone, &d.now
			}
			work, size, done = append(work, s), size+1+len(part)+len(s.gone), done+len(part)
			if size < flushPage {
				continue
			}
			if err := x.settleDifferences(work); err != nil {
				return err
			}
			work, size = nil, 0
			if now := x.now(); now.Sub(told) >= tellFill {
				told = now
				x.tellMaking(uint64(done), done*100/max(missing, 1))
			}
		}
	}
	return x.settleDifferences(work)
}

// settled is what the database learns of a folder in one transaction.
type settled struct {
	folder byte
	now    *folderTimes // when it has all; nil: more follows
	add    []Build
	gone   []BuildID
}

func (x *Index) compare(i byte, now folderTimes) (difference, error) {
	d := difference{folder: i, now: now}
	there, err := x.list(i)
	if err != nil {
		return d, err
	}
	ids, err := x.known(i)
	if err != nil {
		return d, err
	}
	known := make(map[BuildID]bool, len(ids))
	for _, id := range ids {
		known[id] = true
	}
	for _, id := range there {
		if known[id] {
			delete(known, id)
		} else {
			d.add = append(d.add, id)
		}
	}
	for id := range known { // its manifest is gone
		d.gone = append(d.gone, id)
	}
	return d, nil
}

func (x *Index) settleDifferences(work []settled) error {
	if len(work) == 0 {
		return nil
	}
	write := func(tx *bbolt.Tx) error {
		for _, d := range work {
			for _, b := range d.add {
				if err := x.addBuild(tx, b); err != nil {
					return err
				}
			}
			for _, id := range d.gone {
				if err := removeBuild(tx, id); err != nil {
					return err
				}
			}
			if d.now == nil {
				continue
			}
			if err := x.noteFolder(tx, d.folder, *d.now); err != nil {
				return err
			}
		}
		return nil
	}
	return x.reserve.use(func() error { return x.db.write(write) })
}

// noteFolder notes that the database has all that the folder had at that time.
func (x *Index) noteFolder(tx *bbolt.Tx, i byte, t folderTimes) error {
	if x.folders[i].unread.Load() {
		return drop(tx, bucketFolders, []byte{i})
	}
	return put(tx, bucketFolders, []byte{i}, encodeFolder(t))
}

// Complete reports whether every manifest could be read. If not (some are of a
// newer epcached, or the disk does not give them), there are builds that Needs
// does not know of, and no blob may be removed because nobody needs it.
func (x *Index) Complete() bool {
	for i := range x.folders {
		if x.folders[i].unread.Load() {
			return false
		}
	}
	return true
}

// list returns the ids of the manifests in a folder. Other names are left for
// Check to tell.
func (x *Index) list(i byte) ([]BuildID, error) {
	names, err := x.fs.ReadDir(x.folderPath(i))
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

// readManifest reads one manifest. The error is a *NewerError, a *DamageError,
// or whatever the system said.
func (x *Index) readManifest(id BuildID) (Build, error) {
	name := filepath.Join(manifestsName, id.String()[:2], id.String())
	file, err := readFile(x.fs, x.manifestPath(id), headerSize+maxManifest+manifestSumSize)
	if err != nil {
		return Build{}, err
	}
	b, err := decodeManifest(name, file)
	if err == nil && b.ID != id {
		err = &DamageError{name, "it is the manifest of build " + b.ID.String()}
	}
	return b, err
}

// loadManifest reads one manifest for the database. One that is no good never
// takes the others down: it is reported, and moved away if it is damaged.
func (x *Index) loadManifest(id BuildID) (Build, bool) {
	b, err := x.readManifest(id)
	var damage *DamageError
	var newer *NewerError
	path := x.manifestPath(id)
	switch {
	case err == nil:
		return b, true
	case errors.Is(err, fs.ErrNotExist): // retracted since the folder was listed
	case errors.As(err, &newer):
		x.folders[id[0]].unread.Store(true)
		x.report(Finding{"newer", path, err.Error()})
	case errors.As(err, &damage):
		x.report(Finding{"damaged", path, err.Error()})
		err := cas.SetAside(x.fs, x.dir, path, err.Error())
		if err = errors.Join(err, x.fs.SyncDir(x.folderPath(id[0]))); err != nil {
			x.folders[id[0]].unread.Store(true)
			x.report(Finding{"damaged", path, "it could not be moved to the quarantine: " + err.Error()})
		}
	default:
		x.folders[id[0]].unread.Store(true)
		x.report(Finding{"damaged", path, "it cannot be read: " + err.Error()})
	}
	return Build{}, false
}
