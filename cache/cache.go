package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	goruntime "runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/change"
	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/compiled"
	"github.com/epcached/epcached/cache/explain"
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
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/sources"
	"github.com/epcached/epcached/cache/trial"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/once"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// These are the store's, and part of the cache's options.
type (
	SpaceOptions = store.SpaceOptions
	Amount       = store.Amount
)

// When builds are packed.
const (
	PackCold   = store.PackCold
	PackAlways = store.PackAlways
	PackOff    = store.PackOff
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
	Drivers          []runtimes.DriverSource
	Quiet            time.Duration             // how long a runtime's files must be at rest after a change; 0: 1 s
	Poll             time.Duration             // how often files are looked at that cannot be watched; 0: 2 s
	Policies         map[string]request.Policy // by execution provider; "" for those that have none of their own
	Rebuild          upkeep.RebuildOptions
	KeepSource       string   // "reference" (default), "copy", "none": how a source model is kept for compiling it again
	TrustedReporters []uint32 // users whose reports count without others'
	Publishers       []uint32 // users who may put builds that all share, besides administrators
	Claims           claims.Limits
	Failures         failure.Options
	Space            SpaceOptions
	Pack             string        // when builds are packed: PackCold (default), PackAlways, PackOff
	PackAfter        time.Duration // without use, for PackCold, and until an unpacked form goes; 0: two hours
	UnpackedDir      string        // folder for the unpacked forms of packed builds, perhaps in memory; "": in the state directory
	Remade           string        // why this process opens the state folder once more; "": it does not
	Conditions       string        // the configuration that compiles depend on, in any words: what failed under another is tried again
	ReportQuorum     int           // distinct users whose reports withhold a build from all, where it cannot be checked; 0: 3

	// Opening is called every few seconds with the progress while Open makes the index from all
	// manifests, which takes long. It must not wait. It may be nil.
	Opening func(what string)

	// Broken is called once if the index turns out to be damaged after Open: no request can be
	// answered from then on, and Close may block. The process should end, because its next start
	// makes the index again. Broken must not wait. It may be nil.
	Broken func(error)

	Log *slog.Logger
	Now func() time.Time // nil: time.Now

	fs cas.FS // nil: the operating system's
}

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
	explainer  *explain.Explainer
	compiled   *compiled.Answerer
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
	reading    keyed.Locks[uint32] // libraries that clients show: one of each owner's at a time, because a file may take for ever
	checks     keyed.Slots         // one token for each load check, or conversion, that requests wait for

	tidied chan struct{} // closed when what is done once after a start is done

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
	c := &Cache{dir: dir, uid: uint32(os.Getuid()), options: o, log: o.Log, started: o.Now(), now: o.Now,
		compiler: o.Compiler, checks: make(keyed.Slots, o.Jobs),
		tidied: make(chan struct{}), owners: rights.Owners{Path: rights.SubUIDs}}
	c.settings.Store(first)
	c.configured.Store(&query.Configured{})
	if err := c.open(); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Cache) open() error {
	o := &c.options
	var err error
	if c.store, err = store.Open(c.dir, store.Options{FS: o.fs, Log: c.log, Now: c.now,
		PathAccess: o.PathAccess, UnpackedDir: o.UnpackedDir, Settings: c.settings.Load().store,
		Making: c.indexMaking, Heard: c.events.Add, Broken: func(err *index.BrokenError) {
			if o.Broken != nil {
				o.Broken(err)
			}
		},
		Published: c.published, Withheld: func(b *index.Build) { c.recompiler.Heal(b) },
		Compiling: func() bool { return c.jobs.Count() > 0 }}); err != nil {
		return err
	}
	c.index, c.cas, c.forms, c.views = c.store.Index(), c.store.Blobs(), c.store.Forms(), c.store.Views()
	c.rights = c.openRights()
	// Nothing fails from here on: what is begun is ended by Close.
	c.models, c.sources = identity.NewModels(&c.index.Memos, c.now), identity.NewSources(c.uid)
	c.kept = sources.New(c.models, c.sources, c.store, c.uid)
	ctx, cancel := context.WithCancel(context.Background())
	c.ctx, c.stop = ctx, cancel
	c.jobs = jobs.New(jobs.Options{Slots: c.options.Jobs, Memory: c.options.JobsMemory, Costs: jobs.NewCosts(&c.index.Memos, c.log),
		Now: c.now, GivenUp: runtimes.ErrGivenUp, Expect: c.store.Expect, Taken: c.store.Taken, Began: c.gains.Disturb, Ended: c.rebuilds.Wake})
	c.openRuntimes()
	c.openPlanner()
	c.openJudge()
	c.failures = failure.NewRemembered(c.now, c.index, c.options.Conditions, c.log)
	c.jobList = &joblist.List{Jobs: c.jobs, Rebuilds: &c.rebuilds, Failed: c.failures, Rights: c.rights, Store: c.store, Now: c.now}
	c.reports = c.openReports()
	c.recompiler = c.openRecompiler()
	c.backlog = &upkeep.Backlog{Table: &c.index.Wanted, Later: c.later, References: c.sources, Sources: c.kept, UID: c.uid,
		Happened: c.happened, Log: c.log, Acquire: c.acquireResumed}
	c.facts = once.New(c.now, c.later)
	c.trials = &trial.Trials{Now: c.now, Store: c.store, Runtimes: c.runtimes, Compiler: c.compiler, Judges: c.judges, Facts: c.facts,
		Workspaces: c.workspaces, Policy: c.policyOf, Planned: c.planner.Planned}
	c.query = c.openQueries()
	c.lookup = c.openLookup()
	c.builder = c.openBuilder()
	c.explainer = &explain.Explainer{Query: c.query, Lookup: c.lookup, Planner: c.planner, Builder: c.builder,
		Runtimes: c.runtimes, Rights: c.rights}
	c.Changes = change.New(c.store, c.query, c.rights, c.now)
	c.claims = claims.New(claims.Options{Store: c.store, Jobs: c.jobs, Judges: c.judges, Rights: c.rights, Owner: c.owners.Of, Checks: c.checks,
		Limits: func() claims.Limits { return c.settings.Load().claims }, Now: c.now,
		Failed: c.builder.FailedBefore, Made: c.builder.MadeMeanwhile, Waited: c.builder.Waited, Trials: c.trials})
	c.compiled = &compiled.Answerer{Planner: c.planner, Lookup: c.lookup, Explainer: c.explainer,
		Trials: c.trials, Claims: c.claims, Index: c.index}
	c.gains.Start(ctx, upkeep.GainOptions{Book: &c.index.Memos, Compiling: func() bool { return c.jobs.Count() > 0 }, Log: c.log,
		Store: c.store, Workspaces: c.workspaces, Compiler: c.compiler, Policy: c.policyOf})
	c.rebuilds.Start(ctx, upkeep.Options{Limits: func() upkeep.Limits { return c.settings.Load().rebuild },
		LastUse: c.index.Uses.Last, Busy: c.jobs.Busy, NewID: jobs.NewID, Now: c.now, Log: c.log}) // before there is anybody who wants something
	c.runtimes.Start(ctx)
	before := c.backlog.Rows()
	c.work.Go(func() { c.background(ctx, before) })
	c.store.Start(ctx)
	return nil
}

