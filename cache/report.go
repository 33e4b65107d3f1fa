package cache

import (
	"context"

	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// Report decides on what a client reports of a build. from is the runtime that the client loaded it
// with.
func (c *Cache) Report(ctx context.Context, p request.Peer, r reports.Report, from runtimes.Ref) (
	*wire.ReportReply, error) {
	if from.ORTVersion == "" {
		from.ORTVersion = r.ORTVersion
	}
	return c.reports.Take(ctx, p, r, func(ctx context.Context, b *index.Build) (reports.Examined, error) {
		return c.trials.Examine(ctx, p, from, b)
	})
}

func (c *Cache) openReports() *reports.Reports {
	return reports.New(reports.Options{Index: c.index, Store: c.store, Owner: c.owners.Of,
		Ended: request.ContextError, Now: c.now, Log: c.log,
		Rules: func() *rules.Set { return c.settings.Load().rules },
		Settings: func() reports.Settings {
			now := c.settings.Load()
			return reports.Settings{Trusted: now.trustedReporters, Quorum: now.reportQuorum}
		},
		Find: func(ctx context.Context, p request.Peer, entries []string) ([]index.Build, error) {
			return c.query.Find(ctx, p, entries)
		},
		Rebuild: func(b *index.Build, runtime, why string) { c.recompiler.Refresh(b, runtime, why, nil) }})
}
