package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	goruntime "runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/rules"
	"github.com/epcached/epcached/watch"
)

// Options say how a cache is kept. The zero value of each field is a sensible default.
type Options struct {
	Compiler       compilers.Compiler
	Runtimes       []compilers.Runtime // registered by the administrator, in order of preference; with only Directory set, libraries are found in it
	AllowOptions   []string            // "EP/option" and "session/key": options that are passed on though nothing is known of them
	Jobs           int                 // compiles at the same time; 0: one per processor
	JobsMemory     int64               // bytes that compiles may take together, as far as can be told; 0: half of the machine's memory; negative: no bound
	PathAccess     bool                // shared views may be reached by path by every local user, not only by descriptor
	Administrators []uint32            // besides root and the daemon's own user

	Rules            *rules.Set // how builds of other libraries suit a runtime; nil: the shipped ones
	Drivers          []DriverSource
	Quiet            time.Duration     // how long a runtime's files must be at rest after a change; 0: 1 s
	Poll             time.Duration     // how often files are looked at that cannot be watched; 0: 2 s
	Policies         map[string]Policy // by execution provider; "" for those that have none of their own
	Rebuild          RebuildOptions
	KeepSource       string   // "reference" (default), "copy", "none": how a source model is kept for compiling it again
	TrustedReporters []uint32 // users whose reports count without others'
	Publishers       []uint32 // users who may put builds that all share, besides administrators
	Claims           ClaimOptions
	Failures         FailureOptions
	Conditions       string // the configuration that compiles depend on, in any words: what failed under another is tried again
	ReportQuorum     int    // distinct users whose reports withhold a build from all, where it cannot be checked; 0: 3

	Log *slog.Logger
	Now func() time.Time // nil: time.Now
}

// Cache keeps compiled models under one state directory. Make one with Open.
type Cache struct {
	dir     string
	uid     uint32
	options Options
	log     *slog.Logger
	lock    *os.File
	started time.Time
	now     func() time.Time

	settings   atomic.Pointer[settings] // what may change; options has what they were at the start
	reloading  sync.Mutex               // held while settings are replaced
	configured atomic.Pointer[Configured]

	cas      *cas.Store
	index    *index.Index
	memo     *memo
	probes   *probes
	compiler compilers.Compiler
	runtimes runtimes
	machine  *machineState
	watcher  *watch.Watcher
	changes  *changes
	views    views
	uses     uses
	flights  flights
	stream   stream
	rebuilds rebuilds
	reports  *reports
	claims   *claims
	gains    gains
	failures *failures
	checks   chan struct{} // one token for each load check, or conversion, that requests wait for

	conversions singleflight.Group // by build key, scope and what is converted
	maxGraph    int64              // epmodel.MaxGraph
	searches    chan struct{}      // one token for each search for neighbours

	// publishing is held shared from a blob's being stored until a manifest refers to it, and exclusively while
	// blobs that nothing refers to are removed.
	publishing sync.RWMutex

	ctx  context.Context    // of the background work
	stop context.CancelFunc // ends it
	work sync.WaitGroup     // which Close waits for
}

// Open opens the cache in dir, making it where there is none. One process has a cache open at a time.
func Open(dir string, o Options) (*Cache, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Quiet == 0 {
		o.Quiet = time.Second
	}
	if o.Poll == 0 {
		o.Poll = 2 * time.Second
	}
	if o.Jobs <= 0 {
		o.Jobs = goruntime.NumCPU()
	}
	if o.JobsMemory == 0 {
		o.JobsMemory = machineMemory() / 2
	}
	first, err := newSettings(&o)
	if err != nil {
		return nil, err
	}
	if err := layDown(dir); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	lock, err := lockState(dir)
	if err != nil {
		return nil, err
	}
	c := &Cache{dir: dir, uid: uint32(os.Getuid()), options: o, log: o.Log, lock: lock, started: o.Now(), now: o.Now,
		compiler: o.Compiler, checks: make(chan struct{}, o.Jobs), searches: make(chan struct{}, maxSearches),
		maxGraph: epmodel.MaxGraph}
	c.settings.Store(first)
	c.configured.Store(&Configured{})
	if err := c.open(); err != nil {
		return nil, errors.Join(err, c.closeStores(), lock.Close())
	}
	return c, nil
}

