// Package cache answers requests for compiled models: it wires the parts together, and Acquire is
// the whole flow of a request (acquire.go). It handles neither the bytes of files nor the
// protocol's frames.
//
// Acquire promises: an answered build was compiled from exactly the bytes, and for exactly the
// request, that the client presented. Its files have the digests that were recorded. The build
// survives a power cut. A build is compiled once, however many clients request it at the same time.
// A view keeps its files as long as a client has the descriptor that came with it.
//
// Errors that users read are *apierr.Error; a *identity.NeedFilesError lists files that a request
// lacks. A Cache may be used by any number of goroutines.
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
	"github.com/epcached/epcached/cache/layer"
	"github.com/epcached/epcached/cache/loadcheck"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/plan"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/trust"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/internal/ttlcache"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/layers"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// Cache keeps compiled models under one state directory. Make one with Open.
type Cache struct {
	// Invalidate, Remove, Pin, Unpin, Pack, Unpack, PlanCollection, CollectReply, Check
	*change.Changes

	// The parts that other packages may use. Open sets them.
	Store   *store.Store // what is on the disk; cas, index, packing and views are its parts
	Rights  *rights.Rights
	Queries *query.Queries
	JobList *joblist.List // the jobs, for users to see, to follow and to cancel
	Claims  *claims.Claims

	dir     string
	uid     uint32
	options Options
	log     *slog.Logger
	started time.Time
	now     func() time.Time

	settings   atomic.Pointer[settings] // the current settings; options has those of the start
	reloading  sync.Mutex               // held while Reload replaces settings
	configured atomic.Pointer[query.Configured]
	killed     string // how the previous daemon ended, if for memory; else ""

	cas         *cas.Store
	index       *index.Index
	packing     *packing.Store
	views       *views.Store
	models      *identity.Models
	sources     *identity.Sources
	keptSources *workspace.Sources
	compiler    compilers.Compiler
	runtimes    *runtimes.Set
	buildJudge  judge.Judge
	loadChecker *loadcheck.Checker
	planner     *plan.Planner
	Repeats     Repeats
	Workspaces  *workspace.Maker
	owners      rights.Owners
	events      query.Stream
	lookup      *lookup.Lookup
	answers     answer.Answerer
	builder     *build.Builder

	jobs       *jobs.Jobs
	rebuilds   upkeep.Rebuilds
	recompiler upkeep.Recompiler
	reports    *reports.Reports
	remotes    *remotes.Remotes
	trust      *trust.Documents
	facts      *ttlcache.Cache // facts about EPs that reports, judgements and the doctor share
	gains      upkeep.Gains
	failures   *failure.Remembered
	// readGate has the libraries that clients send read for one client of each user at a time,
	// because reading a file on a slow file system may block for ever.
	readGate keyed.Locks[uint32]

	sweptUnpacked chan struct{} // closed when the clean-up after the start is done

	ctx  context.Context    // the context of background work
	stop context.CancelFunc // cancels ctx
	work sync.WaitGroup     // the background work that Close waits for
}

// Open opens the cache in dir, or makes one. One process has a cache open at a time.
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
	o.JobsMemory = cmp.Or(o.JobsMemory, compilers.MachineMemory()/2)
	first, err := newSettings(&o)
	if err != nil {
		return nil, err
	}
	c := &Cache{dir: dir, uid: uint32(os.Getuid()), options: o, log: o.Log, now: o.Now,
		started: o.Now(), compiler: o.Compiler, sweptUnpacked: make(chan struct{})}
	c.settings.Store(first)
	c.configured.Store(&query.Configured{})
	if err := c.open(); err != nil {
		return nil, err
	}
	return c, nil
}

// runBackground does the work that no request waits for. It probes the runtimes so that the first
// request need not, removes files that crashes left behind, and then runs the periodic checks.
func (c *Cache) runBackground(ctx context.Context) {
	// Early, because only then are views that clients have had open since the previous run counted.
	strangers := sync.OnceValue(func() error { return c.views.DropUnknown(ctx) })
	go strangers()
	c.runtimes.RefreshAll(ctx)
	if err := strangers(); err != nil && ctx.Err() == nil {
		c.log.Warn("cannot search for stray views", "error", err)
	}
	if err := c.Store.RemoveLeftovers(ctx); err != nil && ctx.Err() == nil {
		c.log.Warn("cannot remove leftovers or verify the account of space", "error", err)
	}
	if err := c.recompiler.RebuildAllDamaged(ctx); err != nil && ctx.Err() == nil {
		c.log.Warn("cannot search for damaged builds", "error", err)
	}
	close(c.sweptUnpacked)
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
			c.Store.CheckStateDirectory()
		case <-machine.C:
			c.runtimes.WatchMachine(ctx)
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
	_ = memo.Save(&c.index.Memos, runningKey, nil) // best effort: see noteKilled
	return errors.Join(err, c.remotes.Close(), c.Store.Close())
}

