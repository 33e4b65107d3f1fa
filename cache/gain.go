package cache

import (
	"cmp"
	"context"
	"errors"
	"os"
	"time"

	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store"
)

// measureGain has the build that the job just stored measured when the job has ended.
func (j *job) measureGain(b *index.Build) {
	c := j.c
	if len(b.Members) > 0 || b.LoadCheck != compilers.Passed {
		return // a group's models have no load of their own to compare with
	}
	if measure := c.policyOf(j.Plan.EPs).MeasureGain; measure != nil && !*measure {
		return
	}
	own, err := j.Request.Own() // the job's descriptors are closed by then
	if err != nil {
		c.log.Info("gain not measured", "model", b.ModelName, "build", b.BuildKey.String(), "error", err)
		return
	}
	build := *b
	c.gains.Measure(upkeep.Measurement{Build: &build, After: j.running.Done(), End: own.Close,
		Limit: c.gainLimit + time.Duration(2*b.CompileSeconds*float64(time.Second)),
		Load:  func(ctx context.Context) (upkeep.Gain, error) { return j.loadBoth(ctx, own, &build) }})
}

// loadBoth loads the build and a copy of the source model in one worker. The build has a lease
// meanwhile. The copy has to fit above the free space that is kept: otherwise a collection would
// evict builds for it.
func (j *job) loadBoth(ctx context.Context, own *request.Request, b *index.Build) (upkeep.Gain, error) {
	c := j.c
	return runtimes.Still(j.Content, func() (g upkeep.Gain, err error) {
		if err := c.fitsAboveFloor(own.AllFiles()); err != nil {
			return g, err
		}
		source, remove, err := c.workspaces.Copy(ctx, own, j.Plan.Canonical)
		defer remove()
		if err != nil {
			return g, err
		}
		answer, err := lookup.Lease(ctx, c.store, b, func(string) {})
		if err != nil {
			return g, err
		}
		defer func() {
			_ = answer.View.Close() // only read
			c.views.Sweep()         // the build may have been removed meanwhile
		}()
		check := j.Plan.WithDimensions(j.Plan.Against("", j.Content).CheckJobOf(b, answer))
		check.Against, check.Pace = source.Copies[0].Path, compilers.Pace{Idle: make(chan struct{})}
		checked, err := c.compiler.Check(ctx, check)
		if err == nil && checked.LoadCPU <= 0 {
			err = errors.New(cmp.Or(checked.Text, "the worker reported no processor time"))
		}
		return upkeep.Gain{Load: checked.LoadCPU, SourceLoad: checked.AgainstCPU}, err
	})
}

// fitsAboveFloor says so if a copy of the files, beside what is being stored, would leave less on the disk than is to stay free.
func (c *Cache) fitsAboveFloor(files []*os.File) error {
	b, err := c.store.Bounds()
	if err != nil {
		return err
	}
	var need int64
	for _, f := range files {
		info, err := f.Stat()
		if err != nil {
			return err
		}
		need += info.Size()
	}
	reserved := c.store.Ledger().Reserved()
	free := b.Free - (reserved.Disk - reserved.Written)
	if b.Floor > 0 && free-need < b.Floor {
		return store.NoRoom("a copy of the model takes %s; %s are free, of which %s are to stay free", bytesize.Text(need), bytesize.Text(free), bytesize.Text(b.Floor))
	}
	return nil
}
