package cache

import (
	"context"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/plan"
	"github.com/epcached/epcached/cache/runtimes"
)

// openRuntimes makes the set of runtimes, which is started when all that it calls is there.
func (c *Cache) openRuntimes() {
	o := &c.options
	c.runtimes = runtimes.New(runtimes.Options{Compiler: c.compiler, Runtimes: o.Runtimes,
		Drivers: o.Drivers, Quiet: o.Quiet, Poll: o.Poll, UID: c.uid,
		Book: &c.index.Memos, Now: c.now, Log: c.log, Event: c.store.Happened,
		Inquire: func(ctx context.Context, q runtimes.Question,
			find func(context.Context) (any, error)) (any, error) {
			who := jobs.Caller{UID: q.Asker.UID, Name: q.Asker.Model, Idle: !q.Asker.Request}
			return c.jobs.Inquire(ctx, q.Key, who, q.EP, find)
		},
		Assessed: func(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content,
			former map[string]string, told bool) bool {
			return c.judges.All(ctx, rt, rc, former, told)
		},
		Attach: func() any { return &plan.Notes{} },
		ReadShown: func(ctx context.Context, uid uint32) (func(), error) {
			return c.reading.Lock(ctx, c.owners.Of(uid))
		},
	})
}
