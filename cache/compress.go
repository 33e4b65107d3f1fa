package cache

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/forms"
)

const defaultCompressAfter = 7 * 24 * time.Hour

// compressCold compresses what no build has needed for long enough, and makes whole again what is nothing but compressed and was used.
func (c *Cache) compressCold(ctx context.Context, when packWhen, gate forms.Gate) error {
	if err := c.thaw(ctx, when.after, gate); err != nil || when.compressAfter <= 0 {
		return err
	}
	all, err := c.forms.Compressibles(ctx)
	if err != nil {
		return err
	}
	for _, one := range all {
		if cold, err := c.allCold(one.Blob, packWhen{when: PackCold, after: when.compressAfter}); err != nil {
			return err
		} else if !cold {
			continue
		}
		if _, err := c.forms.Compress(ctx, one, gate); err != nil && !errors.Is(err, forms.ErrInUse) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			c.log.Warn("blob not compressed", "digest", one.Blob.String(), "error", err)
		}
	}
	return nil
}

func (c *Cache) thaw(ctx context.Context, after time.Duration, gate forms.Gate) error {
	all, err := c.forms.Compressed(ctx)
	for _, d := range all {
		if !c.usedWithin(d, after) {
			continue
		}
		if err2 := c.forms.Thaw(ctx, d, gate); err2 != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			c.log.Warn("compressed blob not made whole", "digest", d.String(), "error", err2)
		}
	}
	return err
}