// runningKey is the key of the memo that a running daemon has: MemoryKills at its start.
const runningKey = "running"

// noteKilled finds out whether the kernel has probably killed the previous daemon for memory: it
// did not close the store, and processes of this container were killed since it started.
func (c *Cache) noteKilled() {
	kills := compilers.MemoryKills()
	before, _ := memo.Recall[*int64](&c.index.Memos, runningKey)
	if before != nil && *before < kills {
		c.killed = fmt.Sprintf("the previous daemon did not stop by itself, and since its start "+
			"the kernel has killed processes of this container for memory (%d); %s are all that "+
			"it has", kills-*before, bytesize.Text(compilers.MachineMemory()))
		c.log.Warn(c.killed)
	}
	// best effort: the cause stays unknown if it is not saved
	_ = memo.Save(&c.index.Memos, runningKey, &kills)
}

// PrepareClose announces that Close follows when the requests under way are answered. From then on
// a worker that dies is not replaced, and its death is not recorded as a failure of the model.
func (c *Cache) PrepareClose() { c.builder.PrepareClose() }

// Idle reports whether nothing is compiled and no client holds a view that was served since the
// start. It looks into the directory of every view that is in use, so it is not for each request.
func (c *Cache) Idle() bool { return c.jobs.Count() == 0 && !c.views.AnyLeased() }

// Report handles a client's report on a build that the client loaded with the runtime from.
func (c *Cache) Report(ctx context.Context, p request.Peer, r reports.Report, from runtimes.Ref) (
	*wire.ReportReply, error) {
	from.ORTVersion = cmp.Or(from.ORTVersion, r.ORTVersion)
	examine := func(ctx context.Context, b *index.Build) (reports.Examined, error) {
		return c.loadChecker.Examine(ctx, p, from, b)
	}
	return c.reports.Handle(ctx, p, r, examine)
}

// runLater runs do in the background, and Close waits for it.
func (c *Cache) runLater(do func(context.Context)) { c.work.Go(func() { do(c.ctx) }) }

// SetConfigured sets the configuration of the file, so that status and the doctor report which keys
// of it are not in effect.
func (c *Cache) SetConfigured(now query.Configured) { c.configured.Store(&now) }

// RecordConfiguration records in the history, and notifies subscribers, that the configuration was
// changed or was refused.
func (c *Cache) RecordConfiguration(text string) {
	text = strings.ToValidUTF8(text[:min(len(text), maxConfigurationText)], "")
	c.Store.RecordEvent(index.Event{Kind: event.Configuration, Text: text})
}

// maxConfigurationText bounds the text of one event, because a file with many mistakes has a long
// one.
const maxConfigurationText = 2000

// open opens the store, and makes and starts the parts in the order in which they need each other.
func (c *Cache) open() error {
	if err := c.openStore(); err != nil {
		return err
	}
	c.noteKilled()
	// Nothing fails from here on, so everything that is started is ended by Close.
	c.ctx, c.stop = context.WithCancel(context.Background())
	c.openPlanning()
	c.openJudging()
	c.openAnswering()
	c.openRemotes()
	c.gains.Start(c.ctx, c.builder)
	c.rebuilds.Start(c.ctx, upkeep.Options{LastUse: c.index.Uses.LastUse, Busy: c.jobs.Busy,
		Now: c.now, Log: c.log,
		// before any rebuild can be queued
		Limits: func() upkeep.Limits { return c.settings.Load().rebuild }})
	c.runtimes.Start(c.ctx)
	c.work.Go(func() { c.runBackground(c.ctx) })
	c.work.Go(func() { c.remotes.Run(c.ctx) })
	c.Store.Start(c.ctx)
	return nil
}

// revoked returns why a build of a layer is not served, "" if it is. While the store opens there
// are no trust documents yet; they are applied to it afterwards.
func (c *Cache) revoked(keys []*portable.Key, keyIDs string, m portable.Digest,
	b portable.Hash) string {
	if c.trust == nil {
		return ""
	}
	return c.trust.Why(keys, keyIDs, m, b)
}

// layersOf converts the layers of the options to those of the store.
func (c *Cache) layersOf(all []layer.Source) []layers.Source {
	below := make([]layers.Source, len(all))
	for i, one := range all {
		one.Revoked = c.revoked
		below[i] = one.Layer()
	}
	return below
}

