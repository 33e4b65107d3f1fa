package cache

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cas"
)

// removeRest removes what is kept for no build: blobs that a crash left, views that nobody refers to, and the quarantine. freed counts the
// bytes. Views that somebody holds go when they are let go.
func (c *Cache) removeRest(ctx context.Context) (freed int64, err error) {
	before, err := c.objectBytes(ctx)
	if err != nil {
		return 0, err
	}
	err = errors.Join(c.doomStrangers(ctx), c.removeLeftovers(ctx))
	c.sweepViews()
	after, err2 := c.objectBytes(ctx)
	set, err3 := c.emptyQuarantine()
	return max(0, before-after) + set, errors.Join(err, err2, err3)
}

// everything is how many bytes removeRest leaves behind none of, after all builds are gone: builds' and others'.
func (c *Cache) everything(ctx context.Context) (int64, error) {
	objects, err := c.objectBytes(ctx)
	if err != nil {
		return 0, err
	}
	entries, err := os.ReadDir(c.path("quarantine"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil { // else it is gone meanwhile
			objects += info.Size()
		}
	}
	return objects, nil
}

func (c *Cache) objectBytes(ctx context.Context) (sum int64, err error) {
	err = c.cas.Walk(ctx, func(_ cas.Digest, size int64) error {
		sum += size
		return nil
	})
	return sum, err
}

// emptyQuarantine removes what was put aside, with its notes.
func (c *Cache) emptyQuarantine() (freed int64, err error) {
	entries, err := os.ReadDir(c.path("quarantine"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	for _, e := range entries {
		info, statErr := e.Info()
		removeErr := os.Remove(filepath.Join(c.path("quarantine"), e.Name()))
		if statErr == nil && removeErr == nil {
			freed += info.Size()
		}
		if removeErr != nil && !errors.Is(removeErr, fs.ErrNotExist) {
			err = errors.Join(err, removeErr)
		}
	}
	return freed, err
}
