package cache

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// gains find out what compiling brought: how long the source model takes to load, with the same execution providers and
// options and in a process of its own, as the compiled form did when it was checked. It is done after the answer, at the
// lowest priority, one at a time, and only while nothing is compiled; a compile that begins ends it, and it is begun
// again later. What is found is remembered beside the index, and may be lost.
type gains struct {
	c    *Cache
	work sync.WaitGroup

	mu      sync.Mutex             // flights.mu may be held when it is taken, and is never taken with it
	known   map[index.BuildID]Gain // zero: nothing is remembered either; guarded by mu
	todo    []*measurement         // guarded by mu
	stop    context.CancelFunc     // ends the measurement under way; nil: there is none; guarded by mu
	changed chan struct{}          // closed, and made anew, when there may be something to do; guarded by mu
}

// measurement is a build whose source model is to be loaded.
type measurement struct {
	job   *job // its request's files are closed
	build index.Build
	tries int

	// request has the files that were compiled, to be copied when they are loaded; nil where it has to be the source that is kept. The private copy
	// of a compile does not wait for that: it would take its room for as long as other models are compiled, in nobody's account.
	request *Request
}

const (
	maxOpen         = 4 // whose files are held open until they are measured
	maxMeasurements = 64
	maxDisturbed    = 5
	gainEntries     = 1 << 16
)

// Loses tells whether the compiled form takes longer to load than the source model, by more than chance would have it.
func (g Gain) Loses() bool { return g.SourceLoad > 0 && g.Load > 1.05*g.SourceLoad }

// warning says so.
func (g Gain) warning() string {
	return fmt.Sprintf("compiling gained nothing: the compiled model loads in %.3f s, the source model in %.3f s", g.Load, g.SourceLoad)
}

func gainKey(id index.BuildID) []byte { return append([]byte("gain:"), id[:]...) }

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

// after has the source of a build measured that the job just stored.
func (gs *gains) after(j *job, b *index.Build, over bool) {
	if j.load == 0 || len(b.Members) > 0 {
		return // it was not loaded here; or it is a group, whose models have no load of their own to compare with
	}
	gs.save(b.ID, Gain{Load: j.load})
	if measure := gs.c.policyOf(j.plan.eps).MeasureGain; measure != nil && !*measure {
		return
	}
	m := &measurement{job: j, build: *b}
	if !over { // else it has to be where the build says that it is
		m.request, _ = j.request.own() // likewise without descriptors to spare
	}
	gs.add(m)
}

func (gs *gains) add(m *measurement) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	if len(gs.todo) >= maxMeasurements || gs.open() >= maxOpen {
		m.closeRequest()
	}
	if len(gs.todo) < maxMeasurements && m.hasSource() {
		gs.todo = append(gs.todo, m)
		gs.wakeLocked()
	}
}

// open counts those whose files are held open. The caller holds mu.
func (gs *gains) open() int {
	n := 0
	for _, m := range gs.todo {
		if m.request != nil {
			n++
		}
	}
	return n
}

// hasSource tells whether there is something to load.
func (m *measurement) hasSource() bool { return m.request != nil || m.build.Source.Kind != "" }

func (m *measurement) closeRequest() {
	if m.request != nil {
		m.request.close()
		m.request = nil
	}
}

// giveUp closes the files that wait, which may have no name any more: somebody needs the space.
func (gs *gains) giveUp() {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	gs.todo = slices.DeleteFunc(gs.todo, func(m *measurement) bool {
		m.closeRequest()
		return !m.hasSource()
	})
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
	gs.c, gs.known, gs.changed = c, make(map[index.BuildID]Gain), make(chan struct{})
	gs.work.Go(func() { gs.serve(ctx) })
}

// close waits for the measurement under way, which has ended with its context, and removes what waits.
func (gs *gains) close() {
	gs.work.Wait()
	gs.mu.Lock()
	defer gs.mu.Unlock()
	for _, m := range gs.todo {
		m.closeRequest()
	}
	gs.todo = nil
}

func (gs *gains) wake() {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	gs.wakeLocked()
}

func (gs *gains) wakeLocked() {
	close(gs.changed)
	gs.changed = make(chan struct{})
}

// disturb ends the measurement under way, if there is one. It does not wait.
func (gs *gains) disturb() {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	if gs.stop != nil {
		gs.stop()
	}
}

// busy tells whether something is being measured.
func (gs *gains) busy() bool {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	return gs.stop != nil
}

