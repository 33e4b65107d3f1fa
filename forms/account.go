package forms

import (
	"context"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Space is what packed blobs take besides the whole ones that are needed, in bytes on disk.
type Space struct {
	Recipes    int64
	Containers int64 // that only recipes need: literals, and blobs that nobody else needs any more
	Copies     int64 // unpacked forms, where they lie on the store's file system
}

// Sum is all of it.
func (p *Space) Sum() int64 { return p.Recipes + p.Containers + p.Copies }

// account remembers it for a moment: it is asked for with each build that is stored.
type account struct {
	mu   sync.Mutex
	at   time.Time // guarded by mu
	last Space     // guarded by mu
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
	for _, d := range s.shelf.Containers() {
		_, needed, err := s.memory.DiskBytes(d)
		if err != nil {
			return now, err
		}
		if !needed {
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
