package cache

import (
	"errors"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
)

// unkept is the end of what made a build that cannot be stored. That is no reason not to serve what is made and checked: the
// application waits for it.
func (c *Cache) unkept(b *index.Build, out string, why error) (*compiled, error) {
	text := "not kept: " + textOf(why)
	var e *refusal.Error
	if errors.As(why, &e) && e.Class == refusal.NoSpace && e.Hint != "" {
		text += "; " + e.Hint
	}
	result, err := c.aloneFor(b, out, text)
	if err == nil {
		c.notKept(b, why)
	}
	return result, err
}

// aloneFor serves a build that is not kept, with a warning that says why.
func (c *Cache) aloneFor(b *index.Build, out, why string) (*compiled, error) {
	b.Warnings = append(b.Warnings[:len(b.Warnings):len(b.Warnings)], why)
	result, err := c.keepAlone(b, out)
	if err == nil {
		result.why = why
	}
	return result, err
}

// notKept tells what was served and is not kept, once that is certain.
func (c *Cache) notKept(b *index.Build, why error) {
	if storeClass(why) == refusal.NoSpace {
		c.index.Count("unkept", 1)
		c.log.Warn("build not kept", "model", b.ModelName, "why", textOf(why))
	} else {
		c.log.Error("build not stored", "model", b.ModelName, "error", why)
		c.lookAround()
	}
	c.happened(eventUnkept(b, EventUnkept, "%s", textOf(why)))
}

// eventUnkept is an event of a result that is not in the store: who asked for it hears of it.
func eventUnkept(b *index.Build, kind, format string, args ...any) Event {
	e := eventOf(b, kind, format, args...)
	e.scope = e.by
	return e
}

// textOf is what an error says, without the hint.
func textOf(err error) string {
	var e *refusal.Error
	if errors.As(err, &e) {
		return e.Text
	}
	return err.Error()
}

// keepAlone makes a view that only those who wait for it now will hold; nothing of it is kept.
func (c *Cache) keepAlone(b *index.Build, out string) (*compiled, error) {
	v, err := c.views.Alone(b, out)
	if err != nil {
		return nil, storeError(err, b.ModelName)
	}
	return &compiled{build: b, alone: v}, nil
}
