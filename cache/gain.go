package cache

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// gains compares the processor time of loading a compiled model and of loading its source.
// Processor time does not depend on what else the machine does. A build is measured at most once,
// right after it was stored and while nothing is compiled: at the lowest priority, in one worker
// for both loads. A compile that begins ends the measurement for good, and so does a machine that
// is too busy for it. The result is remembered beside the index, and may be lost.
type gains struct {
	c     *Cache
	ctx   context.Context
	limit time.Duration // of a measurement: gainLimit, or shorter in tests
	work  sync.WaitGroup

	// flights.mu may be held when it is taken, and is never taken with it
	mu    sync.Mutex
	known map[index.BuildID]Gain // zero: nothing is remembered either; guarded by mu
	// the build that was stored last; nil: it has been measured; guarded by mu
	next *measurement
	// ends the measurement under way; nil: there is none; guarded by mu
	stop context.CancelFunc
}

// measurement is a build that is to be loaded beside its source model.
type measurement struct {
	job     *job // its request's files are closed
	build   index.Build
	request *Request // with descriptors of its own
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

// warning says so.
func (g Gain) warning() string {
	return fmt.Sprintf("compiling gained nothing: the compiled model takes %.3f s of processor "+
		"time to load, the source model %.3f s", g.Load, g.SourceLoad)
}

func gainKey(id index.BuildID) []byte { return append([]byte("loads:"), id[:]...) }

// of gives what is known of the build. It is on the path of each hit.
func (gs *gains) of(id index.BuildID) Gain {
	gs.mu.Lock()
	g, ok := gs.known[id]
	gs.mu.Unlock()
	if ok {
		return g
	}
	if raw, ok := gs.c.index.Memo(gainKey(id)); !ok || json.Unmarshal(raw, &g) != nil {
		g = Gain{}
	}
	gs.mu.Lock()
	defer gs.mu.Unlock()
	if newer, ok := gs.known[id]; ok {
		return newer
	}
	gs.hold(id, g)
	return g
}

// hold is called with mu held.
func (gs *gains) hold(id index.BuildID, g Gain) {
	if len(gs.known) >= gainEntries {
		clear(gs.known)
	}
	gs.known[id] = g
}

func (gs *gains) save(id index.BuildID, g Gain) {
	gs.mu.Lock()
	gs.hold(id, g)
	gs.mu.Unlock()
	raw, err := json.Marshal(g)
	if err == nil {
		err = gs.c.index.SaveMemo(gainKey(id), raw)
	}
	if err != nil {
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

// after notes the build that the job just stored as the next one to measure.
func (gs *gains) after(j *job, b *index.Build) {
	if len(b.Members) > 0 || b.LoadCheck != compilers.Passed {
		return // a group's models have no load of their own to compare with
	}
	if measure := gs.c.policyOf(j.plan.eps).MeasureGain; measure != nil && !*measure {
		return
	}
	own, err := j.request.own()
	if err != nil {
		gs.c.log.Info("gain not measured", "model", b.ModelName, "build", b.BuildKey.String(),
			"error", err)
		return
	}
	gs.mu.Lock()
	defer gs.mu.Unlock()
	gs.drop()
	gs.next = &measurement{job: j, build: *b, request: own}
}

// drop forgets the build that waits. The caller holds mu.
func (gs *gains) drop() {
	if gs.next != nil {
		gs.next.request.close()
		gs.next = nil
	}
}

func (c *Cache) removeStaged(folder string) {
	if folder == "" {
		return
	}
	if err := os.RemoveAll(folder); err != nil {
		c.log.Warn("staging folder not removed", "path", folder, "error", err)
	}
}

func (gs *gains) start(ctx context.Context, c *Cache) {
	gs.c, gs.ctx, gs.limit, gs.known = c, ctx, gainLimit, make(map[index.BuildID]Gain)
}

// close waits for the measurement under way, which has ended with its context.
func (gs *gains) close() {
	gs.work.Wait()
	gs.mu.Lock()
	defer gs.mu.Unlock()
	gs.drop()
}

// disturb ends the measurement under way, if there is one. It does not wait.
func (gs *gains) disturb() {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	if gs.stop != nil {
		gs.stop()
	}
}

// idle measures the build that waits, unless something is compiled or measured now.
func (gs *gains) idle() {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	if gs.next == nil || gs.stop != nil || gs.ctx.Err() != nil {
		return
	}
	m, ctx := gs.next, context.Context(nil)
	ctx, gs.stop = context.WithCancel(gs.ctx)
	gs.next = nil
	gs.work.Go(func() {
		defer m.request.close()
		if gs.c.flights.count() == 0 { // from now on a compile that begins finds the stop to call
			gs.measure(ctx, m)
		}
		gs.mu.Lock()
		gs.stop()
		gs.stop = nil
		gs.mu.Unlock()
		if gs.c.flights.count() == 0 { // otherwise the compile calls idle when it ends
			gs.idle() // a build may have been stored meanwhile
		}
	})
}

// measure loads both forms in one worker. The build has a lease meanwhile, so the measurement ends
// without a result where the machine has no processor time for it.
func (gs *gains) measure(ctx context.Context, m *measurement) {
	limit := gs.limit + time.Duration(2*m.build.CompileSeconds*float64(time.Second))
	ctx, end := context.WithTimeout(ctx, limit)
	defer end()
	g, err := gs.compare(ctx, m)
	switch {
	case errors.Is(ctx.Err(), context.Canceled): // a compile has begun
	case err != nil:
		gs.c.log.Info("gain not measured", "model", m.build.ModelName, "build",
			m.build.BuildKey.String(), "error", err)
	default:
		gs.save(m.build.ID, g)
		if g.Loses() {
			gs.c.log.Info("compiling gained nothing", "model", m.build.ModelName, "build",
				m.build.BuildKey.String(), "load", g.Load, "source", g.SourceLoad)
		}
	}
}

func (gs *gains) compare(ctx context.Context, m *measurement) (Gain, error) {
	c, j := gs.c, m.job
	a := j.plan.against("", j.rc)
	return still(j.rc, func() (Gain, error) {
		folder, source, err := gs.source(ctx, m)
		defer func() { c.removeStaged(folder) }()
		if err != nil {
			return Gain{}, err
		}
		answer, err := c.serve(ctx, &m.build, func(string) {})
		if err != nil {
			return Gain{}, err
		}
		defer func() {
			_ = answer.View.Close() // only read
			c.views.Sweep()         // the build may have been removed meanwhile
		}()
		check := j.plan.withDimensions(a.checkJobOf(&m.build, answer))
		check.Against, check.Pace = source, compilers.Pace{Idle: make(chan struct{})}
		checked, err := c.compiler.Check(ctx, check)
		if err == nil && checked.LoadCPU <= 0 {
			err = errors.New(cmp.Or(checked.Text, "the worker reported no processor time"))
		}
		return Gain{Load: checked.LoadCPU, SourceLoad: checked.AgainstCPU}, err
	})
}

// source copies the source model into a folder, which the caller removes, and returns the path of
// the copy. The copy has to fit above the free space that is kept: otherwise a collection would
// evict builds for it.
func (gs *gains) source(ctx context.Context, m *measurement) (folder, graph string, err error) {
	if err := gs.c.fitsAboveFloor(m.request.files()); err != nil {
		return "", "", err
	}
	if folder, err = os.MkdirTemp(gs.c.path("staging"), "gain-"); err != nil {
		return "", "", err
	}
	again := &job{c: gs.c, request: m.request, plan: m.job.plan, folder: folder, name: m.job.name}
	graph, err = again.copyProven(ctx)
	return folder, graph, err
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
		return noRoom("a copy of the model takes %s; %s are free, of which %s are to stay free", bytesText(need), bytesText(free), bytesText(b.floor))
	}
	return nil
}
