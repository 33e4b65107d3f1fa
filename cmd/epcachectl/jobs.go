package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) jobsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "jobs [follow|cancel|retry]",
		Short: "list compiles, and remembered failures",
		Long: `jobs prints the compiles that wait or run, in the order in which they will: state, phase, time since it was queued,
how long such a compile usually takes, and how many requests wait for it ("-" is a compile in the background). Below stand the
failures that are remembered, with the reason and when a request may try again: until then, whoever asks is told at once.

Each shows what the caller may see. --json prints an object with the lists "jobs" and "failures".` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon, exit.NotAllowed),
		Example: `  epcachectl jobs
  epcachectl jobs follow 6524d4
  epcachectl jobs cancel --all
  epcachectl jobs retry mobilenet.onnx`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.WithReader(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				reply, err := c.Jobs(ctx)
				if err != nil {
					return err
				}
				return a.printJobs(reply)
			})
		},
	}
	cmd.AddCommand(a.jobsFollowCommand(), a.jobsCancelCommand(), a.jobsRetryCommand())
	return cmd
}

func (a *app) printJobs(reply *wire.JobsReply) error {
	if a.JSON {
		return a.Print.JSON(jsonout.Of(reply))
	}
	if len(reply.GetJobs())+len(reply.GetFailures()) == 0 {
		a.Print.Note("no jobs, and no failures are remembered")
	}
	if err := printJobTable(a.Print, reply.GetJobs()); err != nil {
		return err
	}
	if len(reply.GetJobs()) > 0 && len(reply.GetFailures()) > 0 {
		a.Print.Line("")
	}
	return printFailures(a.Print, reply.GetFailures(), time.Now())
}

// printJobTable prints a table; nothing where there are none.
func printJobTable(p *term.Printer, jobs []*wire.Job) error {
	if len(jobs) == 0 {
		return nil
	}
	rows := [][]string{{"JOB", "STATE", "PHASE", "ELAPSED", "USUALLY", "WAITING", "MODEL", "EP", "WHY"}}
	for _, j := range jobs {
		rows = append(rows, []string{
			term.OrDash(term.Short(j.GetId())), term.OrDash(j.GetState()), term.OrDash(j.GetPhase()), term.Whole(milliseconds(j.GetElapsedMs())), usually(j.GetEstimateMs()),
			waitingOf(j), modelOf(j), term.OrDash(j.GetEp()), term.OrDash(j.GetWhy()),
		})
	}
	return p.Table(rows)
}

// jobID finds the job whose name begins so, as short as the table has it. One that is not listed is left to the daemon.
func jobID(listed []*wire.Job, name string) (string, error) {
	var found []string
	for _, j := range listed {
		if j.GetId() == name {
			return name, nil
		}
		if strings.HasPrefix(j.GetId(), name) {
			found = append(found, j.GetId())
		}
	}
	switch len(found) {
	case 0:
		return name, nil
	case 1:
		return found[0], nil
	}
	return "", exit.Usage(exit.Hint(fmt.Errorf("job %q: %s begin so", term.Brief(name), term.Counted(len(found), "job")), "write more of it: epcachectl jobs --json"))
}

func milliseconds(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }

func usually(estimateMs int64) string {
	if estimateMs <= 0 {
		return "-"
	}
	return term.Whole(milliseconds(estimateMs))
}

func waitingOf(j *wire.Job) string {
	if j.GetWaiting() == 0 {
		return "-"
	}
	return strconv.FormatUint(uint64(j.GetWaiting()), 10)
}

func modelOf(j *wire.Job) string {
	name := j.GetModelName()
	if name == "" {
		name = term.Short(j.GetModelDigest())
	}
	name = term.OrDash(name)
	if n := j.GetModels(); n > 1 {
		name += fmt.Sprintf(" and %d more", n-1)
	}
	return name
}

// printFailures prints a table, each with the compiler's last words in a line below it.
func printFailures(p *term.Printer, failures []*wire.Failure, now time.Time) error {
	for i, f := range failures {
		if i > 0 {
			p.Line("")
		}
		name := f.GetModelName()
		if name == "" {
			name = term.Short(f.GetModelDigest())
		}
		p.Line("failed %s: %s, %s, %s", term.OrDash(name), term.OrDash(f.GetEp()), term.OrDash(f.GetReason()), times(f))
		if f.GetText() != "" {
			p.Line("  %s", term.Printable(term.Ending(oneLine(f.GetText()))))
		}
		p.Line("  %s", retryOf(f, now))
	}
	return nil
}

// oneLine keeps what a compiler said in lines to one.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

func times(f *wire.Failure) string {
	if f.GetCount() <= 1 {
		return term.Time(f.GetLastMs())
	}
	return fmt.Sprintf("%d times, the last %s", f.GetCount(), term.Time(f.GetLastMs()))
}

func retryOf(f *wire.Failure, now time.Time) string {
	ways := "epcachectl jobs retry " + term.OrDash(term.Short(f.GetBuild()))
	at := time.UnixMilli(f.GetRetryMs())
	switch {
	case f.GetRetryMs() == 0:
		return "tried again when something changes, or after: " + ways
	case !at.After(now):
		return "tried again by the next request"
	}
	return fmt.Sprintf("tried again by a request in %s, or after: %s", term.Whole(at.Sub(now)), ways)
}
