package main

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// watchStatus goes on until the context ends, which is how it is meant to end.
func (a *app) watchStatus(ctx context.Context, every time.Duration) error {
	if a.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, a.timeout)
		defer cancel()
	}
	client, err := a.connect(ctx)
	for err == nil {
		err = errors.Join(a.statusAgain(ctx, client, every), client.Close())
		if err == nil || !interrupted(err) || ctx.Err() != nil {
			break
		}
		a.print.Note("the daemon went away; waiting for it")
		client, err = a.reconnect(ctx)
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
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
	if a.json {
		return json.NewEncoder(a.print.Out).Encode(statusOf(s, h))
	}
	if term.IsTerminal(a.print.Out) {
		a.print.Line("\x1b[H\x1b[2J%s", time.Now().Format(time.DateTime))
	} else if !first {
		a.print.Line("")
	}
	for _, warning := range s.GetWarnings() {
		a.print.Line("warning: %s", term.Printable(warning))
	}
	return printStatusTable(a.print, s, h)
}
