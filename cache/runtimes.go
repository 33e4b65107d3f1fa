package cache

import (
	"context"

	"github.com/epcached/epcached/cache/runtimes"
)

// openRuntimes makes the set of runtimes, which is started when all that it calls is there.
func (c *Cache) openRuntimes() {
	o := &c.options
	c.runtimes = runtimes.New(runtimes.Options{
		Compiler: c.compiler, Runtimes: o.Runtimes, Drivers: o.Drivers, Quiet: o.Quiet, Poll: o.Poll, UID: c.uid,
		Book: &c.index.Memos, Now: c.now, Log: c.log,
		Event: c.happened, Inquire: c.flights.inquire, Assessed: c.judgeAll, Attach: func() any { return &notes{} },
		ReadShown: func(ctx context.Context, uid uint32) (func(), error) {
			return c.reading.Lock(ctx, c.owners.Of(uid))
		},
	})
}

// notes are what is remembered of one runtime for as long as its libraries are what they are.
type notes struct {
	plans    plans
	verdicts judged // of builds that others made
}

// notesOn gives the notes on a runtime's libraries, empty ones where it is not looked at.
func notesOn(rc *runtimes.Content) *notes {
	if n, ok := rc.Attached.(*notes); ok {
		return n
	}
	return &notes{}
}
