package main

import (
	"context"
	"encoding/json"
	"time"

	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// watchStatus goes on until the context ends.
func (a *app) watchStatus(ctx context.Context, every time.Duration) error {
	again := func(ctx context.Context, c *unixsock.Client) error {
		return a.statusAgain(ctx, c, every)
	}
	return a.OverRestarts(ctx, again, func() {})
}

func (a *app) statusAgain(ctx context.Context, c *unixsock.Client, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for first := true; ; first = false {
		s, err := c.Status(ctx)
		if err != nil {
			return err
		}
		if err := a.printAgain(s, c.Hello(), first); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// printAgain takes a terminal's screen, and puts an empty line between two anywhere else.
func (a *app) printAgain(s *wire.StatusReply, h *wire.HelloReply, first bool) error {
	if a.JSON {
		return json.NewEncoder(a.Print.Out).Encode(statusOf(s, h))
	}
	if term.IsTerminal(a.Print.Out) {
		a.Print.Line("\x1b[H\x1b[2J%s", time.Now().Format(time.DateTime))
	} else if !first {
		a.Print.Line("")
	}
	for _, warning := range s.GetWarnings() {
		a.Print.Line("warning: %s", term.Printable(warning))
	}
	return printStatusTable(a.Print, s, h)
}
