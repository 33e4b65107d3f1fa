package cache

import (
	"errors"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// reach are the scopes of the builds that need a blob.
type reach map[string]struct{}

// may tells whether a blob of these scopes may take bytes from one of those: what is shared is for all, and what is not, for who has
// it anyway. So no user's blob stays, or is read, for the sake of another's.
func (r reach) may(theirs reach) bool {
	if _, shared := theirs["shared"]; shared {
		return true
	}
	for scope := range r {
		if _, too := theirs[scope]; !too {
			return false
		}
	}
	return len(r) > 0
}

// reachOf gives the scopes of the builds that need a blob; of a container that no build needs, those of the blobs that are packed with it.
func (c *Cache) reachOf(d cas.Digest) (reach, error) {
	out := make(reach)
	if err := c.addReach(out, d); err != nil || len(out) > 0 {
		return out, err
	}
	for _, user := range c.forms.Users(d) {
		if err := c.addReach(out, user); err != nil {
			return out, err
		}
	}
	return out, nil
}

func (c *Cache) addReach(out reach, d cas.Digest) error {
	ids, err := c.index.Needs(d)
	if err != nil {
		return err
	}
	for _, id := range ids {
		b, err := c.index.Get(id)
		if errors.Is(err, index.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		out[b.Scope] = struct{}{}
	}
	return nil
}