func (gs *gains) serve(ctx context.Context) {
	for ctx.Err() == nil {
		m, mctx, changed := gs.next(ctx)
		if m == nil {
			sleepUntil(ctx, 0, changed)
			continue
		}
		done := gs.measure(mctx, m)
		gs.mu.Lock()
		gs.stop()
		gs.stop = nil
		over := done || m.tries >= maxDisturbed || ctx.Err() != nil
		if !over {
			gs.todo = append(gs.todo, m)
		}
		gs.mu.Unlock()
		if over {
			m.closeRequest()
		}
		gs.c.rebuilds.wake()
	}
}

// next takes the first that waits, if nothing is compiled now. It is measured under a context that a compile ends.
func (gs *gains) next(ctx context.Context) (*measurement, context.Context, <-chan struct{}) {
	gs.mu.Lock()
	changed := gs.changed
	gs.mu.Unlock()
	if gs.c.flights.count() > 0 {
		return nil, nil, changed
	}
	mctx, stop := context.WithCancel(ctx)
	m := gs.take(stop)
	if m == nil {
		stop()
		return nil, nil, changed
	}
	if gs.c.flights.count() > 0 {
		stop() // a compile began before there was a stop for it to call
	}
	return m, mctx, changed
}

func (gs *gains) take(stop context.CancelFunc) *measurement {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	if len(gs.todo) == 0 {
		return nil
	}
	m := gs.todo[0]
	gs.todo = gs.todo[1:]
	m.tries++
	gs.stop = stop
	return m
}

// measure loads the source model. It says whether the measurement is done with, well or not.
func (gs *gains) measure(ctx context.Context, m *measurement) bool {
	c, j := gs.c, m.job
	if _, err := c.index.Get(m.build.ID); err != nil || !j.rc.unchanged() {
		return true // the build is gone, or there are other libraries now
	}
	folder, graph, err := gs.model(ctx, m)
	defer func() { c.removeStaged(folder) }() // also where a compile has ended it: until that is done, its place may be needed
	if err == nil {
		var checked compilers.CheckResult
		checked, err = c.compiler.Check(ctx, compilers.CheckJob{
			Runtime: j.rc.spec, EPs: j.plan.eps, Graph: graph, Source: true,
			SessionOptions: j.request.SessionOptions, FreeDimensions: j.request.FreeDimensions,
			FreeDimensionsByDenotation: j.request.FreeDimensionsByDenotation,
			GraphOptimizationLevel:     loadLevel(j.plan.canonical.GraphOptimizationLevel),
			Pace:                       compilers.Pace{Idle: make(chan struct{})},
		})
		if err == nil && checked.Outcome == compilers.Passed && ctx.Err() == nil && j.rc.unchanged() {
			gs.found(&m.build, Gain{Load: j.load, SourceLoad: sourceLoad(&m.build, checked.Seconds)})
			return true
		}
	}
	if ctx.Err() != nil {
		return false
	}
	c.log.Info("gain not measured", "model", m.build.ModelName, "build", m.build.BuildKey.String(), "error", err)
	return true
}

// sourceLoad is how long the source model takes to load, as it was measured. At the lowest priority, on a machine that does other work, that may be as
// long as one likes; a session that compiled it did all of it, and wrote the result besides, at an ordinary one.
func sourceLoad(b *index.Build, measured float64) float64 {
	if b.Route == compilers.RouteCommand || b.CompileSeconds <= 0 {
		return measured // another program's time
	}
	return min(measured, b.CompileSeconds)
}

func (gs *gains) found(b *index.Build, g Gain) {
	gs.save(b.ID, g)
	if g.Loses() {
		gs.c.log.Info("compiling gained nothing", "model", b.ModelName, "build", b.BuildKey.String(), "load", g.Load, "source", g.SourceLoad)
	}
}

// model copies the source model into a folder, which the caller removes, and gives the graph in it. There has to be room above what is to stay free: a
// collection would have builds go for a copy that is gone in a moment.
func (gs *gains) model(ctx context.Context, m *measurement) (folder, graph string, err error) {
	r := m.request
	if r == nil {
		if r, err = gs.c.sourceRequest(ctx, &m.build); err != nil {
			return "", "", err
		}
		defer r.close()
	}
	if err := gs.c.fitsAboveFloor(r.files()); err != nil {
		return "", "", err
	}
	if folder, err = os.MkdirTemp(gs.c.path("staging"), "gain-"); err != nil {
		return "", "", err
	}
	again := &job{c: gs.c, request: r, plan: m.job.plan, folder: folder, name: m.job.name}
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
