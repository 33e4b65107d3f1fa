package cache

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/forms"
)

const defaultCompressAfter = 7 * 24 * time.Hour

// compressCold compresses what no build has needed for long enough.
func (c *Cache) compressCold(ctx context.Context, when packWhen, gate forms.Gate) error {
	if when.compressAfter <= 0 {
		return nil
	}
	all, err := c.forms.Compressibles(ctx)
	if err != nil {
		return err
	}
	for _, one := range all {
		stillCold := func(ctx context.Context) error {
			cold, err := c.allCold(one.Blob, packWhen{when: PackCold, after: when.compressAfter})
			if err == nil && !cold {
				err = forms.ErrInUse
			}
			return err
		}
		if err := stillCold(ctx); errors.Is(err, forms.ErrInUse) {
			continue
		} else if err != nil {
			return err
		}
		_, err := c.forms.Compress(ctx, one, func(ctx context.Context) error {
			if err := gate(ctx); err != nil {
				return err
			}
			c.flushUses()
			return stillCold(ctx)
		})
		if err != nil && !errors.Is(err, forms.ErrInUse) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			c.log.Warn("blob not compressed", "digest", one.Blob.String(), "error", err)
		}
	}
	return nil
}

// thaw makes whole again what frees little while it is packed, and was used since: it has a copy.
func (c *Cache) thaw(ctx context.Context, after time.Duration, gate forms.Gate) error {
	all, err := c.forms.MostlyOwn(ctx)
	for _, d := range all {
		if _, _, unpacked := c.forms.Bytes(d); unpacked == 0 || !c.usedWithin(d, after) {
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
