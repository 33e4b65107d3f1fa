package cache

import (
	"context"
	"fmt"

	"github.com/epcached/epcached/cache/answer"
	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/change"
	"github.com/epcached/epcached/cache/claims"
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
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/once"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// open opens the store, makes the parts in the order in which they need each other, and starts
// them.
func (c *Cache) open() error {
	if err := c.openStore(); err != nil {
		return err
	}
	// Nothing fails from here on: what is begun is ended by Close.
	c.ctx, c.stop = context.WithCancel(context.Background())
	c.openPlanning()
	c.openJudging()
	c.openAnswering()
	c.gains.Start(c.ctx, c.builder)
	c.rebuilds.Start(c.ctx, upkeep.Options{LastUse: c.index.Uses.Last, Busy: c.jobs.Busy,
		Now: c.now, Log: c.log,
		Limits: func() upkeep.Limits { return c.settings.Load().rebuild }}) // before anything is wished for
	c.runtimes.Start(c.ctx)
	before := c.backlog.Rows()
	c.work.Go(func() { c.background(c.ctx, before) })
	c.store.Start(c.ctx)
	return nil
}

// compiling reports whether a job waits or runs.
func (c *Cache) compiling() bool { return c.jobs.Count() > 0 }

func (c *Cache) openStore() (err error) {
	o := &c.options
	c.store, err = store.Open(c.dir, store.Options{FS: o.fs, Log: c.log, Now: c.now,
		PathAccess: o.PathAccess, UnpackedDir: o.UnpackedDir, Settings: c.settings.Load().store,
		Heard: c.events.Add, Compiling: c.compiling,
		Making: func(builds uint64, percent int) {
			if o.Opening != nil {
				o.Opening(fmt.Sprintf("the index is being made from the manifests: %d builds, %d %%",
					builds, percent))
			}
		},
		Broken: func(err *index.BrokenError) {
			if o.Broken != nil {
				o.Broken(err)
			}
		},
		Published: func(b *index.Build, uid uint32) {
			c.rights.Saw(request.Peer{UID: uid}, b)
			c.rebuilds.Published(b)
		},
		Withheld: func(b *index.Build) { c.recompiler.Heal(b) },
	})
	if err != nil {
		return err
	}
	c.index, c.cas = c.store.Index(), c.store.Blobs()
	c.forms, c.views = c.store.Forms(), c.store.Views()
	return nil
}

// openPlanning makes what a plan needs: rights, models, jobs and runtimes.
func (c *Cache) openPlanning() {
	o := &c.options
	c.rights = rights.New(c.uid, c.index, func() rights.Privileged {
		now := c.settings.Load()
		return rights.Privileged{Administrators: now.Administrators, Publishers: now.Publishers}
	}, c.log)
	c.models, c.sources = identity.NewModels(&c.index.Memos, c.now), identity.NewSources(c.uid)
	c.kept = sources.New(c.models, c.sources, c.store, c.uid)
	c.jobs = jobs.New(jobs.Options{Slots: o.Jobs, Memory: o.JobsMemory, Now: c.now,
		Costs: jobs.NewCosts(&c.index.Memos, c.log), GivenUp: runtimes.ErrGivenUp,
		Expect: c.store.Expect, Taken: c.store.Taken, Began: c.gains.Disturb, Ended: c.rebuilds.Wake})
	c.runtimes = runtimes.New(runtimes.Options{Compiler: c.compiler, Runtimes: o.Runtimes,
		Drivers: o.Drivers, Quiet: o.Quiet, Poll: o.Poll, UID: c.uid,
		Book: &c.index.Memos, Now: c.now, Log: c.log, Event: c.store.Happened,
		Inquire: func(ctx context.Context, q runtimes.Question,
			find func(context.Context) (any, error)) (any, error) {
			who := jobs.Caller{UID: q.Asker.UID, Name: q.Asker.Model, Idle: !q.Asker.Request}
			return c.jobs.Inquire(ctx, q.Key, who, q.EP, find)
		},
		Assessed: func(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content,
			former map[string]string, told bool) bool {
			return c.judges.All(ctx, rt, rc, former, told)
		},
		Attach: func() any { return &plan.Notes{} },
		ReadShown: func(ctx context.Context, uid uint32) (func(), error) {
			return c.reading.Lock(ctx, c.owners.Of(uid))
		},
	})
	c.workspaces = &workspace.Maker{Store: c.store, Runtimes: c.runtimes, Checks: c.checks}
	c.planner = &plan.Planner{Runtimes: c.runtimes, Models: c.models, Workspaces: c.workspaces,
		Allowed: func() (identity.Allowed, uint64) {
			s := c.settings.Load()
			return s.AllowOptions, s.planning
		},
		TooLarge: func(r *request.Request) (string, error) {
			return answer.TooLarge(c.settings.Load().Claims.Bytes, r)
		}}
}

// openJudging makes what decides whether a build is served.
func (c *Cache) openJudging() {
	rebuild := func(b *index.Build, runtime, why string) { c.recompiler.Refresh(b, runtime, why, nil) }
	c.judges = judge.New(judge.Options{Runtimes: c.runtimes, Compiler: c.compiler, Index: c.index,
		Now: c.now, Log: c.log, Event: c.store.Happened, Rebuild: rebuild,
		Rules: func() (*rules.Set, uint64) {
			s := c.settings.Load()
			return s.Rules, s.judging
		},
		Verdicts: func(rc *runtimes.Content) *judge.Verdicts { return &plan.NotesOn(rc).Verdicts },
		Target: func(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content, b *index.Build) (
			*judge.Target, error) {
			at, err := sources.AttemptOf(b)
			if err == nil {
				at, err = c.planner.Planned(ctx, at.WithRuntime(rt.Name, rc))
			}
			if err != nil {
				return nil, err
			}
			return at.Plan.Against(rt.Name, rc).Target(), nil
		},
	})
	c.facts = once.New(c.now, c.later)
	c.trials = &trial.Trials{Store: c.store, Runtimes: c.runtimes, Compiler: c.compiler,
		Judges: c.judges, Facts: c.facts, Workspaces: c.workspaces, Policy: c.policyOf, Now: c.now, Planner: c.planner}
	c.reports = reports.New(reports.Options{Store: c.store, Owner: c.owners.Of,
		Now: c.now, Log: c.log, Rebuild: rebuild,
		Rules: func() *rules.Set { return c.settings.Load().Rules },
		Settings: func() reports.Settings {
			now := c.settings.Load()
			return reports.Settings{Trusted: now.TrustedReporters, Quorum: now.ReportQuorum}
		},
		Find: func(ctx context.Context, p request.Peer, entries []string) ([]index.Build, error) {
			return c.query.Find(ctx, p, entries)
		}})
}

// openAnswering makes what finds builds, makes them, and reports on them.
func (c *Cache) openAnswering() {
	c.failures = failure.NewRemembered(c.now, c.index, c.options.Conditions, c.log)
	c.jobList = &joblist.List{Jobs: c.jobs, Rebuilds: &c.rebuilds, Failed: c.failures,
		Rights: c.rights, Store: c.store, Now: c.now}
	c.query = query.New(query.Options{Dir: c.dir, UID: c.uid, Started: c.started, Now: c.now,
		Remade: c.options.Remade, Store: c.store, Stream: &c.events, Rights: c.rights,
		Runtimes: c.runtimes, Owner: c.owners.Of,
		Configured: c.configured.Load, Sandbox: c.trials.Sandbox, Try: c.trials.EP,
		Jobs: c.jobs.Count, Rebuilds: c.rebuilds.Waiting, Failures: c.jobList.Remembered,
		PlanAgain: func(ctx context.Context, p request.Peer, builds []index.Build) (
			*query.Question, error) {
			return c.answers.Again(ctx, p, builds)
		},
		Judge: func(out *wire.Build, b *index.Build) {
			g := c.gains.Of(b.ID)
			out.LoadSeconds, out.SourceLoadSeconds = g.Load, g.SourceLoad
			c.judges.Standing(b).Fill(out)
		}})
	c.lookup = lookup.New(lookup.Options{Store: c.store, Rights: c.rights,
		Reports: c.reports, Judge: c.trials, Policy: c.policyOf, Now: c.now,
		WhyNone: c.query.WhyNone, Planned: c.planner.Planned,
		Served: func(at *request.Attempt, b *index.Build, j judge.Judgement) {
			c.recompiler.Freshen(at, b, j)
		},
		Warnings: func(id index.BuildID) []string { return c.gains.Of(id).Warnings() }})
	c.backlog = &upkeep.Backlog{Table: &c.index.Wanted, Later: c.later, References: c.sources,
		Sources: c.kept, UID: c.uid, Happened: c.store.Happened, Log: c.log, Acquire: c.acquireResumed}
	c.builder = build.New(build.Options{Dir: c.dir, UID: c.uid, Store: c.store, Jobs: c.jobs,
		Compiler: c.compiler, Models: c.models, Sources: c.sources, Workspaces: c.workspaces,
		Planner: c.planner, Lookup: c.lookup, Trials: c.trials, Failures: c.failures,
		Rights: c.rights, MaxGraph: epmodel.MaxGraph, Log: c.log, Now: c.now, Policy: c.policyOf,
		Owner: c.owners.Of, Later: c.later, Queued: c.backlog.Keep, Stored: c.gains.MeasureBuild,
		Settings: func() build.Settings { return c.settings.Load().builder },
		MayPut: func(ctx context.Context, owner uint32, model string, sizes []int64) (int64, error) {
			return c.claims.MayPut(ctx, owner, model, sizes)
		}})
	c.recompiler = &upkeep.Recompiler{Builder: c.builder, Kept: c.kept, Queue: &c.rebuilds}
	c.claims = claims.New(c.builder, func() claims.Limits { return c.settings.Load().Claims })
	c.answers = &answer.Answerer{Builder: c.builder, Query: c.query, Claims: c.claims}
	c.Changes = change.New(c.store, c.query, c.rights, c.now)
}
