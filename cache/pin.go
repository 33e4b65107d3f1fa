package cache

import (
	"context"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// Pin has the builds that the names mean kept whatever space is short, and those that are made in their place. With
// dryRun it tells what it would do.
func (c *Cache) Pin(ctx context.Context, p request.Peer, names []string, dryRun bool) (*wire.ChangeReply,
	error) {
	return c.changePins(ctx, p, names, dryRun, func(b *index.Build) error {
		return c.index.Journal.Pin(b.ID, index.Pin{At: c.now(), UID: p.UID})
	})
}

// Unpin takes that back. It is no error if a build was not pinned.
func (c *Cache) Unpin(ctx context.Context, p request.Peer, names []string, dryRun bool) (*wire.ChangeReply,
	error) {
	return c.changePins(ctx, p, names, dryRun, func(b *index.Build) error { return c.index.Journal.Unpin(b.ID) })
}

func (c *Cache) changePins(ctx context.Context, p request.Peer, names []string, dryRun bool,
	change func(*index.Build) error) (*wire.ChangeReply, error) {
	ids, err := c.changeable(ctx, p, names)
	if err != nil {
		return nil, err
	}
	out := c.changed(p)
	err = c.eachOf(ctx, ids, func(b *index.Build) error {
		if !dryRun {
			if err := change(b); err != nil {
				return request.StoreError(err, b.ModelName)
			}
		}
		return out.took(b)
	})
	return out.reply, err
}
