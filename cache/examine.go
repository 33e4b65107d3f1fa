package cache

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/sources"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/once"
	"github.com/epcached/epcached/unixsock/wire"
)

// Report decides on what a client reports of a build. from is the runtime that the client loaded it with.
func (c *Cache) Report(ctx context.Context, p request.Peer, r reports.Report, from runtimes.Ref) (*wire.ReportReply, error) {
	if from.ORTVersion == "" {
		from.ORTVersion = r.ORTVersion
	}
	return c.reports.Take(ctx, p, r, func(ctx context.Context, b *index.Build) (reports.Examined, error) {
		return c.examine(ctx, p, from, b)
	})
}

func (c *Cache) openReports() *reports.Reports {
	return reports.New(reports.Options{Index: c.index, Store: c.store, Rules: func() *rules.Set { return c.settings.Load().rules }, Owner: c.owners.Of, Ended: request.ContextError, Now: c.now, Log: c.log,
		Settings: func() reports.Settings {
			now := c.settings.Load()
			return reports.Settings{Trusted: now.trustedReporters, Quorum: now.reportQuorum}
		},
		Find: func(ctx context.Context, p request.Peer, entries []string) ([]index.Build, error) {
			return c.query.Find(ctx, p, entries)
		},
		Rebuild: func(b *index.Build, runtime, why string) { c.recompiler.Refresh(b, runtime, why, nil) }})
}

// examine finds out whether the build is sound: by its bytes, then by loading it with the runtime that the reporter used
// where that may be loaded here.
func (c *Cache) examine(ctx context.Context, p request.Peer, from runtimes.Ref, b *index.Build) (reports.Examined, error) {
	err := c.sameBytesAsEver(ctx, b)
	if ctx.Err() != nil {
		return reports.Examined{}, ctx.Err()
	}
	if err != nil {
		return reports.Examined{Verdict: reports.Damaged, Text: c.store.WithholdDamaged(ctx, b, err)}, nil
	}
	at, err := c.planReported(ctx, p, from, b)
	if ctx.Err() != nil {
		return reports.Examined{}, ctx.Err()
	}
	if errors.Is(err, errElsewhere) {
		return reports.Examined{Verdict: reports.Elsewhere, Text: err.Error()}, nil
	}
	if err != nil {
		return reports.Examined{Text: "it could not be tried with your runtime: " + err.Error()}, nil
	}
	a := at.Plan.Against(at.RuntimeName, at.Content)
	out := reports.Examined{Runtime: a.Runtime, Exactly: at.Plan.MadeExactly(b), Disprove: func(text string) { c.disprove(a, b, text) }}
	t, err := c.trials.Reported(ctx, a, b)
	switch {
	case ctx.Err() != nil:
		return reports.Examined{}, ctx.Err()
	case err != nil:
		out.Text = "it could not be tried here: " + err.Error()
	case t.Outcome == compilers.Passed:
		out.Verdict, out.Text, out.Level = reports.Loads, "it loads here, in a process of its own, with "+at.RuntimeName, t.GraphOptimizationLevel
	case t.Outcome == compilers.NotCheckable:
		out.Verdict, out.Text = reports.Unprovable, "whether it loads cannot be told on this machine, which lacks the device that it is for"
	case t.Control != "":
		out.Text = "it does not load here, but neither does what is known to be sound: " + compilers.LastWords(t.Control)
	default:
		out.Verdict, out.Text = reports.Refuted, fmt.Sprintf("it does not load here either: %s", identity.Shortened(t.Text))
	}
	return out, nil
}

// sameBytesAsEver hashes the build's files, whatever their stamps say.
func (c *Cache) sameBytesAsEver(ctx context.Context, b *index.Build) error {
	_, err := once.Do(ctx, c.facts, "bytes-"+b.ID.String(), func(ctx context.Context) (bool, error) {
		for _, f := range b.Files {
			if err := c.forms.Check(ctx, f.Digest); err != nil {
				return false, fmt.Errorf("%s: %w", f.Name, err)
			}
		}
		return true, nil
	})
	return err
}

var errElsewhere = errors.New("the device that it is for is not in this machine")

// planReported thinks the build's request through for the runtime that the reporter used.
func (c *Cache) planReported(ctx context.Context, p request.Peer, from runtimes.Ref, b *index.Build) (*request.Attempt, error) {
	again, err := sources.AttemptOf(b)
	if err != nil {
		return nil, err
	}
	rt, rc, err := c.runtimeReported(ctx, b, &request.Request{Peer: p, EPs: again.EPs, Runtime: from})
	if err != nil {
		return nil, err
	}
	facts, err := c.runtimes.Devices(ctx, runtimes.Asker{}, rc, false)
	if err != nil {
		return nil, err
	}
	for _, probe := range facts.EPs {
		for _, ep := range again.EPs {
			if probe.Name != ep.Name || probe.Error != "" {
				continue
			}
			if _, err := runtimes.ResolveDevices(facts, ep); err != nil {
				return nil, fmt.Errorf("%w: %w", errElsewhere, err)
			}
		}
	}
	return c.planner.Planned(ctx, again.WithRuntime(rt.Name, rc))
}

// runtimeReported is the one that the reporter named, as far as that is known here. Reports name libraries by path, and
// a path of another user's is not looked up, and say nothing of what is part of ONNX Runtime itself; so where it tells
// nothing, it is one whose libraries made the build.
func (c *Cache) runtimeReported(ctx context.Context, b *index.Build, req *request.Request) (*runtimes.Runtime, *runtimes.Content, error) {
	named := req.Runtime.Directory != "" || len(req.Runtime.EPLibraries) > 0
	if named {
		if rt, rc, err := c.runtimes.Resolve(ctx, req.Wanted(), func(string) {}); err == nil || ctx.Err() != nil {
			return rt, rc, err
		}
	}
	for _, rt := range c.runtimes.All() {
		if rc, err := c.runtimes.Content(ctx, rt, func(string) {}); err == nil && rc.HasEvery(b) && rc.Made(b) {
			return rt, rc, nil
		}
	}
	if named || b.Put { // what was put, and by none of these, was made with libraries that only its application has
		return nil, nil, errors.New("it is not known here, and no other one made the build")
	}
	return c.runtimes.Resolve(ctx, req.Wanted(), func(string) {})
}

// disprove remembers that a build of another library does not load with the runtime, whatever judgements said.
func (c *Cache) disprove(a *request.Against, b *index.Build, text string) {
	j := c.judges.Disprove(a.Target(), b, text)
	c.happened(event.Of(b, event.Judged, "%s for %s: %s", j.Verdict, a.Runtime, text))
}

// errDoubted refuses to compile once more what its user says does not load.
func errDoubted(at *request.Attempt) error {
	return apierr.New(apierr.Stale, nil, "model %q: you reported that what is compiled here for this request does not load, and it could not be verified", at.Name).
		WithFact("request_key", at.Plan.RequestKey.String()).
		WithHint("load the model without epcached; what is compiled here is offered again after %s", reports.DoubtHolds)
}
