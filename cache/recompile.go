package cache

import (
	"time"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/upkeep"
)

func (c *Cache) openRecompiler() *upkeep.Recompiler {
	return upkeep.NewRecompiler(upkeep.RecompilerOptions{Index: c.index, Jobs: c.jobs, Runtimes: c.runtimes,
		Sources: c.kept, Queue: &c.rebuilds, Planner: c.planner, Happened: c.happened, Now: c.now, Log: c.log,
		Job: func(at *request.Attempt, scope string, again upkeep.Again) (upkeep.Job, error) {
			j, err := c.newJob(at, scope)
			if err != nil {
				return nil, err
			}
			j.id, j.anew, j.replaces, j.sources, j.foreign = again.ID, again.Why, again.Replaces, again.Sources, again.Foreign
			return j, nil
		},
		Policy: c.policyOf})
}

// CPU implements upkeep.Job.
func (j *job) CPU() time.Duration { return time.Duration(j.cpu.Load()) }
