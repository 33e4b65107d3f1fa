package main

import (
	"context"
	"strconv"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// checkSpaceResult is what check --space prints with --json.
type checkSpaceResult struct {
	Space    []spaceLineJSON `json:"space"`
	Bytes    int64           `json:"disk_bytes"` // of all lines together
	Findings []findingResult `json:"findings"`
}

type spaceLineJSON struct {
	Name           string `json:"name"`
	Files          uint64 `json:"files"`
	DiskBytes      int64  `json:"disk_bytes"`
	AccountedBytes *int64 `json:"accounted_bytes"` // null: no account is kept
}

func (a *app) checkSpace(ctx context.Context, c *unixsock.Client) error {
	reply, err := a.checked(ctx, c, &wire.Check{Space: true})
	if err != nil {
		return err
	}
	out := checkSpaceResult{Space: []spaceLineJSON{}, Findings: []findingResult{}}
	differs := false
	for _, l := range reply.GetSpace() {
		out.Space = append(out.Space, spaceLineJSON{l.GetName(), l.GetFiles(), l.GetDiskBytes(), l.AccountedBytes})
		out.Bytes += l.GetDiskBytes()
		differs = differs || l.AccountedBytes != nil && l.GetAccountedBytes() != l.GetDiskBytes()
	}
	for _, f := range reply.GetFindings() {
		out.Findings = append(out.Findings, findingResult{f.GetKind(), f.GetObject(), f.GetDetail(), append([]string{}, f.GetBuilds()...)})
	}
	if a.json {
		err = a.print.json(out)
	} else {
		err = a.printSpace(&out, differs)
	}
	if err == nil && differs {
		return exitError(exitDamage)
	}
	return err
}

func (a *app) printSpace(out *checkSpaceResult, differs bool) error {
	rows := [][]string{{"WHAT", "FILES", "ON DISK", "ACCOUNTED"}}
	for _, l := range out.Space {
		accounted := "-"
		if l.AccountedBytes != nil {
			accounted = byteSize(*l.AccountedBytes)
			if d := *l.AccountedBytes - l.DiskBytes; d != 0 {
				accounted += ", a difference of " + strconv.FormatInt(d, 10) + " bytes"
			}
		}
		rows = append(rows, []string{printable(l.Name), strconv.FormatUint(l.Files, 10), byteSize(l.DiskBytes), accounted})
	}
	if err := a.print.table(append(rows, []string{"all", "", byteSize(out.Bytes), ""})); err != nil {
		return err
	}
	for _, f := range out.Findings {
		a.print.line("%s %s: %s", printable(f.Kind), printable(f.Object), printable(f.Detail))
	}
	if differs {
		a.print.line("the account differs from what the file system says")
	} else {
		a.print.line("the account is what the file system says")
	}
	return nil
}
