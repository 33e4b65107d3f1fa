package index

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/journalfile"
	"github.com/epcached/epcached/index/manifestpb"
)

// Check reads every manifest, the journal and every row of the database, and returns what is wrong,
// without changing it. A damaged row is an error and no finding, because the database is not used
// after that. progress, which may be nil, is called occasionally.
func (x *Index) Check(ctx context.Context, progress Progress) ([]Finding, error) {
	found := x.Problems()
	space, err := x.Space()
	if err != nil {
		return found, err
	}
	builds := uint64(0)
	for i := range x.manifests.dirs {
		more, n, err := x.checkDir(ctx, byte(i))
		if err != nil {
			return found, err
		}
		builds += n
		progress.report("builds", builds, space.Builds)
		found = append(found, more...)
	}
	// a missing directory is made at the next start
	names, _ := x.FS.ReadDir(x.manifests.incoming)
	for _, name := range names {
		found = append(found, Finding{"leftover", filepath.Join(x.manifests.incoming, name),
			"work interrupted by a crash; removed at the next start"})
	}
	x.Journal.appending.Lock()
	more, err := x.Journal.checkLocked()
	x.Journal.appending.Unlock()
	if err != nil {
		return found, err
	}
	found = append(found, more...)
	rows := uint64(0)
	for _, bucket := range buckets {
		// which verifies the checksum of each
		err := x.db.rows(ctx, bucket, func(_, _ []byte) error {
			rows++
			progress.reportEvery("rows of the index", rows, 0)
			return nil
		})
		progress.report("rows of the index", rows, 0)
		if err != nil {
			return found, err
		}
	}
	return found, nil
}

// NothingToDo is the action for damage that was quarantined when it was found.
const NothingToDo = "none: it is in quarantine"

// RebuildKind is the kind of a finding for which Repair makes the next Open rebuild the index from
// the manifests and the journal.
const RebuildKind = "index"

// Repair repairs a finding of Check, and returns the action, "" for none. With dry it only returns
// the action. rebuild reports that the index has to be rebuilt.
func (x *Index) Repair(f Finding, dry bool) (action string, rebuild bool, err error) {
	_, missing := os.Lstat(f.Object)
	switch {
	case f.Kind == RebuildKind:
		return "", true, x.Reserve.Use(func() error { return x.db.putMark(f.Detail) })
	case f.Kind == "leftover" || f.Kind == "newer":
		return "", false, nil
	case f.Object == "journal":
		if !dry {
			_, err = x.Journal.RewriteIfDeleted(true)
		}
		return "restore it from memory", false, err
	case f.Kind == "missing":
		return "rebuild the index", true, nil
	case errors.Is(missing, fs.ErrNotExist):
		return NothingToDo, false, nil
	}
	if !dry {
		x.manifests.changing.Lock()
		defer x.manifests.changing.Unlock()
		err = cmp.Or(cas.SetAside(x.FS, x.dir, f.Object, f.Detail),
			x.FS.SyncDir(filepath.Dir(f.Object)))
		if id, foreign := ParseBuildID(filepath.Base(f.Object)); err == nil && foreign == nil {
			x.noteLost(id)
		}
	}
	return "quarantine it", f.Kind != "foreign", err
}

// checkDir checks one directory of manifests, under a lock that excludes a Commit. builds is their
// number.
func (x *Index) checkDir(ctx context.Context, i byte) (found []Finding, builds uint64, err error) {
	x.manifests.changing.Lock()
	defer x.manifests.changing.Unlock()
	names, err := x.FS.ReadDir(x.manifests.directory(i))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // made with its first manifest
		return nil, 0, err
	}
	there := make(map[BuildID]bool)
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return nil, 0, err
		}
		path := filepath.Join(x.manifests.directory(i), name)
		id, err := ParseBuildID(name)
		if err != nil || id[0] != i {
			found = append(found, Finding{"foreign", path, "no manifest has this name"})
			continue
		}
		there[id] = true
		found = append(found, x.checkManifest(id, path)...)
	}
	known, err := x.indexedBuilds(i)
	if err != nil {
		return nil, 0, err
	}
	for id := range known {
		if !there[id] && !x.isRetracting(id) {
			found = append(found, Finding{"missing", id.String(), "the build's manifest is " +
				"missing; the next start drops the build"})
		}
	}
	return found, uint64(len(there)), nil
}

func (x *Index) checkManifest(id BuildID, path string) []Finding {
	if _, err := x.manifests.read(id); err != nil {
		return []Finding{findingOf(path, err)}
	}
	if _, err := x.Get(id); err != nil {
		return []Finding{{"missing", id.String(),
			"the database does not have the build: " + err.Error()}}
	}
	return nil
}

// indexedBuilds returns the builds in the database that belong to a directory of manifests.
func (x *Index) indexedBuilds(i byte) (map[BuildID]bool, error) {
	ids, err := x.idsOf(context.Background(), bucketBriefs, []byte{i})
	known := make(map[BuildID]bool, len(ids))
	for _, id := range ids {
		known[id] = true
	}
	return known, err
}

// checkLocked returns what is wrong with the file. The caller holds appending.
func (j *Journal) checkLocked() ([]Finding, error) {
	file, err := readFile(j.fs, j.path, maxJournalRead)
	if errors.Is(err, fs.ErrNotExist) {
		return []Finding{{"missing", "journal", "another program has deleted it"}}, nil
	}
	if err != nil {
		return nil, err
	}
	torn, damage := journalfile.Parse(file, func(*manifestpb.Record) error { return nil })
	if damage != nil {
		return []Finding{{"damaged", "journal", damage.Error()}}, nil
	}
	if torn {
		return []Finding{{"leftover", "journal",
			fmt.Sprintf("%d bytes end within a record", len(file))}}, nil
	}
	return nil, nil
}
