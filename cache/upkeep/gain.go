package upkeep

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/store"
)

// Gain has the processor seconds of loading a build and of loading its source model; 0: not
// measured.
type Gain struct {
	Load, SourceLoad float64
}

// Two loads, measured one after the other in the same process, differ significantly if they differ
// by more than a quarter and by more than gainMargin processor seconds.
const (
	gainRatio  = 1.25
	gainMargin = 0.01
)

// IsLoss reports whether loading the build takes significantly longer than loading the source.
func (g Gain) IsLoss() bool {
	return g.SourceLoad > 0 && g.Load > gainRatio*g.SourceLoad && g.Load > g.SourceLoad+gainMargin
}

// Warnings returns warnings for the application that gets the build.
func (g Gain) Warnings() []string {
	if !g.IsLoss() {
		return nil
	}
	return []string{fmt.Sprintf("compiling brought no gain: the compiled model takes %s of "+
		"processor time to load, the source model %s", bytesize.Seconds(g.Load),
		bytesize.Seconds(g.SourceLoad))}
}

// Gains measures the processor time of loading a build and of loading its source. Unlike elapsed
// time, processor time hardly depends on other load. A build is measured at most once, after its
// job, if no compile is under way: at the lowest priority, with one worker for both loads. If a
// compile begins, or the machine is too busy, the measurement is abandoned and not repeated. The
// result is remembered beside the index, and may be lost.
type Gains struct {
	Limit   time.Duration // longest measurement, beyond twice the time of the compile; 0: 5 s
	builder *build.Builder
	ctx     context.Context
	work    sync.WaitGroup

	measuring sync.Mutex // held by the measurement under way
	stop      atomic.Pointer[context.CancelFunc]

	known memo.Table[index.BuildID, Gain] // zero: not measured
	// mu is held while the memos beside the index are read or changed.
	mu sync.Mutex
}

const (
	gainEntries = 1 << 16
	gainLimit   = 5 * time.Second
)

// Start makes measuring possible until the context ends.
func (gs *Gains) Start(ctx context.Context, bd *build.Builder) { gs.builder, gs.ctx = bd, ctx }

// Wait waits for the measurements under way.
func (gs *Gains) Wait() { gs.work.Wait() }

// Interrupt ends the measurement under way, because a compile begins. It does not wait.
func (gs *Gains) Interrupt() {
	if stop := gs.stop.Load(); stop != nil {
		(*stop)()
	}
}

// ForBuild returns the measured gain of the build. It is on the path of each hit.
func (gs *Gains) ForBuild(id index.BuildID) Gain {
	g, ok := gs.known.Load(id)
	if ok {
		return g
	}
	gs.mu.Lock()
	defer gs.mu.Unlock()
	g, _ = memo.Recall[Gain](&gs.builder.Store.Index().Memos, gainKey(id))
	gs.known.Save(id, g, gainEntries)
	return g
}

func (gs *Gains) save(id index.BuildID, g Gain) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	gs.known.Save(id, g, gainEntries)
	if err := memo.Save(&gs.builder.Store.Index().Memos, gainKey(id), g); err != nil {
		gs.builder.Log.Warn("cannot record a measured gain", "build", id.String(), "error", err)
	}
}

func gainKey(id index.BuildID) string { return "loads:" + string(id[:]) }

func (gs *Gains) measure(ctx context.Context, at *request.Attempt, b *index.Build) {
	limit := cmp.Or(gs.Limit, gainLimit) + time.Duration(2*b.CompileSeconds*float64(time.Second))
	ctx, end := context.WithTimeout(ctx, limit)
	defer end()
	log := gs.builder.Log.With("model", b.ModelName, "build", b.BuildKey.String())
	g, err := gs.loadBoth(ctx, at, b)
	switch {
	case errors.Is(ctx.Err(), context.Canceled): // a compile has begun
	case err != nil:
		log.Info("cannot measure the gain", "error", err)
	default:
		gs.save(b.ID, g)
		if g.IsLoss() {
			log.Info("compiling brought no gain", "load", g.Load, "source", g.SourceLoad)
		}
	}
}

// MeasureBuild measures a build that the attempt's job just stored, in the background, unless a
// compile is under way when the job has ended.
func (gs *Gains) MeasureBuild(at *request.Attempt, b *index.Build, ended <-chan struct{}) {
	if len(b.Members) > 0 || b.LoadCheck != compilers.Passed {
		return // the models of a group are not loaded separately
	}
	if measure := gs.builder.Policy(at.Plan.EPs).MeasureGain; measure != nil && !*measure {
		return
	}
	own, err := at.WithOwnFiles() // because the job closes its descriptors
	if err != nil {
		gs.builder.Log.Info("cannot measure the "+
			"gain", "model", b.ModelName, "build", b.BuildKey.String(),
			"error", err)
		return
	}
	stored := *b
	at = at.WithRequest(own)
	gs.work.Go(func() {
		defer own.Close()
		select {
		case <-ended:
		case <-gs.ctx.Done():
			return
		}
		gs.measuring.Lock()
		defer gs.measuring.Unlock()
		ctx, stop := context.WithCancel(gs.ctx)
		defer stop()
		gs.stop.Store(&stop)
		// after stop is set, so that a compile which begins now interrupts it
		if gs.builder.Jobs.Count() == 0 {
			gs.measure(ctx, at, &stored)
		}
	})
}

// loadBoth loads the build and a copy of the source model in one worker. It holds a lease on the
// build. The copy has to fit into the free space above the store's floor, because otherwise a
// collection would evict builds for it.
func (gs *Gains) loadBoth(ctx context.Context, at *request.Attempt, b *index.Build) (Gain, error) {
	o := gs.builder
	return runtimes.RunUnreplaced(at.Content, func() (g Gain, err error) {
		if err := fitsAboveFloor(o.Store, at.AllFiles()); err != nil {
			return g, err
		}
		source, remove, err := o.Workspaces.CopyModels(ctx, at.Request, at.Plan.Canonical)
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
			o.Store.Views().Sweep() // the build may have been removed in the meantime
		}()
		check := at.Plan.WithDimensions(at.Plan.JudgeTarget("", at.Content).CheckJobOf(b, answer))
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
	if free := b.Free - (reserved.Disk - reserved.Written); b.Floor > 0 && free-need < b.Floor {
		return store.NoSpace("a copy of the model takes %s; %s are free, of which %s must stay "+
			"free",
			bytesize.Text(need), bytesize.Text(free), bytesize.Text(b.Floor))
	}
	return nil
}