func (c *Cache) open() error {
	var err error
	if c.index, err = index.Open(c.dir, index.Options{Log: c.log, Heard: c.stream.add}); err != nil {
		return fmt.Errorf("index: %w", err)
	}
	if why := c.index.Rebuilt(); why != "" {
		c.log.Warn("index rebuilt from the manifests", "why", why)
	}
	if c.cas, err = cas.Open(c.dir, cas.Options{Stamps: c.index}); err != nil {
		return fmt.Errorf("store: %w", err)
	}
	if err := c.emptyStaging(); err != nil {
		return fmt.Errorf("staging: %w", err)
	}
	if err := c.openViews(); err != nil {
		return fmt.Errorf("views: %w", err)
	}
	// Nothing fails from here on: what is begun is ended by Close.
	c.memo = newMemo(c.index)
	ctx, cancel := context.WithCancel(context.Background())
	c.ctx, c.stop = ctx, cancel
	c.probes = newProbes(c.compiler, c.index, c.now, running{ctx, &c.work})
	c.changes = newChanges()
	c.machine = newMachine(c.options.Drivers)
	c.watcher = watch.New(watch.Options{Quiet: c.options.Quiet, Poll: c.options.Poll, Log: c.log})
	c.failures = newFailures(c.now, c.index, c.options.Conditions, c.log)
	c.reports = newReports(c.now, running{ctx, &c.work})
	c.claims = newClaims(c.now)
	c.uses.since = make(map[index.BuildID]*use)
	c.runtimes.register(c.options.Runtimes)
	c.flights.now, c.flights.costs = c.now, costs{c.index, c.log}
	c.flights.queue.now, c.flights.queue.jobs, c.flights.queue.memory = c.now, c.options.Jobs, c.options.JobsMemory
	c.flights.began, c.flights.ended = c.gains.disturb, func() { c.gains.wake(); c.rebuilds.wake() }
	c.work.Go(func() { c.machine.look(ctx) })
	c.gains.start(ctx, c)
	c.rebuilds.start(ctx, c) // before there is anybody who wants something
	c.work.Go(func() { c.background(ctx) })
	c.work.Go(func() { c.heed(ctx) })
	c.work.Go(func() { c.assessChanges(ctx) })
	return nil
}

// background does what nobody waits for: looks at the runtimes so that the first request need not, removes what
// crashes left behind, and writes down what is counted in memory.
func (c *Cache) background(ctx context.Context) {
	c.watcher.Set(watchedDrivers, c.machine.files())
	for _, rt := range c.runtimes.all() {
		c.watchRuntime(rt, nil)
		if _, err := c.content(ctx, rt, func(string) {}); err != nil && ctx.Err() == nil {
			c.log.Warn("runtime cannot be used", "runtime", rt.name, "error", err)
		}
	}
	if err := c.doomStrangers(ctx); err != nil && ctx.Err() == nil {
		c.log.Warn("stray views not found", "error", err)
	}
	if err := c.removeLeftovers(ctx); err != nil && ctx.Err() == nil {
		c.log.Warn("leftovers not removed", "error", err)
	}
	if err := c.healAll(ctx); err != nil && ctx.Err() == nil {
		c.log.Warn("damaged builds not found", "error", err)
	}
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	machine := time.NewTicker(machineEvery)
	defer machine.Stop()
	for {
		c.sweepViews()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c.flushUses()
		case <-machine.C:
			c.lookAtMachine(ctx)
			c.failures.sweep()
		}
	}
}

const sweepEvery = 5 * time.Second

// Close waits for work under way, writes down what is only in memory, and releases the state directory. Requests
// must have ended before.
func (c *Cache) Close() error {
	c.stop()
	c.rebuilds.close() // it starts flights
	c.flights.close()
	c.gains.close()
	err := c.watcher.Close()
	c.work.Wait()
	c.flushUses()
	c.views.close()
	return errors.Join(err, c.closeStores(), c.lock.Close())
}

func (c *Cache) closeStores() error {
	if c.index == nil {
		return nil
	}
	return c.index.Close()
}

// Directory is the state directory, absolute.
func (c *Cache) Directory() string { return c.dir }

func (c *Cache) path(name ...string) string {
	return filepath.Join(append([]string{c.dir}, name...)...)
}

func (c *Cache) emptyStaging() error {
	entries, err := os.ReadDir(c.path("staging"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(c.path("staging", e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// removeLeftovers removes blobs that no manifest refers to: what a put left that was never acknowledged.
func (c *Cache) removeLeftovers(ctx context.Context) error {
	if !c.index.Complete() {
		c.log.Warn("leftovers stay: there are builds that this version cannot read")
		return nil
	}
	var lost []cas.Digest
	err := c.cas.Walk(ctx, func(d cas.Digest, _ int64) error {
		ids, err := c.index.Needs(d)
		if err == nil && len(ids) == 0 {
			lost = append(lost, d)
		}
		return err
	})
	for _, d := range lost {
		if removed, err2 := c.removeUnneeded(d); err2 != nil {
			err = errors.Join(err, err2)
		} else if removed {
			c.log.Info("leftover blob removed", "digest", d.String())
		}
	}
	return err
}

// removeUnneeded removes a blob unless a manifest refers to it by now.
func (c *Cache) removeUnneeded(d cas.Digest) (bool, error) {
	c.publishing.Lock()
	defer c.publishing.Unlock()
	if !c.index.Complete() {
		return false, nil // there are builds that cannot be read, and nobody knows what they need
	}
	ids, err := c.index.Needs(d)
	if err != nil || len(ids) > 0 {
		return false, err
	}
	if err := c.cas.Remove(d); err != nil && !errors.Is(err, cas.ErrNotFound) {
		return false, err
	}
	return true, nil
}