// published notes that a user's build is stored now, so that the user hears of it, and that it need
// not be compiled again.
func (c *Cache) published(b *index.Build, uid uint32) {
	c.rights.Saw(request.Peer{UID: uid}, b)
	c.rebuilds.Published(b)
}

func (c *Cache) indexMaking(builds uint64, percent int) {
	if c.options.Opening != nil {
		c.options.Opening(fmt.Sprintf("the index is being made from the manifests: %d builds, %d %%", builds, percent))
	}
}

// background does what nobody waits for: looks at the runtimes so that the first request need not, removes what
// crashes left behind, takes up what was queued before, and writes down what is counted in memory.
func (c *Cache) background(ctx context.Context, before map[string][]byte) {
	strangers := sync.OnceValue(func() error { return c.views.DoomStrangers(ctx) }) // soon: what clients of an earlier run have open counts from then on
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

// Close waits for work under way, writes down what is only in memory, and releases the state directory. Requests
// must have ended before.
func (c *Cache) Close() error {
	c.stop()
	c.rebuilds.Close() // it starts jobs
	c.jobs.Close()
	c.gains.Wait()
	err := c.runtimes.Close()
	c.work.Wait()
	return errors.Join(err, c.store.Close())
}

// Leave says that the cache will be closed as soon as the requests under way are answered: a worker that dies is not replaced, and its death
// counts against no model.
func (c *Cache) Leave() { c.builder.Leave() }

// Store is what the cache has on the disk.
func (c *Cache) Store() *store.Store { return c.store }

// Directory is the state directory, absolute.
func (c *Cache) Directory() string { return c.dir }

// Queries answers what changes nothing.
func (c *Cache) Queries() *query.Queries { return c.query }

func (c *Cache) openQueries() *query.Queries {
	return query.New(query.Options{Dir: c.dir, UID: c.uid, Started: c.started, Remade: c.options.Remade,
		Now: c.now, Store: c.store, Stream: &c.events, Rights: c.rights, Runtimes: c.runtimes,
		Configured: c.configured.Load, Sandbox: c.trials.Sandbox, Jobs: c.jobs.Count, Try: c.trials.EP,
		Rebuilds: func() map[index.BuildID]bool {
			out := make(map[index.BuildID]bool)
			for _, r := range c.rebuilds.List() {
				if r.State == upkeep.Waiting {
					out[r.Build] = true
				}
			}
			return out
		},
		Owner: c.owners.Of, Sources: c.kept.Models,
		PlanAgain: func(ctx context.Context, p request.Peer, builds []index.Build) (*query.Question, error) {
			return c.explainer.Again(ctx, p, builds)
		},
		Failures: func(p request.Peer) []failure.Failure { return c.jobList.Remembered(p) },
		Judge: func(out *wire.Build, b *index.Build) {
			g := c.gains.Of(b.ID)
			out.LoadSeconds, out.SourceLoadSeconds = g.Load, g.SourceLoad
			c.judges.Standing(b).Fill(out)
		}})
}

func (c *Cache) openLookup() *lookup.Lookup {
	return lookup.New(lookup.Options{Index: c.index, Store: c.store, Rights: c.rights, Reports: c.reports,
		Judge: c.trials, Policy: c.policyOf, Now: c.now, WhyNone: c.query.WhyNone, Planned: c.planner.Planned,
		Served: c.recompiler.Freshen, Warnings: func(id index.BuildID) []string { return c.gains.Of(id).Warnings() }})
}

func (c *Cache) openBuilder() *build.Builder {
	return build.New(build.Options{Dir: c.dir, UID: c.uid, Store: c.store, Jobs: c.jobs, Compiler: c.compiler,
		Models: c.models, Sources: c.sources, Workspaces: c.workspaces, Planner: c.planner, Lookup: c.lookup, Trials: c.trials,
		Failures: c.failures, Rights: c.rights, MaxGraph: epmodel.MaxGraph, Log: c.log, Now: c.now,
		Settings: func() build.Settings { return c.settings.Load().builder }, Policy: c.policyOf, Owner: c.owners.Of,
		Later: c.later, Queued: c.backlog.Keep, Stored: c.gains.MeasureBuild,
		MayPut: func(ctx context.Context, owner uint32, model string, sizes []int64) (int64, error) {
			return c.claims.MayPut(ctx, owner, model, sizes)
		}})
}

// JobList has the jobs, for users to see, to follow and to cancel.
func (c *Cache) JobList() *joblist.List { return c.jobList }

// Claims has the claims of applications.
func (c *Cache) Claims() *claims.Claims { return c.claims }

// Put takes what was compiled under a claim, and answers with the build.
func (c *Cache) Put(ctx context.Context, p request.Peer, put *claims.Put, progress func(request.Progress)) (*request.Answer, error) {
	a, at, err := c.claims.Put(ctx, p, put, progress)
	return c.lookup.Finish(a, at), err
}

func (c *Cache) openPlanner() {
	c.workspaces = &workspace.Maker{Store: c.store, Runtimes: c.runtimes, Checks: c.checks}
	c.planner = &plan.Planner{Runtimes: c.runtimes, Models: c.models, Workspaces: c.workspaces,
		Allowed: func() (identity.Allowed, uint64) {
			s := c.settings.Load()
			return s.allowed, s.planning
		}, TooLarge: func(r *request.Request) (string, error) {
			return compiled.TooLarge(c.settings.Load().claims.Bytes, r)
		}}
}

// Rights decides which user may see and do what.
func (c *Cache) Rights() *rights.Rights { return c.rights }

func (c *Cache) openRights() *rights.Rights {
	return rights.New(c.uid, c.index, func() rights.Privileged {
		now := c.settings.Load()
		return rights.Privileged{Administrators: now.administrators, Publishers: now.publishers}
	}, c.log)
}

func (c *Cache) path(name ...string) string {
	return filepath.Join(append([]string{c.dir}, name...)...)
}

// Idle reports whether nothing is compiled and no client holds a view that was served since the start.
// It looks into the directory of every view that is in use, so it is not for each request.
func (c *Cache) Idle() bool { return c.jobs.Count() == 0 && !c.views.AnyHeld() }

// openJudge makes the judge of builds.
func (c *Cache) openJudge() {
	c.judges = judge.New(judge.Options{
		Runtimes: c.runtimes, Compiler: c.compiler, Index: c.index, Now: c.now, Log: c.log, Event: c.happened,
		Rules: func() (*rules.Set, uint64) {
			s := c.settings.Load()
			return s.rules, s.judging
		},
		Verdicts: func(rc *runtimes.Content) *judge.Verdicts { return &plan.NotesOn(rc).Verdicts },
		Target: func(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content, b *index.Build) (*judge.Target, error) {
			at, err := sources.AttemptOf(b)
			if err == nil {
				at, err = c.planner.Planned(ctx, at.WithRuntime(rt.Name, rc))
			}
			if err != nil {
				return nil, err
			}
			return at.Plan.Against(rt.Name, rc).Target(), nil
		},
		Rebuild: func(b *index.Build, runtime, why string) { c.recompiler.Refresh(b, runtime, why, nil) },
	})
}
