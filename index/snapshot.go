package index

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/epcached/epcached/cas"
)

// Snapshot is what a store's manifests and journal say at one moment.
type Snapshot struct {
	Builds   []Build
	Problems []Finding // what could not be read, and is left out

	states map[BuildID]State
}

// StateOf returns the state of the build.
func (s *Snapshot) StateOf(id BuildID) State {
	if state, ok := s.states[id]; ok {
		return state
	}
	return State{Name: Current}
}

// ReadSnapshot reads the manifests and the journal in the state folder dir. It
// writes nothing, takes no lock, and needs neither the database nor the right
// to change anything: a store on a read-only file system will do. Manifests
// that are no good are left out, and told. It fails where there is no store,
// where a folder cannot be read, and, with a *NewerError, where the journal
// is a newer epcached's, for its marks say what must not be served.
func ReadSnapshot(ctx context.Context, dir string) (*Snapshot, error) {
	x := &Index{dir: dir, manifests: filepath.Join(dir, manifestsName), Options: Options{FS: cas.OS{}}}
	names, err := x.FS.ReadDir(x.manifests)
	if err != nil {
		return nil, fmt.Errorf("read store %s: %w", dir, err)
	}
	s := &Snapshot{states: make(map[BuildID]State)}
	for _, name := range names {
		if i, ok := shardOf(name); ok {
			if err := s.readShard(ctx, x, i); err != nil {
				return nil, fmt.Errorf("read store %s: %w", dir, err)
			}
		}
	}
	return s, s.readJournal(x)
}

// shardOf reads the name of a folder of manifests.
func shardOf(name string) (i byte, ok bool) {
	var b [1]byte
	err := cas.ParseHex("folder", name, b[:])
	return b[0], err == nil
}

func (s *Snapshot) readShard(ctx context.Context, x *Index, i byte) error {
	ids, err := x.list(i)
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := ctx.Err(); err != nil {
			return err
		}
		b, err := x.readManifest(id)
		switch {
		case err == nil:
			s.Builds = append(s.Builds, b)
		case !errors.Is(err, fs.ErrNotExist): // not retracted since the folder was listed
			s.Problems = append(s.Problems, findingOf(x.manifestPath(id), err))
		}
	}
	return nil
}

// readJournal takes what can be read of it: an end within a record is what a crash leaves.
func (s *Snapshot) readJournal(x *Index) error {
	j := &journal{states: s.states, pins: make(map[BuildID]Pin)}
	file, err := readFile(x.FS, filepath.Join(x.dir, "journal"), maxJournalRead)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		_, err = parseJournal(file, j.apply)
	}
	if errors.As(err, new(*NewerError)) {
		return fmt.Errorf("read store %s: %w", x.dir, err)
	}
	if err != nil {
		s.Problems = append(s.Problems, Finding{"damaged", "journal", "which builds were withheld is not known for certain: " + err.Error()})
	}
	return nil
}
