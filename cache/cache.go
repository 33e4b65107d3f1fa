// Package cache answers requests for compiled models: it wires the parts together, and Acquire is
// the whole flow of a request (acquire.go). It knows no bytes or frames.
//
// Acquire promises: an answer was compiled from exactly the bytes, and for exactly the request,
// that the client presented, and its digests hold. An answered build survives a power cut. A build
// is compiled once, however many clients request it at the same time. A view keeps its files as
// long as a client has the descriptor that came with it.
//
// Errors that a user is to read are *apierr.Error; a *identity.NeedFilesError lists files that a
// request lacks. A Cache may be used by any number of goroutines.
package cache

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/answer"
	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/change"
	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/joblist"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/plan"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/sources"
	"github.com/epcached/epcached/cache/trial"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/once"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// Cache keeps compiled models under one state directory. Make one with Open.
type Cache struct {
	*change.Changes // Invalidate, Remove, Pin, Unpin, Pack, Unpack, PlanCollection, CollectReply, Check

	dir     string
	uid     uint32
	options Options
	log     *slog.Logger
	started time.Time
	now     func() time.Time

	settings   atomic.Pointer[settings] // what may change; options has what they were at the start
	reloading  sync.Mutex               // held while settings are replaced
	configured atomic.Pointer[query.Configured]

	store      *store.Store // what is on the disk; the next four are its parts
	cas        *cas.Store
	index      *index.Index
	forms      *packing.Store
	views      *views.Store
	models     *identity.Models
	sources    *identity.Sources
	kept       *sources.Sources
	compiler   compilers.Compiler
	runtimes   *runtimes.Set
	judges     *judge.Judge
	trials     *trial.Trials
	planner    *plan.Planner
	workspaces *workspace.Maker
	rights     *rights.Rights
	owners     rights.Owners
	events     query.Stream
	query      *query.Queries
	lookup     *lookup.Lookup
	answers    *answer.Answerer
	builder    *build.Builder

	jobs       *jobs.Jobs
	jobList    *joblist.List
	rebuilds   upkeep.Rebuilds
	recompiler *upkeep.Recompiler
	backlog    *upkeep.Backlog
	reports    *reports.Reports
	facts      *once.Facts // found out for reports, judgements and the doctor
	claims     *claims.Claims
	gains      upkeep.Gains
	failures   *failure.Remembered
	// Libraries that clients show are read for one client of each owner at a time, because reading
	// a file may take for ever.
	reading keyed.Locks[uint32]
	checks  keyed.Slots // one token for each load check, or conversion, that requests wait for

	tidied chan struct{} // closed when what is done once after a start is done

	ctx  context.Context    // of the background work
	stop context.CancelFunc // ends it
	work sync.WaitGroup     // which Close waits for
}

// Open opens the cache in dir, which it makes where there is none. One process has a cache open at
// a time.
func Open(dir string, o Options) (*Cache, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	if o.Now == nil {
		o.Now = time.Now
	}
	o.Quiet, o.Poll = cmp.Or(o.Quiet, time.Second), cmp.Or(o.Poll, 2*time.Second)
	if o.Jobs <= 0 {
		o.Jobs = goruntime.NumCPU()
	}
	o.JobsMemory = cmp.Or(o.JobsMemory, jobs.MachineMemory()/2)
	first, err := newSettings(&o)
	if err != nil {
		return nil, err
	}
	c := &Cache{dir: dir, uid: uint32(os.Getuid()), options: o, log: o.Log, now: o.Now,
		started: o.Now(), compiler: o.Compiler, checks: make(keyed.Slots, o.Jobs),
		tidied: make(chan struct{}), owners: rights.Owners{Path: rights.SubUIDs}}
	c.settings.Store(first)
	c.configured.Store(&query.Configured{})
	if err := c.open(); err != nil {
		return nil, err
	}
	return c, nil
}

