package upkeep

import (
	"cmp"
	"context"
	"errors"
	"os"
	"time"

	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store"
)

// MeasureBuild measures a build that the attempt's job just stored, when the job has ended.
func (gs *Gains) MeasureBuild(at *request.Attempt, b *index.Build, ended <-chan struct{}) {
	if len(b.Members) > 0 || b.LoadCheck != compilers.Passed {
		return // a group's models have no load of their own to compare with
	}
	if measure := gs.options.Policy(at.Plan.EPs).MeasureGain; measure != nil && !*measure {
		return
	}
	own, err := at.Own() // the job's descriptors are closed by then
	if err != nil {
		gs.options.Log.Info("gain not measured", "model", b.ModelName, "build", b.BuildKey.String(),
			"error", err)
		return
	}
	build := *b
	at = at.WithRequest(own)
	gs.Measure(Measurement{Build: &build, After: ended, End: own.Close,
		Limit: cmp.Or(gs.Limit, gainLimit) + time.Duration(2*b.CompileSeconds*float64(time.Second)),
		Load:  func(ctx context.Context) (Gain, error) { return gs.loadBoth(ctx, at, &build) }})
}

// loadBoth loads the build and a copy of the source model in one worker. The build has a lease
// meanwhile. The copy has to fit above the free space that is kept: otherwise a collection would
// evict builds for it.
func (gs *Gains) loadBoth(ctx context.Context, at *request.Attempt, b *index.Build) (Gain, error) {
	o := &gs.options
	return runtimes.Still(at.Content, func() (g Gain, err error) {
		if err := fitsAboveFloor(o.Store, at.AllFiles()); err != nil {
			return g, err
		}
		source, remove, err := o.Workspaces.Copy(ctx, at.Request, at.Plan.Canonical)
		defer remove()
		if err != nil {
			return g, err
		}
		answer, err := lookup.Lease(ctx, o.Store, b, func(string) {})
		if err != nil {
			return g, err
		}
		defer func() {
			_ = answer.View.Close() // only read
			o.Store.Views().Sweep() // the build may have been removed meanwhile
		}()
		check := at.Plan.WithDimensions(at.Plan.Against("", at.Content).CheckJobOf(b, answer))
		check.Against, check.Pace = source.Copies[0].Path, compilers.Pace{Idle: make(chan struct{})}
		checked, err := o.Compiler.Check(ctx, check)
		if err == nil && checked.LoadCPU <= 0 {
			err = errors.New(cmp.Or(checked.Text, "the worker reported no processor time"))
		}
		return Gain{Load: checked.LoadCPU, SourceLoad: checked.AgainstCPU}, err
	})
}

// fitsAboveFloor fails if a copy of the files, beside what is being stored, would leave less free
// space on the disk than the store keeps.
func fitsAboveFloor(st *store.Store, files []*os.File) error {
	b, err := st.Bounds()
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
	reserved := st.Ledger().Reserved()
	free := b.Free - (reserved.Disk - reserved.Written)
	if b.Floor > 0 && free-need < b.Floor {
		return store.NoRoom("a copy of the model takes %s; %s are free, of which %s are to stay free",
			bytesize.Text(need), bytesize.Text(free), bytesize.Text(b.Floor))
	}
	return nil
}
