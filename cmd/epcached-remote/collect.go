package main

import (
	"context"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// collectGrace is the age below which objects are not collected, because a publisher may be about
// to need them.
const collectGrace = 24 * time.Hour

// found is an object that a collection has seen.
type found struct {
	name     string
	size     int64
	modified time.Time
}

// collection marks the objects that cards of the current and the previous epoch need, and removes
// the others.
type collection struct {
	*store
	call  *call
	now   time.Time
	epoch int64

	mu     sync.Mutex // guards the fields below
	needed map[portable.Digest]bool
	seen   map[string]bool // cards that were read
	done   int64
	total  int64
}

// collect removes the cards that no look-up can find any more, blobs that no other card needs, and
// expired leases and checks. If a card cannot be read, it fails before it removes any object. If it
// removes a blob that a publisher is about to need, readers treat that card as missing, and the
// next publisher uploads the blob again.
func (s *store) collect(ctx context.Context, c *call) ([]remote.Kind, error) {
	g := &collection{store: s, call: c, now: s.engine.clock(), epoch: s.epoch(),
		needed: make(map[portable.Digest]bool), seen: make(map[string]bool)}
	if _, err := s.engine.stat(ctx, layoutName); err != nil {
		return nil, err // unreachable, or not a remote
	}
	cards, err := g.mark(ctx)
	if err != nil {
		return nil, err
	}
	kinds := []remote.Kind{{Name: "cards"}, {Name: "blobs"}, {Name: "leases"}, {Name: "checks"}}
	for i, prefix := range []string{"", blobsName, "v1/leases/", checkName} {
		all, dead := cards, g.deadCard
		if prefix != "" {
			if all, err = g.list(ctx, prefix); err != nil {
				return nil, err
			}
			dead = func(o *found) bool { return prefix != blobsName || !g.isNeeded(o.name) }
		}
		if prefix == blobsName { // mark cards that were added in the meantime
			if _, err := g.mark(ctx); err != nil {
				return nil, err
			}
		}
		if err := g.sweep(ctx, &kinds[i], all, dead); err != nil {
			return nil, err
		}
	}
	return kinds, nil
}

func (g *collection) list(ctx context.Context, prefix string) (all []found, err error) {
	err = g.engine.walk(ctx, prefix, func(name string, o *object) error {
		all = append(all, found{name, o.size, o.modified})
		return ctx.Err()
	})
	return all, err
}

// mark reads the cards that look-ups find, and records the blobs that they need. It returns all
// cards.
func (g *collection) mark(ctx context.Context) (cards []found, err error) {
	for _, prefix := range []string{"v1/builds/", "v1/requests/"} {
		some, err := g.list(ctx, prefix)
		if err != nil {
			return nil, err
		}
		cards = append(cards, some...)
	}
	all, limited := errgroup.WithContext(ctx)
	all.SetLimit(8)
	for i := range cards {
		if o := &cards[i]; !g.deadCard(o) && !g.seen[o.name] {
			g.seen[o.name] = true
			all.Go(func() error { return g.markCard(limited, o.name) })
		}
	}
	return cards, all.Wait()
}

func (g *collection) markCard(ctx context.Context, name string) error {
	raw, _, err := small(ctx, g.engine, name, remote.MaxCard)
	if isClass(err, remote.ErrMissing) {
		return nil // it was removed in the meantime
	}
	var card *portable.Card
	if err == nil {
		card, err = portable.ParseCard(name, raw)
	}
	if err != nil {
		return fail("damaged", "%v: it may need blobs, so that nothing more is removed: remove "+
			"it, or collect with a newer epcached", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, d := range card.Blobs() {
		g.needed[d] = true
	}
	return nil
}

// deadCard reports whether no look-up finds the card: it is of an earlier epoch than the previous
// one, or an interrupted write has left it.
func (g *collection) deadCard(o *found) bool {
	parts := strings.Split(o.name, "/") // v1, builds, epoch, ...
	epoch, err := strconv.ParseInt(parts[min(2, len(parts)-1)], 10, 64)
	return strings.HasPrefix(path.Base(o.name), ".new-") || err == nil && epoch < g.epoch-1
}

func (g *collection) isNeeded(name string) bool {
	var d portable.Digest
	err := d.UnmarshalText([]byte("sha256:" + strings.TrimPrefix(name, blobsName)))
	return err == nil && g.needed[d]
}

// sweep removes the objects for which dead is true.
func (g *collection) sweep(ctx context.Context, k *remote.Kind, objects []found,
	dead func(*found) bool) error {
	all, limited := errgroup.WithContext(ctx)
	all.SetLimit(8)
	g.total += int64(len(objects))
	for i := range objects {
		o := &objects[i]
		young := o.modified.IsZero() || g.now.Sub(o.modified) < collectGrace
		isDead := dead(o)
		if !isDead || young {
			k.Kept++
			if isDead {
				k.Young++
			}
			g.step()
			continue
		}
		k.Removed++
		k.Bytes += o.size
		all.Go(func() error {
			defer g.step()
			if g.call.request.DryRun {
				return nil
			}
			err := g.engine.remove(limited, o.name)
			if isClass(err, remote.ErrMissing) {
				return nil
			}
			return err
		})
	}
	return all.Wait()
}

func (g *collection) step() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.done++; g.done%256 == 0 || g.done == g.total {
		g.call.progress(remote.Progress{Done: g.done, Total: g.total})
	}
}
