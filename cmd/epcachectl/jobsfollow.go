package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) jobsFollowCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "follow JOB",
		Short: "wait for a compile, and show how far it is",
		Long: `follow waits for the end of a compile and prints it. Meanwhile it shows how far the compile is: on a terminal with
a bar, elsewhere with a line for each phase, to standard error. Who follows does not keep the compile going: it ends when all
who asked for it have gone, unless it runs in the background.` + exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.NoDaemon, exit.NotAllowed, exit.Interrupt) + `
Failed means that the compile did, or was cancelled.`,
		Example: "  epcachectl jobs follow 6524d4",
		Args:    cli.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				listed, err := c.Jobs(ctx)
				if err != nil {
					return err
				}
				id, err := jobID(listed.GetJobs(), args[0])
				if err != nil {
					return err
				}
				show := term.NewPhases(a.Print, !a.Print.Terminal && !a.JSON, 1)
				job, err := c.Follow(ctx, &wire.Follow{Job: id}, func(p *wire.Progress) { show.Phase(args[0], p) })
				show.End()
				if err != nil {
					return exit.Early(ctx, exit.Failing("follow", args[0], err), a.Timeout, func() (string, string) {
						return "", "the compile goes on as before; give it up: epcachectl jobs cancel " + term.Printable(args[0])
					})
				}
				return a.printEnd(job)
			})
		},
	}
}

// printEnd tells how a job ended; a failure is the call's.
func (a *app) printEnd(job *wire.Job) error {
	failed := jobError(job)
	if a.JSON {
		if err := a.Print.JSON(jsonout.Of(job)); err != nil || failed == nil {
			return err
		}
		return exit.Status(exit.Code(failed))
	}
	if failed != nil {
		return exit.Failing("compile", jobName(job), failed)
	}
	a.Print.Line("%s", jobLine(job))
	return nil
}

// jobError is what a job ended with, nil if it is done.
func jobError(job *wire.Job) error {
	if e := job.GetError(); e != nil {
		return &unixsock.Error{Class: e.GetClass(), Text: e.GetText(), Hint: e.GetHint(), Facts: e.GetFacts()}
	}
	switch job.GetState() {
	case "done":
		return nil
	case "cancelled":
		return &unixsock.Error{Class: wire.ErrorClass_CANCELLED, Text: "it was cancelled"}
	}
	return fmt.Errorf("job %s is %s", term.Printable(job.GetId()), term.OrDash(job.GetState()))
}

func jobName(job *wire.Job) string {
	if job.GetModelName() != "" {
		return job.GetModelName()
	}
	return job.GetId()
}

func jobLine(job *wire.Job) string {
	return fmt.Sprintf("%s %s: %s", term.OrDash(job.GetState()), modelOf(job), jobResultLine(job))
}

func jobResultLine(job *wire.Job) string {
	return fmt.Sprintf("%s build %s in %s", term.OrDash(job.GetEp()), term.OrDash(term.Short(job.GetBuild())), term.Seconds(milliseconds(job.GetElapsedMs()).Seconds()))
}
