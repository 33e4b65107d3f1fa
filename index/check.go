package index

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/index/manifestpb"
)

// Check reads every manifest, the journal and every row of the database, and
// returns what is not as it should be. It changes nothing, except that a
// database whose rows are wrong is made anew, as any read would.
func (x *Index) Check(ctx context.Context) ([]Finding, error) {
	found := x.Problems()
	for i := range x.folders {
		more, err := x.checkFolder(ctx, byte(i))
		if err != nil {
			return found, err
		}
		found = append(found, more...)
	}
	for _, name := range x.leftovers() {
		found = append(found, Finding{"leftover", name, "work that a crash has cut short; removed at the next start"})
	}
	more, err := x.checkJournal()
	if err != nil {
		return found, err
	}
	found = append(found, more...)
	for _, bucket := range buckets {
		if err := x.checkBucket(ctx, bucket); err != nil {
			return found, err
		}
	}
	return found, nil
}

// checkFolder holds the folder's lock, so that no Publish is half done.
func (x *Index) checkFolder(ctx context.Context, i byte) ([]Finding, error) {
	f := &x.folders[i]
	f.mu.Lock()
	defer f.mu.Unlock()
	names, err := x.fs.ReadDir(x.folderPath(i))
	if errors.Is(err, fs.ErrNotExist) {
		return []Finding{{"missing", x.folderPath(i), "the folder is not there; it is made again at the next start"}}, nil
	}
	if err != nil {
		return nil, err
	}
	var found []Finding
	there := make(map[BuildID]bool)
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		path := filepath.Join(x.folderPath(i), name)
		id, err := ParseBuildID(name)
		if err != nil || id[0] != i {
			found = append(found, Finding{"foreign", path, "no manifest has this name"})
			continue
		}
		there[id] = true
		found = append(found, x.checkManifest(id, path)...)
	}
	known, err := x.known(i)
	if err != nil {
		return nil, err
	}
	for _, id := range known {
		if !there[id] && !x.isGone(id) {
			found = append(found, Finding{"missing", id.String(), "the build has no manifest any more; the next start drops it"})
		}
	}
	return found, nil
}

func (x *Index) checkManifest(id BuildID, path string) []Finding {
	_, err := x.readManifest(id)
	var newer *NewerError
	switch {
	case errors.As(err, &newer):
		return []Finding{{"newer", path, err.Error()}}
	case err != nil:
		return []Finding{{"damaged", path, err.Error()}}
	}
	if _, err := x.Get(id); err != nil {
		return []Finding{{"missing", id.String(), "the database does not have the build: " + err.Error()}}
	}
	return nil
}

// known returns the builds that the database has for a folder.
func (x *Index) known(i byte) ([]BuildID, error) {
	var ids []BuildID
	for after := []byte(nil); ; {
		keys, err := read(x.db, func(tx *bbolt.Tx) ([][]byte, error) {
			return keysFrom(tx, bucketBuilds, []byte{i}, after, 16*page)
		})
		if err != nil {
			return nil, err
		}
		for _, key := range keys {
			id, err := idAtEnd(key)
			if err != nil {
				return nil, err
			}
			ids = append(ids, id)
		}
		if len(keys) < 16*page {
			return ids, nil
		}
		after = keys[len(keys)-1]
	}
}

func (x *Index) leftovers() []string {
	names, err := x.fs.ReadDir(x.incoming)
	if err != nil {
		return nil // made again at the next start
	}
	paths := make([]string, len(names))
	for i, name := range names {
		paths[i] = filepath.Join(x.incoming, name)
	}
	return paths
}

func (x *Index) checkJournal() ([]Finding, error) {
	x.journal.mu.Lock()
	defer x.journal.mu.Unlock()
	file, err := readFile(x.fs, x.journal.path, maxJournalRead)
	if errors.Is(err, fs.ErrNotExist) {
		return []Finding{{"missing", "journal", "somebody has deleted it"}}, nil
	}
	if err != nil {
		return nil, err
	}
	torn, damage := parseJournal(file, func(*manifestpb.Record) error { return nil })
	if damage != nil {
		return []Finding{{"damaged", "journal", damage.Error()}}, nil
	}
	if torn {
		return []Finding{{"leftover", "journal", fmt.Sprintf("%d bytes end within a record", len(file))}}, nil
	}
	return nil, nil
}

// checkBucket reads every row, for its checksum, a page at a time.
func (x *Index) checkBucket(ctx context.Context, bucket []byte) error {
	for after := []byte(nil); ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		keys, err := read(x.db, func(tx *bbolt.Tx) ([][]byte, error) {
			return keysFrom(tx, bucket, nil, after, 8*page)
		})
		if err != nil || len(keys) < 8*page {
			return err
		}
		after = keys[len(keys)-1]
	}
}
