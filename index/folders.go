package index

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
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
	seen    folderTimes
	touched bool // seen is so fresh that another change could have the same times

	// unread: a manifest lies here that we could not read and left. Then no
	// times are noted, so that every start finds it.
	unread atomic.Bool
}

// folderTimes as stored; At is when they were noted. Nanoseconds since 1970.
type folderTimes struct{ Mtime, Ctime, At int64 }

// fresh is how long after a change a file system may give the next one the
// same time. The kernel's clock ticks every 10 ms at worst.
const fresh = time.Second

func (t folderTimes) same(now folderTimes) bool {
	return t.Mtime == now.Mtime && t.Ctime == now.Ctime && t.At-t.Mtime >= int64(fresh)
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
	x.changing.Lock()
	defer x.changing.Unlock()
	for i := range x.folders {
		if f := &x.folders[i]; f.touched {
			x.settle(byte(i), f)
		}
	}
}

// touch has the times of a folder that has just changed noted again later.
func (x *Index) touch(i byte, t folderTimes) {
	x.folders[i].seen, x.folders[i].touched = t, true
	x.wake()
}

func (x *Index) settle(i byte, f *folder) {
	if f.unread.Load() {
		f.touched = false
		return
	}
	now := x.lookAt(i)
	if now.At-now.Mtime < int64(fresh) {
		x.wake() // later
		return
	}
	f.touched = false
	if now.Mtime == f.seen.Mtime && now.Ctime == f.seen.Ctime { // else somebody else was here
		// Lost, the folder is listed once more, that is all.
		_ = x.soft.put(bucketFolders, []byte{i}, encodeRow(now))
	}
}

// difference is one thing that the database has to learn.
type difference struct {
	id   BuildID // of a build that it lacks, or has without a manifest
	gone bool

	folder byte
	done   *folderTimes // no build: the database now has what the folder had at these times
}

// differences compares the database with every folder that has changed, and reads no name in the
// others.
func (x *Index) differences() (all []difference, err error) {
	kept, err := read(x.db, func(tx *bbolt.Tx) (kept [256]folderTimes, err error) {
		for i := range kept {
			v, err := get(tx, bucketFolders, []byte{byte(i)})
			if err != nil {
				return kept, err
			}
			if t := (folderTimes{}); decodeRow(v, &t) {
				kept[i] = t
			}
		}
		return kept, nil
	})
	if err != nil {
		return nil, err
	}
	for i := range x.folders {
		if now := x.lookAt(byte(i)); !kept[i].same(now) {
			if all, err = x.compare(all, byte(i), now); err != nil {
				return nil, err
			}
			kept[i] = now
		}
		if kept[i].At-kept[i].Mtime < int64(fresh) {
			x.touch(byte(i), kept[i])
		}
	}
	return all, nil
}

// compare adds what the database has to learn of a folder.
func (x *Index) compare(all []difference, i byte, now folderTimes) ([]difference, error) {
	there, err := x.list(i)
	if err != nil {
		return nil, err
	}
	known, err := x.known(i)
	if err != nil {
		return nil, err
	}
	for _, id := range there {
		if !known[id] {
			all = append(all, difference{id: id})
		}
		delete(known, id)
	}
	for id := range known {
		all = append(all, difference{id: id, gone: true})
	}
	return append(all, difference{folder: i, done: &now}), nil
}

const (
	// learnPage bounds what is in one transaction of learn. Rows that begin with digests go to pages
	// all over the file, so that a smaller transaction writes nearly as much.
	learnPage = 1 << 12
	tellLearn = 2 * time.Second // how often the progress is reported
)

// learn writes differences into the database, many in one transaction, because each costs a sync. A
// folder's times follow its builds, so that they are noted only when the database has all of them.
func (x *Index) learn(all []difference) error {
	done, builds, told := 0, 0, x.now()
	for part := range slices.Chunk(all, learnPage) {
		var came []Build
		for _, d := range part {
			if d.done != nil || d.gone {
				continue
			}
			if b, ok := x.loadManifest(d.id); ok {
				came = append(came, b)
			}
		}
		err := x.reserve.use(func() error {
			return x.db.write(func(tx *bbolt.Tx) error { return x.learnPart(tx, part, came) })
		})
		if err != nil {
			return err
		}
		done, builds = done+len(part), builds+len(came)
		if now := x.now(); now.Sub(told) >= tellLearn {
			told = now
			x.Log.Info("index.db is being made from the manifests",
				"store", x.dir, "builds", builds, "percent", done*100/len(all))
			if x.Making != nil {
				x.Making(uint64(builds), done*100/len(all))
			}
		}
	}
	return nil
}

func (x *Index) learnPart(tx *bbolt.Tx, part []difference, came []Build) error {
	for _, b := range came {
		if err := x.addBuild(tx, b); err != nil {
			return err
		}
	}
	for _, d := range part {
		var err error
		switch {
		case d.done != nil:
			err = x.noteFolder(tx, d.folder, *d.done)
		case d.gone:
			err = removeBuild(tx, d.id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// noteFolder notes that the database has all that the folder had at that time.
func (x *Index) noteFolder(tx *bbolt.Tx, i byte, t folderTimes) error {
	if x.folders[i].unread.Load() {
		return drop(tx, bucketFolders, []byte{i})
	}
	return put(tx, bucketFolders, []byte{i}, encodeRow(t))
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
	names, err := x.FS.ReadDir(x.folderPath(i))
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
	file, err := readFile(x.FS, x.manifestPath(id), headerSize+maxManifest+manifestSumSize)
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
	if err == nil || errors.Is(err, fs.ErrNotExist) { // retracted since the folder was listed
		return b, err == nil
	}
	path := x.manifestPath(id)
	x.report(findingOf(path, err))
	if errors.As(err, new(*DamageError)) {
		err := cas.SetAside(x.FS, x.dir, path, err.Error())
		if err = errors.Join(err, x.FS.SyncDir(x.folderPath(id[0]))); err == nil {
			return Build{}, false
		}
		x.report(Finding{"damaged", path, "it could not be moved to the quarantine: " + err.Error()})
	}
	x.folders[id[0]].unread.Store(true)
	return Build{}, false
}

// findingOf returns what readManifest's error says of the manifest at path.
func findingOf(path string, err error) Finding {
	switch {
	case errors.As(err, new(*NewerError)):
		return Finding{"newer", path, err.Error()}
	case errors.As(err, new(*DamageError)):
		return Finding{"damaged", path, err.Error()}
	}
	return Finding{"damaged", path, "it cannot be read: " + err.Error()}
}