func (c *Cache) openStore() (err error) {
	o := &c.options
	c.Store, err = store.Open(c.dir, store.Options{FS: o.fs, Layers: c.layersOf(o.Layers),
		Log: c.log, Now: c.now,
		PathAccess: o.PathAccess, Settings: c.settings.Load().store,
		Heard: c.events.Add, Compiling: func() bool { return c.jobs.Count() > 0 },
		Making: func(builds uint64, percent int) {
			if o.OnOpening != nil {
				o.OnOpening(fmt.Sprintf("the index is being rebuilt from the manifests: %d "+
					"builds, %d %%",
					builds, percent))
			}
		},
		Broken: func(err *index.BrokenError) {
			if o.OnBroken != nil {
				o.OnBroken(err)
			}
		},
		OnPublished: func(b *index.Build, uid uint32) {
			c.Rights.RecordSeen(request.Peer{UID: uid}, b)
			c.rebuilds.NotePublished(b)
			c.remotes.NotePublished(b)
		},
		OnWithheld: c.recompiler.RebuildDamaged,
		Bound:      func(uid uint32) bool { return !c.Rights.IsPublisher(request.Peer{UID: uid}) },
	})
	if err != nil {
		return err
	}
	c.index, c.cas = c.Store.Index(), c.Store.Blobs()
	c.packing, c.views = c.Store.Packing(), c.Store.Views()
	return nil
}

// openPlanning makes the parts that a plan needs: rights, models, jobs and runtimes.
func (c *Cache) openPlanning() {
	o := &c.options
	c.Rights = rights.New(c.uid, c.index, func() rights.Privileged {
		now := c.settings.Load()
		return rights.Privileged{Administrators: now.Administrators, Publishers: now.Publishers}
	}, c.log)
	c.models, c.sources = identity.NewModels(&c.index.Memos, c.now), identity.NewSources(c.uid)
	c.keptSources = &workspace.Sources{Models: c.models, References: c.sources,
		Store: c.Store, UID: c.uid}
	c.jobs = jobs.New(jobs.Options{Slots: o.Jobs, Memory: o.JobsMemory, Now: c.now,
		Costs: jobs.NewCosts(&c.index.Memos, c.log), OnGivenUp: runtimes.ErrGivenUp,
		Expect: c.Store.ExpectTakers, OnTaken: c.Store.TakerDone, OnBegan: c.gains.Interrupt,
		OnEnded: c.rebuilds.Wake})
	c.runtimes = runtimes.New(runtimes.Options{Compiler: c.compiler, Runtimes: o.Runtimes,
		Drivers: o.Drivers, Quiet: o.Quiet, Poll: o.Poll, UID: c.uid,
		Book: &c.index.Memos, Now: c.now, Log: c.log, Event: c.Store.RecordEvent,
		Inquire: func(ctx context.Context, q runtimes.Inquiry,
			find func(context.Context) (any, error)) (any, error) {
			who := jobs.Caller{UID: q.Asker.UID, Name: q.Asker.Model, Idle: !q.Asker.Request}
			return c.jobs.RunInquiry(ctx, q.Key, who, q.EP, find)
		},
		Assessed: c.buildJudge.JudgeAll,
		Attach:   func() any { return new(judge.Verdicts) },
		ReadShown: func(ctx context.Context, uid uint32) (func(), error) {
			return c.readGate.Lock(ctx, c.owners.OwnerOf(uid))
		},
	})
	c.Workspaces = &workspace.Maker{Store: c.Store, Runtimes: c.runtimes, Owner: c.owners.OwnerOf,
		Checks: jobs.NewQueue(o.Jobs, 0, c.now), Comparisons: jobs.NewQueue(o.Jobs, 0, c.now),
		SlowCopies: keyed.NewShares[uint32](32, 8)}
	c.Repeats.cache = c
	c.planner = &plan.Planner{Runtimes: c.runtimes, Models: c.models, Workspaces: c.Workspaces,
		Allowed: func() (identity.Allowed, uint64) {
			s := c.settings.Load()
			return s.AllowOptions, s.planning
		},
		TooLarge: func(r *request.Request) (string, error) {
			return answer.WhyTooLarge(c.settings.Load().Claims.Bytes, r)
		}}
}