// background does what no request waits for: it looks at the runtimes so that the first request
// need not, queues again what was queued before, removes what crashes left behind, and then looks
// around from time to time.
func (c *Cache) background(ctx context.Context, before map[string][]byte) {
	// Soon, because views that clients of an earlier run have open count from then on.
	strangers := sync.OnceValue(func() error { return c.views.DoomStrangers(ctx) })
	go strangers()
	c.runtimes.LookAtAll(ctx)
	c.backlog.TakeUp(ctx, before)
	if err := strangers(); err != nil && ctx.Err() == nil {
		c.log.Warn("stray views not found", "error", err)
	}
	if err := c.store.RemoveLeftovers(ctx); err != nil && ctx.Err() == nil {
		c.log.Warn("leftovers not removed, or the account of the space not looked through", "error", err)
	}
	if err := c.recompiler.HealAll(ctx); err != nil && ctx.Err() == nil {
		c.log.Warn("damaged builds not found", "error", err)
	}
	close(c.tidied)
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	machine := time.NewTicker(runtimes.MachineEvery)
	defer machine.Stop()
	for {
		c.views.Sweep()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c.store.LookAround()
		case <-machine.C:
			c.runtimes.LookAtMachine(ctx)
			c.failures.Sweep()
		}
	}
}

const sweepEvery = 5 * time.Second

// Close waits for work under way, writes what is only in memory, and releases the state directory.
// Requests must have ended before.
func (c *Cache) Close() error {
	c.stop()
	c.rebuilds.Close() // it starts jobs
	c.jobs.Close()
	c.gains.Wait()
	err := c.runtimes.Close()
	c.work.Wait()
	return errors.Join(err, c.store.Close())
}

// Leave says that the cache will be closed as soon as the requests under way are answered: a worker
// that dies is not replaced, and its death counts against no model.
func (c *Cache) Leave() { c.builder.Leave() }

// Store returns what the cache has on the disk.
func (c *Cache) Store() *store.Store { return c.store }

// Directory is the state directory, absolute.
func (c *Cache) Directory() string { return c.dir }

// Queries returns what answers read-only requests.
func (c *Cache) Queries() *query.Queries { return c.query }

// JobList returns the jobs, for users to see, to follow and to cancel.
func (c *Cache) JobList() *joblist.List { return c.jobList }

// Claims returns the claims of applications.
func (c *Cache) Claims() *claims.Claims { return c.claims }

// Rights returns what decides which user may see and do what.
func (c *Cache) Rights() *rights.Rights { return c.rights }

// Idle reports whether nothing is compiled and no client holds a view that was served since the
// start. It looks into the directory of every view that is in use, so it is not for each request.
func (c *Cache) Idle() bool { return c.jobs.Count() == 0 && !c.views.AnyHeld() }

// Report decides on what a client reports of a build. from is the runtime that the client loaded it
// with.
func (c *Cache) Report(ctx context.Context, p request.Peer, r reports.Report, from runtimes.Ref) (
	*wire.ReportReply, error) {
	if from.ORTVersion == "" {
		from.ORTVersion = r.ORTVersion
	}
	examine := func(ctx context.Context, b *index.Build) (reports.Examined, error) {
		return c.trials.Examine(ctx, p, from, b)
	}
	return c.reports.Take(ctx, p, r, examine)
}

// later does something that Close waits for.
func (c *Cache) later(do func(context.Context)) { c.work.Go(func() { do(c.ctx) }) }

// SetConfigured has status and the doctor report what is not in force, until it is called again.
func (c *Cache) SetConfigured(now query.Configured) { c.configured.Store(&now) }

// TellConfiguration writes into the history, and tells subscribers, that the configuration was
// changed or was refused.
func (c *Cache) TellConfiguration(text string) {
	text = strings.ToValidUTF8(text[:min(len(text), maxConfigurationText)], "")
	c.store.Happened(index.Event{Kind: event.Configuration, Text: text})
}

// maxConfigurationText bounds what a file with many mistakes says in one event.
const maxConfigurationText = 2000
