package packing

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/epcached/epcached/cas"
)

// Copies are the unpacked forms of blobs.
type Copies struct {
	fs     cas.FS
	dir    string
	apart  bool
	stamps cas.StampBook
	log    *slog.Logger

	opened  atomic.Pointer[cas.Store] // nil until something is unpacked
	opening sync.Mutex                // held while it is opened
}

// open opens the store of the unpacked forms, or makes it.
func (c *Copies) open() (*cas.Store, error) {
	if open := c.Store(); open != nil {
		return open, nil
	}
	c.opening.Lock()
	defer c.opening.Unlock()
	if open := c.Store(); open != nil {
		return open, nil
	}
	open, err := cas.Open(c.dir, cas.Options{FS: c.fs, Stamps: c.stamps, Volatile: true})
	if err != nil {
		return nil, err
	}
	c.opened.Store(open)
	return open, nil
}

// Store returns the store of the unpacked forms, nil while nothing has been unpacked.
func (c *Copies) Store() *cas.Store { return c.opened.Load() }

// Folder is that of the unpacked forms, absolute. apart: it is on another file system than the whole ones.
func (c *Copies) Folder() (path string, apart bool) { return c.dir, c.apart }

// Each calls fn for every unpacked form that takes room on the store's own file system, with its bytes on disk.
func (c *Copies) Each(ctx context.Context, fn func(d cas.Digest, disk int64) error) error {
	open := c.Store()
	if open == nil || c.apart {
		return nil
	}
	return open.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		disk, err := cas.DiskBytesIn(c.dir, d)
		if err != nil {
			return nil //nolint:nilerr // it has just gone
		}
		return fn(d, disk)
	})
}

// Stamp is the stamp of a blob's unpacked form, from memory.
func (c *Copies) Stamp(d cas.Digest) (cas.Stamp, bool) {
	open := c.Store()
	if open == nil {
		return cas.Stamp{}, false
	}
	return open.Stamp(d)
}

// Check drops an unpacked form whose bytes are not what they were: it is made again when it is needed.
func (c *Copies) Check(ctx context.Context, d cas.Digest) {
	open := c.Store()
	if open == nil || !open.Has(d) {
		return
	}
	if err := open.Check(ctx, d); Broken(err) {
		c.log.Warn("unpacked blob dropped", "digest", d.String(), "why", err)
		if err := open.Remove(d); err != nil && !errors.Is(err, cas.ErrNotFound) {
			c.log.Error("unpacked blob not dropped", "digest", d.String(), "error", err)
		}
	}
}
