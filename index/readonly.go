package index

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/journalfile"
)

// OpenReadOnly reads the manifests and the journal in the state directory dir, and returns the
// builds with an index that has no database. The index answers StateOf, Problems, History,
// Tombstones and BlobBytes, remembers memos and stamps until the process ends, and fails where it
// needs the database. It need not be closed.
//
// OpenReadOnly writes nothing and takes no lock, so a store on a read-only file
// system will do. Manifests that cannot be read are left out, and in Problems. It
// fails where there is no store, where a directory cannot be read, and, with a
// *NewerError, where the journal is a newer epcached's, because its marks say
// what must not be served.
func OpenReadOnly(ctx context.Context, dir string) (*Index, []Build, error) {
	x := newIndex(dir, Options{})
	x.sizes = make(map[cas.Digest]int64)
	builds, err := x.readManifests(ctx)
	if err == nil {
		err = x.readJournal()
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read store %s: %w", dir, err)
	}
	return x, builds, nil
}

func (x *Index) readManifests(ctx context.Context) (builds []Build, err error) {
	if _, err := x.FS.ReadDir(x.manifests.dir); err != nil {
		return nil, err
	}
	for i := range x.manifests.dirs {
		ids, err := x.manifests.list(byte(i))
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return nil, err
		}
		for _, id := range ids {
			b, err := x.manifests.read(id)
			switch {
			case err == nil:
				builds = append(builds, b)
				maps.Copy(x.sizes, b.DistinctBlobs())
			case !errors.Is(err, fs.ErrNotExist): // not retracted since the directory was listed
				x.report(findingOf(x.manifests.path(id), err))
			}
		}
	}
	return builds, nil
}

// readJournal reads as much of the journal as it can: an end within a record is what a crash
// leaves.
func (x *Index) readJournal() error {
	x.Journal = &Journal{states: make(map[BuildID]State), pins: make(map[BuildID]Pin),
		sequences: make(map[string]uint64), exists: x.exists}
	file, err := readFile(x.FS, filepath.Join(x.dir, "journal"), maxJournalRead)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		_, err = journalfile.Parse(file, x.Journal.apply)
	}
	if err == nil || errors.As(err, new(*NewerError)) {
		return err
	}
	x.report(Finding{"damaged", "journal",
		"withheld builds may be served, because the record of them is damaged: " + err.Error()})
	return nil
}
