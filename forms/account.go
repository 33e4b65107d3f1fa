package forms

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

func newAccount() account {
	return account{between: between{holds: make(map[*cas.Hold]bool), departing: make(map[cas.Digest]int), changing: make(map[cas.Digest]int)}}
}

// between are blobs that have a file and may be in nobody's account just then: neither does a build need them nor, yet or any more, a recipe.
type between struct {
	mu        sync.Mutex
	holds     map[*cas.Hold]bool // what these keep stays, whoever has been removed that needed it; guarded by mu
	departing map[cas.Digest]int // what the last recipe gives up that takes from it, until it is removed; how many say so; guarded by mu
	changing  map[cas.Digest]int // whose form is another than the index accounts for, until it is measured anew; likewise
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

// departs says of a blob that it is to be removed if nobody needs it then: until done it is accounted for, though no recipe takes from it any more.
func (s *Store) departs(d cas.Digest) (done func()) {
	return s.account.between.note(s.account.between.departing, d)
}

// changes says of a blob that it gets another form, or loses one, which its builds account for when that is done.
func (s *Store) changes(d cas.Digest) (done func()) {
	return s.account.between.note(s.account.between.changing, d)
}

func (b *between) note(in map[cas.Digest]int, d cas.Digest) (done func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	in[d]++
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if in[d]--; in[d] == 0 {
			delete(in, d)
		}
	}
}

// all lists the blobs that are held or depart.
func (b *between) all() (out []cas.Digest) {
	b.mu.Lock()
	defer b.mu.Unlock()
	out = slices.Collect(maps.Keys(b.departing))
	for hold := range b.holds {
		out = append(out, hold.Kept()...)
	}
	return out
}

// Ahead is by how many bytes on disk the builds' account is above what their blobs take, of those whose form is being changed: it is brought to that when
// it is durable.
func (s *Store) Ahead() (sum int64, err error) {
	b := &s.account.between
	b.mu.Lock()
	changing := slices.Collect(maps.Keys(b.changing))
	b.mu.Unlock()
	for _, d := range changing {
		accounted, needed, err := s.memory.DiskBytes(d)
		if err != nil {
			return 0, err
		}
		if needed {
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
	err = s.EachCopy(context.Background(), func(_ cas.Digest, disk int64) error {
		now.Copies += disk
		return nil
	})
	if err == nil {
		a.at, a.last = time.Now(), now
	}
	return now, err
}
