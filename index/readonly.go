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
// Tombstones and BlobBytes, keeps memos and stamps in memory, and fails for calls that need the
// database. It need not be closed.
//
// OpenReadOnly writes nothing and takes no lock, so the file system may be read-only. It leaves out
// unreadable manifests, which Problems lists. It fails if there is no store or a directory cannot
// be read, and with a *NewerError if a newer epcached wrote the journal, because that says which
// builds must not be served.
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

// readJournal reads the journal up to its last complete record, because a crash may truncate it.
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
