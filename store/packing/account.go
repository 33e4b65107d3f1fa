package packing

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Space is what packed blobs take besides the whole ones that are needed, in bytes on disk.
type Space struct {
	Recipes    int64
	Containers int64 // that only recipes need: literals, and blobs that nobody else needs any more; and what is about to be one, or to go
	Copies     int64 // unpacked forms, where they lie on the store's file system
}

// Sum is all of it.
func (p *Space) Sum() int64 { return p.Recipes + p.Containers + p.Copies }

// account remembers it for a moment: it is asked for with each build that is stored.
type account struct {
	mu   sync.Mutex
	at   time.Time // guarded by mu
	last Space     // guarded by mu

	between between
}

// between are blobs that are accounted for by what they take, whatever else says so.
type between struct {
	mu sync.Mutex // guards the rest

	// holds keep blobs, though no build and no recipe may need these any more.
	holds map[*cas.Hold]bool

	// moving are blobs that get another form, or are removed if they are not needed then, with
	// how many calls say so.
	moving map[cas.Digest]int
}

// hold is cas.Store.Hold of blobs that are accounted for as long as they are held. done is Release, and the end of that.
func (s *Store) hold() (hold *cas.Hold, done func()) {
	b := &s.account.between
	hold = s.whole.Hold()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.holds[hold] = true
	return hold, func() {
		s.Release(hold)
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.holds, hold)
	}
}

// moves has blobs accounted for by what they take until done, though a build may account for
// another form, or no recipe may take from them any more.
func (s *Store) moves(all ...cas.Digest) (done func()) {
	b := &s.account.between
	b.add(all, 1)
	return func() { b.add(all, -1) }
}

func (b *between) add(all []cas.Digest, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, d := range all {
		if b.moving[d] += n; b.moving[d] == 0 {
			delete(b.moving, d)
		}
	}
}

func (b *between) all() (out []cas.Digest) {
	b.mu.Lock()
	defer b.mu.Unlock()
	out = slices.Collect(maps.Keys(b.moving))
	for hold := range b.holds {
		out = append(out, hold.Kept()...)
	}
	return out
}

// Ahead is by how many bytes on disk the builds' account is above what their blobs take, of those whose form is being changed: it is brought to that when
// it is durable.
func (s *Store) Ahead() (sum int64, err error) {
	counted := make(map[cas.Digest]bool)
	for _, d := range s.account.between.all() {
		accounted, needed, err := s.memory.DiskBytes(d)
		if err != nil {
			return 0, err
		}
		if needed && !counted[d] {
			counted[d] = true
			disk, _ := cas.DiskBytesIn(s.dir, d) // of one that is not there, none
			sum += accounted - disk
		}
	}
	return sum, nil
}

// changed says that what is remembered does not hold any more.
func (a *account) changed() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at = time.Time{}
}

// accountFresh is how long it is believed.
const accountFresh = time.Second

// Space sums up. Where nothing is packed that costs nothing. Without fresh it may be what it was a second ago.
func (s *Store) Space(fresh bool) (Space, error) {
	a := &s.account
	a.mu.Lock()
	defer a.mu.Unlock()
	if !fresh && !a.at.IsZero() && time.Since(a.at) < accountFresh {
		return a.last, nil
	}
	var now Space
	err := s.shelf.Walk(context.Background(), func(_ cas.Digest, p dedupe.Packed) error {
		now.Recipes += p.Disk
		return nil
	})
	if err != nil {
		return now, err
	}
	counted := make(map[cas.Digest]bool)
	for _, d := range slices.Concat(s.shelf.Containers(), a.between.all()) { // in this order: what is no container any more is going by then
		_, needed, err := s.memory.DiskBytes(d)
		if err != nil {
			return now, err
		}
		if !needed && !counted[d] {
			counted[d] = true
			disk, _ := cas.DiskBytesIn(s.dir, d) // of one that is missing, none
			now.Containers += disk
		}
	}
	err = s.Copies.Each(context.Background(), func(_ cas.Digest, disk int64) error {
		now.Copies += disk
		return nil
	})
	if err == nil {
		a.at, a.last = time.Now(), now
	}
	return now, err
}

// Bytes gives the bytes on disk of each form of a blob, 0 for one that it does not have: whole, the recipe without its
// containers, unpacked.
func (s *Store) Bytes(d cas.Digest) (whole, recipe, unpacked int64) {
	whole, _ = cas.DiskBytesIn(s.dir, d) // of one that is not there, none
	if p, ok := s.shelf.Has(d); ok {
		recipe = p.Disk
	}
	if s.Copies.Store() != nil {
		unpacked, _ = cas.DiskBytesIn(s.Copies.dir, d) // likewise
	}
	return whole, recipe, unpacked
}
