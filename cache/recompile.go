package cache

import (
	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/upkeep"
)

func (c *Cache) openRecompiler() *upkeep.Recompiler {
	return upkeep.NewRecompiler(upkeep.RecompilerOptions{Index: c.index, Jobs: c.jobs, Runtimes: c.runtimes,
		Sources: c.kept, Queue: &c.rebuilds, Planner: c.planner, Happened: c.happened, Now: c.now, Log: c.log,
		Job: func(at *request.Attempt, scope string, again build.Again) (*build.Job, error) {
			return c.builder.NewJob(at, scope, again)
		},
		Policy: c.policyOf})
}
