package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/index"
)

// unkept is the end of what made a build that cannot be stored. That is no reason not to serve what is made and checked: the
// application waits for it.
func (c *Cache) unkept(b *index.Build, out string, why error) (*compiled, error) {
	text := "not kept: " + why.Error()
	var e *Error
	if errors.As(why, &e) && e.Class == NoSpace {
		c.index.Count("unkept", 1)
		c.log.Warn("build not kept", "model", b.ModelName, "why", e.Text)
		c.happened(eventOf(b, EventUnkept, "%s", e.Text))
		if e.Hint != "" {
			text += "; " + e.Hint
		}
	} else {
		c.log.Error("build not stored", "model", b.ModelName, "error", why)
		c.lookAround()
	}
	b.Warnings = append(b.Warnings[:len(b.Warnings):len(b.Warnings)], text)
	result, err := c.keepAlone(b, out)
	if err == nil {
		result.why = text
	}
	return result, err
}

// keepAlone makes a view that only those who wait for it now will hold; nothing of it is kept.
func (c *Cache) keepAlone(b *index.Build, out string) (*compiled, error) {
	v, err := c.newView(unkept, b.Graph, false)
	if err != nil {
		return nil, storeError(err, b.ModelName)
	}
	for i := range b.Files {
		if err := c.moveFile(v, &b.Files[i], out); err != nil {
			c.discardView(v)
			return nil, storeError(err, b.ModelName)
		}
		v.files = append(v.files, viewFile{name: b.Files[i].Name, copied: true})
	}
	if err := c.sealView(v); err != nil {
		return nil, storeError(err, b.ModelName)
	}
	c.doomLater(v) // nobody finds it again: it goes with its last holder
	return &compiled{build: b, alone: v}, nil
}

// moveFile moves a staged file into the view, or links the blob that it has become already.
func (c *Cache) moveFile(v *view, f *index.File, out string) error {
	if !f.Digest.IsZero() {
		_, err := c.linkFile(context.Background(), v, *f)
		return err
	}
	to := filepath.Join(v.path, v.id, filepath.FromSlash(f.Name))
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return err
	}
	from := filepath.Join(out, filepath.FromSlash(f.Name))
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	f.Size = info.Size()
	return errors.Join(os.Chmod(from, 0o444), os.Rename(from, to))
}
