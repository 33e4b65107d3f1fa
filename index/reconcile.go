package index

import (
	"errors"
	"io/fs"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// difference is one difference between manifests and database.
type difference struct {
	id           BuildID // a build that the database lacks, or has without a manifest
	manifestGone bool

	dir  byte
	done *dirTimes // not a build: the database now matches the directory as of these times
}

// differences compares the database with every changed directory, without listing the others.
func (x *Index) differences() (all []difference, err error) {
	var known [256]bool // whether the database has builds of the directory
	kept, err := read(x.db, func(tx *bbolt.Tx) (kept [256]dirTimes, err error) {
		briefs := tx.Bucket(bucketBriefs).Cursor()
		for i := range kept {
			first, _ := briefs.Seek([]byte{byte(i)})
			known[i] = len(first) > 0 && first[0] == byte(i)
			v, err := get(tx, bucketDirs, []byte{byte(i)})
			if err != nil {
				return kept, err
			}
			if t := (dirTimes{}); decodeRow(v, &t) {
				kept[i] = t
			}
		}
		return kept, nil
	})
	if err != nil {
		return nil, err
	}
	for i := range x.manifests.dirs {
		if !known[i] && !x.manifests.shards.Exists(byte(i)) {
			continue
		}
		if now := x.manifests.currentTimes(byte(i)); !kept[i].matches(now) {
			if all, err = x.compare(all, byte(i), now); err != nil {
				return nil, err
			}
			kept[i] = now
		}
		if kept[i].At-kept[i].Mtime < int64(timeGranularity) {
			x.manifests.noteChanged(byte(i), kept[i])
		}
	}
	return all, nil
}

// compare appends the differences of one directory.
func (x *Index) compare(all []difference, i byte, now dirTimes) ([]difference, error) {
	there, err := x.manifests.list(i)
	if err != nil {
		return nil, err
	}
	known, err := x.indexedBuilds(i)
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
		all = append(all, difference{id: id, manifestGone: true})
	}
	return append(all, difference{dir: i, done: &now}), nil
}

const (
	// differencesPage bounds what is in one transaction of applyDifferences. Rows that begin with
	// digests go to pages all over the file, so that a smaller transaction writes nearly as much.
	differencesPage = 1 << 12
	reportLearned   = 2 * time.Second // how often the progress is reported
)

// applyDifferences writes differences into the database, many in one transaction, because each
// costs a sync. A directory's times follow its builds, so that they are noted only when the
// database has all of them.
func (x *Index) applyDifferences(all []difference) error {
	done, builds, lastReport := 0, 0, x.now()
	for part := range slices.Chunk(all, differencesPage) {
		var list []*Change
		times := make(map[byte]dirTimes)
		for _, d := range part {
			if d.done != nil {
				times[d.dir] = *d.done
			} else if d.manifestGone {
				list = append(list, &Change{ID: d.id})
			} else if b, ok := x.loadManifest(d.id); ok {
				list, builds = append(list, &Change{ID: d.id, build: b, publish: true}), builds+1
			}
		}
		if err := x.Reserve.Use(func() error { return x.writeRows(list, times) }); err != nil {
			return err
		}
		done += len(part)
		if now := x.now(); now.Sub(lastReport) >= reportLearned {
			lastReport = now
			x.Log.Info("index.db is being rebuilt from the manifests",
				"store", x.dir, "builds", builds, "percent", done*100/len(all))
			if x.Rebuilding != nil {
				x.Rebuilding(uint64(builds), done*100/len(all))
			}
		}
	}
	return nil
}

// Complete reports whether every manifest could be read. If not, because some are from a newer
// epcached or the disk fails, Needs does not cover all builds, so that no blob may be removed as
// not needed.
func (x *Index) Complete() bool {
	for i := range x.manifests.dirs {
		if x.manifests.dirs[i].unread.Load() {
			return false
		}
	}
	return true
}

// loadManifest reads one manifest for the database. An unreadable one does not fail the others: it
// is reported, and quarantined if damaged.
func (x *Index) loadManifest(id BuildID) (Build, bool) {
	b, err := x.manifests.read(id)
	if err == nil || errors.Is(err, fs.ErrNotExist) { // retracted since the directory was listed
		return b, err == nil
	}
	path := x.manifests.path(id)
	x.report(findingOf(path, err))
	if errors.As(err, new(*DamageError)) {
		err := cas.SetAside(x.FS, x.dir, path, err.Error())
		if err = errors.Join(err, x.FS.SyncDir(x.manifests.directory(id[0]))); err == nil {
			x.noteLost(id)
			return Build{}, false
		}
		x.report(Finding{"damaged", path, "it cannot be moved to quarantine: " + err.Error()})
	}
	x.manifests.dirs[id[0]].unread.Store(true)
	return Build{}, false
}

// noteLost records that a build was lost with its damaged manifest, in the history of the request
// that earlier events of the build name.
func (x *Index) noteLost(id BuildID) {
	all := x.Journal.eventsThat(func(e *Event) bool { return e.BuildID == id })
	if len(all) == 0 {
		return
	}
	e := all[len(all)-1]
	e.At, e.Kind, e.Text = x.now(), "retracted",
		"its manifest was damaged, and is in the quarantine"
	if err := x.Journal.note(e); err != nil {
		x.Log.Warn("history could not be written", "build", id, "error", err)
	}
}

// findingOf converts an error of reading the manifest at path to a finding.
func findingOf(path string, err error) Finding {
	switch {
	case errors.As(err, new(*NewerError)):
		return Finding{"newer", path, err.Error()}
	case errors.As(err, new(*DamageError)):
		return Finding{"damaged", path, err.Error()}
	}
	return Finding{"damaged", path, "it cannot be read: " + err.Error()}
}
