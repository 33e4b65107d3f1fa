package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache"
	pack "github.com/epcached/epcached/store"
)

// The store itself: every artefact is put, as by the application that compiled
// it, and then all are packed, as upon `epcachectl pack --all`. The figure is
// the disk space of the state directory in whole blocks, with database, manifests,
// journal and directories.

func storeIn(c corpus, store string) (stored []int64, err error) {
	s, err := openStanding(c, store, new(atomic.Int64), cache.Options{Pack: pack.PackOff})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err2 := s.cache.Close(); err == nil {
			err = err2
		}
		if err == nil {
			var sum int64
			sum, err = onDisk(s.dir)
			stored = []int64{sum}
		}
		if err == nil {
			err = printParts(os.Stderr, s.dir)
		}
	}()
	for _, one := range s.builds {
		if err := s.put(one); err != nil {
			return nil, err
		}
	}
	s.forward(time.Hour) // the store packs no build that a client was just given by its path
	reply, err := s.cache.Pack(context.Background(), self, nil, true, false, nil)
	for _, b := range reply.GetBuilds() {
		if b.Outcome != "packed" {
			fmt.Fprintf(os.Stderr, "  %s of %s is not packed: %s\n", b.Ep, b.ModelName, b.Outcome)
		}
	}
	return nil, err
}

// storeOut asks for every artefact. Unpacked blobs stay where they are in the store: a view is what
// applications load from.
func storeOut(c corpus, store, into string) error {
	s, err := openStanding(c, store, new(atomic.Int64), cache.Options{Pack: pack.PackOff})
	if err != nil {
		return err
	}
	for _, one := range s.builds {
		err := s.served(one, func(path func(fileInfo) string) error {
			return linked(one, path, into)
		})
		if err != nil {
			return err
		}
	}
	return s.cache.Close()
}

// linked leads from where a restored file is looked for to where the store has it.
func linked(one onebuild, path func(fileInfo) string, into string) error {
	for _, f := range one.files {
		link := filepath.Join(into, f.Path)
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			return err
		}
		// what two graphs refer to
		if err := os.Symlink(path(f), link); err != nil && !os.IsExist(err) {
			return err
		}
	}
	return nil
}
