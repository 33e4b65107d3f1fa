package cas

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
)

// Shards are the directories 00 to ff in a directory. Each is made durably with its first file,
// because a file is not durable before its directory.
type Shards struct {
	FS  FS
	Dir string // their directory

	making sync.Mutex       // held while a shard is made
	synced [256]atomic.Bool // whether the name is durable
}

// Open makes the directory, and "incoming" in it. It syncs the names of existing shards, because
// the process that made them may have ended before it synced them.
func (s *Shards) Open() error {
	if err := makeDirs(s.FS, s.Dir, filepath.Join(s.Dir, incomingName)); err != nil {
		return err
	}
	names, err := s.FS.ReadDir(s.Dir)
	if err != nil {
		return err
	}
	if err := errors.Join(s.FS.SyncDir(s.Dir), s.FS.SyncDir(filepath.Dir(s.Dir))); err != nil {
		return err
	}
	for i := range s.synced {
		s.synced[i].Store(false)
	}
	for _, name := range names {
		var first [1]byte
		if ParseHex("directory", name, first[:]) == nil {
			s.synced[first[0]].Store(true)
		}
	}
	return nil
}

// Path is a shard's directory.
func (s *Shards) Path(first byte) string { return filepath.Join(s.Dir, fmt.Sprintf("%02x", first)) }

// Exists reports whether the shard exists, as of Open and Make.
func (s *Shards) Exists(first byte) bool { return s.synced[first].Load() }

// Make makes a shard durably, unless it exists. again says that the shard was deleted since. Calls
// for an existing shard do not block.
func (s *Shards) Make(first byte, again bool) error {
	if s.Exists(first) && !again {
		return nil
	}
	s.making.Lock()
	defer s.making.Unlock()
	if s.Exists(first) && !again {
		return nil // made in the meantime
	}
	s.synced[first].Store(false)
	err := s.FS.Mkdir(s.Path(first))
	if err == nil {
		err = s.FS.SyncDir(s.Dir)
	}
	s.synced[first].Store(err == nil)
	return err
}
