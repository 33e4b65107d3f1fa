package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/internal/memo"
)

// gains compares the processor time of loading a compiled model and of loading its source.
// Processor time does not depend on what else the machine does. A build is measured at most once,
// right after its job, if nothing is compiled then: at the lowest priority, in one worker for both
// loads. A compile that begins ends the measurement for good, and so does a machine that is too busy
// for it. The result is remembered beside the index, and may be lost.
type gains struct {
	c     *Cache
	ctx   context.Context
	limit time.Duration // of a measurement: gainLimit, or shorter in tests
	work  sync.WaitGroup

	measuring sync.Mutex // held by the measurement under way
	stop      atomic.Pointer[context.CancelFunc]

	known memo.Table[index.BuildID, Gain] // zero: nothing is remembered either
	mu    sync.Mutex                      // held while what is remembered beside the index is read, or changed
}

const gainEntries = 1 << 16

// gainLimit is how long a measurement may take, besides twice what the compile took.
const gainLimit = 5 * time.Second

// Bounds of noise, of two loads measured one after the other in the same process: they differ by
// more than a quarter and by more than these processor seconds.
const (
	gainRatio  = 1.25
	gainMargin = 0.01
)

// Loses tells whether the compiled form takes more processor time to load than the source model, by
// a clear margin.
func (g Gain) Loses() bool {
	return g.SourceLoad > 0 && g.Load > gainRatio*g.SourceLoad && g.Load > g.SourceLoad+gainMargin
}

func (g Gain) warning() string {
	return fmt.Sprintf("compiling gained nothing: the compiled model takes %.3f s of processor "+
		"time to load, the source model %.3f s", g.Load, g.SourceLoad)
}

func gainKey(id index.BuildID) string { return "loads:" + string(id[:]) }

// of gives what is known of the build. It is on the path of each hit.
func (gs *gains) of(id index.BuildID) Gain {
	g, ok := gs.known.Load(id)
	if ok {
		return g
	}
	gs.mu.Lock()
	defer gs.mu.Unlock()
	g, _ = memo.Recall[Gain](&gs.c.index.Memos, gainKey(id))
	gs.known.Save(id, g, gainEntries)
	return g
}

func (gs *gains) save(id index.BuildID, g Gain) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	gs.known.Save(id, g, gainEntries)
	if err := memo.Save(&gs.c.index.Memos, gainKey(id), g); err != nil {
		gs.c.log.Warn("measured gain not kept", "build", id.String(), "error", err)
	}
}

// warnings are for whoever is given the build.
func (gs *gains) warnings(id index.BuildID) []string {
	if g := gs.of(id); g.Loses() {
		return []string{g.warning()}
	}
	return nil
}

// after has the build that the job just stored measured when the job has ended.
func (gs *gains) after(j *job, b *index.Build) {
	if len(b.Members) > 0 || b.LoadCheck != compilers.Passed {
		return // a group's models have no load of their own to compare with
	}
	if measure := gs.c.policyOf(j.plan.eps).MeasureGain; measure != nil && !*measure {
		return
	}
	own, err := j.Request.own()
	if err != nil {
		gs.tell("gain not measured", b, "error", err)
		return
	}
	build := *b
	gs.work.Go(func() {
		defer own.close()
		select {
		case <-j.flight.done:
		case <-gs.ctx.Done():
			return
		}
		gs.measuring.Lock()
		defer gs.measuring.Unlock()
		ctx, stop := context.WithCancel(gs.ctx)
		defer stop()
		gs.stop.Store(&stop)
		if gs.c.flights.count() == 0 { // from now on a compile that begins finds the stop to call
			gs.measure(ctx, j, own, &build)
		}
	})
}

func (gs *gains) tell(what string, b *index.Build, more ...any) {
	more = append([]any{"model", b.ModelName, "build", b.BuildKey.String()}, more...)
	gs.c.log.Info(what, more...)
}

func (gs *gains) start(ctx context.Context, c *Cache) { gs.c, gs.ctx, gs.limit = c, ctx, gainLimit }

// disturb ends the measurement under way, if there is one. It does not wait.
func (gs *gains) disturb() {
	if stop := gs.stop.Load(); stop != nil {
		(*stop)()
	}
}

// measure loads both forms in one worker. The build has a lease meanwhile, so the measurement ends
// without a result where the machine has no processor time for it. own is the job's request with
// descriptors of its own, because those of the job are closed.
func (gs *gains) measure(ctx context.Context, j *job, own *Request, b *index.Build) {
	limit := gs.limit + time.Duration(2*b.CompileSeconds*float64(time.Second))
	ctx, end := context.WithTimeout(ctx, limit)
	defer end()
	g, err := gs.compare(ctx, j, own, b)
	switch {
	case errors.Is(ctx.Err(), context.Canceled): // a compile has begun
	case err != nil:
		gs.tell("gain not measured", b, "error", err)
	default:
		gs.save(b.ID, g)
		if g.Loses() {
			gs.tell("compiling gained nothing", b, "load", g.Load, "source", g.SourceLoad)
		}
	}
}

// compare loads a copy of the source model, which has to fit above the free space that is kept:
// otherwise a collection would evict builds for it.
func (gs *gains) compare(ctx context.Context, j *job, own *Request, b *index.Build) (Gain, error) {
	c := gs.c
	return still(j.rc, func() (g Gain, err error) {
		if err := c.fitsAboveFloor(own.files()); err != nil {
			return g, err
		}
		source, remove, err := c.copied(ctx, own, j.plan.canonical)
		defer remove()
		if err != nil {
			return g, err
		}
		answer, err := c.serve(ctx, b, func(string) {})
		if err != nil {
			return g, err
		}
		defer func() {
			_ = answer.View.Close() // only read
			c.views.Sweep()         // the build may have been removed meanwhile
		}()
		check := j.plan.withDimensions(j.plan.against("", j.rc).checkJobOf(b, answer))
		check.Against, check.Pace = source.copies[0].path, compilers.Pace{Idle: make(chan struct{})}
		checked, err := c.compiler.Check(ctx, check)
		if err == nil && checked.LoadCPU <= 0 {
			err = errors.New(cmp.Or(checked.Text, "the worker reported no processor time"))
		}
		return Gain{Load: checked.LoadCPU, SourceLoad: checked.AgainstCPU}, err
	})
}

// fitsAboveFloor says so if a copy of the files, beside what is being stored, would leave less on the disk than is to stay free.
func (c *Cache) fitsAboveFloor(files []*os.File) error {
	b, err := c.bounds()
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
	c.places.mu.Lock()
	free := b.free - (c.places.reserved - c.places.written)
	c.places.mu.Unlock()
	if b.floor > 0 && free-need < b.floor {
		return noRoom("a copy of the model takes %s; %s are free, of which %s are to stay free", bytesize.Text(need), bytesize.Text(free), bytesize.Text(b.floor))
	}
	return nil
}
