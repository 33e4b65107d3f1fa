package main

import (
	"context"
	"strconv"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) checkSpace(ctx context.Context, c *unixsock.Client) error {
	reply, err := a.checked(ctx, c, &wire.Check{Space: true})
	if err != nil {
		return err
	}
	all, differs := int64(0), false
	for _, l := range reply.GetSpace() {
		all += l.GetDiskBytes()
		differs = differs || l.AccountedBytes != nil && l.GetAccountedBytes() != l.GetDiskBytes()
	}
	if a.JSON {
		out := jsonout.Of(reply, "space", "findings")
		out["disk_bytes"] = all
		err = a.Print.JSON(out)
	} else {
		err = a.printSpace(reply, all, differs)
	}
	if err == nil && differs {
		return exit.Status(exit.Damage)
	}
	return err
}

func (a *app) printSpace(r *wire.CheckReply, all int64, differs bool) error {
	rows := [][]string{{"WHAT", "FILES", "ON DISK", "ACCOUNTED"}}
	for _, l := range r.GetSpace() {
		accounted := "-"
		if l.AccountedBytes != nil {
			accounted = term.Bytes(l.GetAccountedBytes())
			if d := l.GetAccountedBytes() - l.GetDiskBytes(); d != 0 {
				accounted += ", a difference of " + strconv.FormatInt(d, 10) + " bytes"
			}
		}
		rows = append(rows, []string{term.Printable(l.GetName()), strconv.FormatUint(l.GetFiles(), 10),
			term.Bytes(l.GetDiskBytes()), accounted})
	}
	if err := a.Print.Table(append(rows, []string{"all", "", term.Bytes(all), ""})); err != nil {
		return err
	}
	printStoreFindings(a.Print, r.GetFindings())
	if differs {
		a.Print.Line("the account differs from what the file system says")
	} else {
		a.Print.Line("the account is what the file system says")
	}
	return nil
}