// openJudging makes the parts that decide whether a build is served.
func (c *Cache) openJudging() {
	rebuild := func(b *index.Build, runtime, why string) {
		c.recompiler.Refresh(b, runtime, why, nil)
	}
	c.buildJudge = judge.Judge{Runtimes: c.runtimes, Compiler: c.compiler, Index: c.index,
		Now: c.now, Log: c.log, Event: c.Store.RecordEvent, Rebuild: rebuild,
		Rules: func() (*rules.Set, uint64) {
			s := c.settings.Load()
			return s.Rules, s.judging
		},
		Verdicts: func(rc *runtimes.Content) *judge.Verdicts {
			return rc.Attached.(*judge.Verdicts)
		},
		Target: func(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content,
			b *index.Build) (
			*judge.Target, error) {
			at, err := workspace.AttemptOf(b)
			if err == nil {
				at, err = c.planner.WithPlan(ctx, at.WithRuntime(rt.Name, rc))
			}
			if err != nil {
				return nil, err
			}
			return at.Plan.JudgeTarget(rt.Name, rc).Target(), nil
		},
	}
	c.facts = ttlcache.New(c.now, c.runLater)
	c.loadChecker = &loadcheck.Checker{Store: c.Store, Runtimes: c.runtimes, Compiler: c.compiler,
		Judges: &c.buildJudge, Results: c.facts, Workspaces: c.Workspaces, Policy: c.policyOf,
		Now: c.now, Planner: c.planner}
	c.reports = reports.New(reports.Options{Store: c.Store, Owner: c.owners.OwnerOf, Now: c.now,
		Log: c.log, Rebuild: rebuild, RunLater: c.runLater,
		Rules: func() *rules.Set { return c.settings.Load().Rules },
		Find: func(ctx context.Context, p request.Peer, entries []string) ([]index.Build, error) {
			return c.Queries.Find(ctx, p, entries)
		}})
}

// openAnswering makes the parts that find, make and report on builds.
func (c *Cache) openAnswering() {
	c.failures = failure.NewRemembered(c.now, c.index, c.options.Conditions, c.log)
	c.JobList = &joblist.List{Jobs: c.jobs, Rebuilds: &c.rebuilds, Failed: c.failures,
		Rights: c.Rights, Store: c.Store, Now: c.now}
	c.Queries = query.New(query.Options{Dir: c.dir, UID: c.uid, Started: c.started, Now: c.now,
		Rebuilt: c.options.Rebuilt, Killed: c.killed,
		Store: c.Store, Stream: &c.events, Rights: c.Rights,
		Runtimes: c.runtimes, Owner: c.owners.OwnerOf,
		Configured: c.configured.Load, Sandbox: c.loadChecker.Sandbox, Try: c.loadChecker.TryEP,
		Jobs: c.jobs.Count, Rebuilds: c.rebuilds.Waiting, Failures: c.JobList.Remembered,
		ExplainEntry: c.answers.ExplainEntry, Remotes: c.RemoteStatus,
		Judge: func(out *wire.Build, b *index.Build) {
			g := c.gains.ForBuild(b.ID)
			out.LoadSeconds, out.SourceLoadSeconds = g.Load, g.SourceLoad
			c.buildJudge.BestKnown(b).FillBuild(out)
		}})
	c.lookup = lookup.New(lookup.Options{Store: c.Store, Rights: c.Rights, Reports: c.reports,
		Judge: c.loadChecker, Policy: c.policyOf, Now: c.now, WhyNone: c.Queries.WhyNone,
		Planned: c.planner.WithPlan, Served: c.recompiler.RefreshIfStale,
		Warnings: func(id index.BuildID) []string { return c.gains.ForBuild(id).Warnings() }})
	c.trust = &trust.Documents{Options: trust.Options{Store: c.Store, Now: c.now, Log: c.log}}
	c.builder = build.New(build.Options{Store: c.Store, Jobs: c.jobs,
		Compiler: c.compiler, Kept: c.keptSources, Workspaces: c.Workspaces,
		Planner: c.planner, Lookup: c.lookup, LoadChecker: c.loadChecker, Failures: c.failures,
		Rights: c.Rights, MaxGraph: epmodel.MaxGraph, Log: c.log, Now: c.now, Policy: c.policyOf,
		Owner: c.owners.OwnerOf, RunLater: c.runLater, Begin: c.beginJob,
		OnStored: c.gains.MeasureBuild,
		Settings: func() build.Settings { return c.settings.Load().builder },
		MayPut: func(ctx context.Context, owner uint32, model string,
			sizes []int64) (int64, error) {
			return c.Claims.CheckPutQuota(ctx, owner, model, sizes)
		}})
	c.recompiler = upkeep.Recompiler{Builder: c.builder, Queue: &c.rebuilds}
	c.Claims = claims.New(c.builder, func() claims.Limits { return c.settings.Load().Claims },
		c.trust)
	c.answers = answer.Answerer{Builder: c.builder, Query: c.Queries, Claims: c.Claims,
		Remotes: func(at *request.Attempt) []string { return c.remotes.Explain(c.askOf(at, nil)) }}
	c.Changes = change.New(c.Store, c.Queries, c.Rights, c.now)
}
