package cas

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
)

// Shards are the folders 00 to ff in a folder. Each is made with the first file that it gets,
// durably, because a file is not durable before the folder that it stands in.
type Shards struct {
	FS  FS
	Dir string // their folder

	mu     sync.Mutex
	synced [256]bool // their names are durable; guarded by mu
}

// Open makes the folder, and "incoming" in it. Names of shards that are there are synced at each
// Open, because whoever made them may have been stopped before it did so.
func (s *Shards) Open() error {
	if err := makeFolders(s.FS, s.Dir, filepath.Join(s.Dir, incomingName)); err != nil {
		return err
	}
	names, err := s.FS.ReadDir(s.Dir)
	if err != nil {
		return err
	}
	if err := errors.Join(s.FS.SyncDir(s.Dir), s.FS.SyncDir(filepath.Dir(s.Dir))); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.synced[:])
	for _, name := range names {
		var first [1]byte
		if ParseHex("folder", name, first[:]) == nil {
			s.synced[first[0]] = true
		}
	}
	return nil
}

// Path is a shard's folder.
func (s *Shards) Path(first byte) string { return filepath.Join(s.Dir, fmt.Sprintf("%02x", first)) }

// There reports whether there was such a shard when the folder was opened, or one was made since.
func (s *Shards) There(first byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.synced[first]
}

// Make makes a shard durably where that was not done. again: it was deleted since.
func (s *Shards) Make(first byte, again bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.synced[first] && !again {
		return nil
	}
	s.synced[first] = false
	err := s.FS.Mkdir(s.Path(first))
	if err == nil {
		err = s.FS.SyncDir(s.Dir)
	}
	s.synced[first] = err == nil
	return err
}
