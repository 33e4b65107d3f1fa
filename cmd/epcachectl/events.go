package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newEvents(a *cli.Call) *cobra.Command {
	var since string
	var limit uint32
	var follow bool
	cmd := &cobra.Command{
		Use:   "events [--since T] [--follow]",
		Short: "print recorded events",
		Long: `events prints what the daemon did and noticed, the oldest first: compiles, damage,
changed runtimes and drivers, judgements, reports, and builds that were withheld, recompiled or
removed. status counts hits, and show shows packing. Users see events of builds that they may see.

--since takes a duration (2h, 3d), a time of day, a day or a time (14:30, 2026-11-21,
2026-11-21T14:30:00Z). --follow continues until it is interrupted, also over restarts of the
daemon, and misses and repeats nothing. --json prints one object a line.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon, exit.NotAllowed),
		Example: `  epcachectl events --since 1d
  epcachectl events --follow --json | jq 'select(.kind == "withheld")'`,
		Args: cli.UsageArgs(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var from time.Time
			var err error
			switch {
			case since != "":
				from, err = parseSince(since, time.Now())
			case follow:
				from = time.Now()
			}
			if err != nil {
				return exit.Usage(err)
			}
			if follow {
				f := &follower{call: a, since: from, limit: limit, seen: make(map[string]int64)}
				return a.AcrossRestarts(cmd.Context(), f.listen, func() {
					a.Print.Note("the daemon is back")
					f.last = 0
				})
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				reply, err := unixsock.Ask[wire.EventsReply](ctx, c,
					&wire.Events{SinceMs: sinceMs(from), Limit: limit}, nil)
				for _, e := range reply.GetEvents() {
					if err == nil {
						err = printEvent(a, e)
					}
				}
				return err
			})
		},
	}
	cmd.Flags().StringVar(&since, "since", "", "only events since `T`")
	cmd.Flags().Uint32Var(&limit, "limit", 0, "only the newest `N` events")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "continue with new events")
	return cmd
}

func sinceMs(at time.Time) int64 {
	if at.IsZero() {
		return 0
	}
	return max(1, at.UnixMilli()) // 0 would mean all
}

func printEvent(a *cli.Call, e *wire.Event) error {
	if !a.JSON {
		a.Print.Line("%s", eventLine(a.Print, e))
		return nil
	}
	return a.Print.JSONLine(jsonout.Of(e)) // each event is one line
}

func eventLine(p *term.Printer, e *wire.Event) string {
	return term.Time(e.GetAtMs()) + "  " +
		p.State(fmt.Sprintf("%-13s", term.Printable(e.GetKind()))) +
		term.WithPrefix("  ", e.GetModel()) + term.WithPrefix("  build ",
		term.Short(e.GetBuild())) +
		term.WithPrefix("  ", e.GetRuntime()) + term.WithPrefix("  ", e.GetText())
}

// settleTime is the time after subscribing at which past events are listed again, because a
// subscription has no answer that says when it began.
const settleTime = 200 * time.Millisecond

// follower prints events as they happen, also after restarts of the daemon.
type follower struct {
	call  *cli.Call
	since time.Time // start of the next query for past events
	limit uint32
	last  uint64           // sequence of the last event of this connection
	seen  map[string]int64 // time of each printed event, by identity
}

// listen subscribes first and then lists past events, so that none is missed in between.
func (f *follower) listen(ctx context.Context, c *unixsock.Client) error {
	ctx, stop := context.WithCancel(ctx)
	live := make(chan *wire.Event)
	done := make(chan struct{})
	var ended error // valid after done is closed
	go func() {
		defer close(done)
		ended = c.Subscribe(ctx, func(e *wire.Event) error {
			select {
			case live <- e:
			case <-ctx.Done():
			}
			return nil
		})
	}()
	err := f.merge(ctx, c, live, done)
	stop()
	<-done
	return errors.Join(err, ended)
}

func (f *follower) merge(ctx context.Context, c *unixsock.Client, live <-chan *wire.Event,
	done <-chan struct{}) error {
	if err := f.catchUp(ctx, c); err != nil {
		return err
	}
	settled := time.NewTimer(settleTime)
	defer settled.Stop()
	for {
		var err error
		select {
		case <-done:
			return nil
		case <-settled.C:
			err = f.catchUp(ctx, c)
		case e := <-live:
			err = f.handleEvent(ctx, c, e)
		}
		if err != nil {
			return err
		}
	}
}

func (f *follower) catchUp(ctx context.Context, c *unixsock.Client) error {
	reply, err := unixsock.Ask[wire.EventsReply](ctx, c,
		&wire.Events{SinceMs: sinceMs(f.since), Limit: f.limit}, nil)
	if err == nil {
		f.limit = 0 // the limit applies to the first list only
	}
	for _, e := range reply.GetEvents() {
		if err == nil {
			err = f.print(e)
		}
	}
	return err
}

// handleEvent prints a new event. After a gap in the sequence numbers it lists past events, because
// the missing ones are another user's or were dropped.
func (f *follower) handleEvent(ctx context.Context, c *unixsock.Client, e *wire.Event) error {
	missed := e.GetKind() == unixsock.EventMissed
	if missed || f.last != 0 && e.GetSequence() > f.last+1 {
		if err := f.catchUp(ctx, c); err != nil {
			return err
		}
	}
	if missed {
		return nil
	}
	return f.print(e)
}

func (f *follower) print(e *wire.Event) error {
	f.last = max(f.last, e.GetSequence())
	// It identifies the event also after a restart of the daemon, which numbers events again.
	id := fmt.Sprintf("%d %q", e.GetAtMs(),
		[]string{e.GetKind(), e.GetRequestKey(), e.GetBuild(), e.GetModel(),
			e.GetRuntime(), e.GetText()})
	if _, seen := f.seen[id]; seen {
		return nil
	}
	f.seen[id] = e.GetAtMs()
	if at := time.UnixMilli(e.GetAtMs()); at.After(f.since) {
		f.since = at
		if len(f.seen) >= 4096 { // drop those that will not be listed again
			maps.DeleteFunc(f.seen, func(_ string, at int64) bool {
				return at < f.since.UnixMilli()
			})
		}
	}
	return printEvent(f.call, e)
}

// sinceForms are the formats of a time; those without a zone are in local time.
var sinceForms = []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02 15:04:05",
	"2006-01-02T15:04", "2006-01-02 15:04", "2006-01-02"}

// parseSince reads a duration before now, a time, a day, or a time of day, which means its last
// occurrence.
func parseSince(text string, now time.Time) (time.Time, error) {
	if d, err := config.ParseDuration(text); err == nil {
		return now.Add(-d), nil
	}
	for _, form := range sinceForms {
		if at, err := time.ParseInLocation(form, text, now.Location()); err == nil {
			return at, nil
		}
	}
	for _, form := range []string{"15:04", "15:04:05"} {
		at, err := time.Parse(form, text)
		if err != nil {
			continue
		}
		today := time.Date(now.Year(), now.Month(), now.Day(), at.Hour(), at.Minute(), at.Second(),
			0, now.Location())
		if today.After(now) {
			return today.AddDate(0, 0, -1), nil
		}
		return today, nil
	}
	return time.Time{}, fmt.Errorf("--since %q is neither a duration, such as 2h or 3d, nor a "+
		"time, such as 2026-11-21, 14:30 or 2026-11-21T14:30:00Z", term.Brief(text))
}
