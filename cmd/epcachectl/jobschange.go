package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func (a *app) jobsCancelCommand() *cobra.Command {
	var all, dryRun bool
	cmd := &cobra.Command{
		Use:   "cancel JOB... | cancel --all",
		Short: "give compiles up",
		Long: `cancel takes the caller out of compiles: its requests are answered with "cancelled", and a compile that nobody else wants
ends. An administrator ends it for all. --all is all that the caller asked for, of an administrator all that there are. With -n it
prints what would be cancelled.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl jobs cancel 6524d4
  epcachectl jobs cancel --all -n`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return exit.Usage(exit.Hint(errors.New("jobs cancel: name jobs, or give --all"), "see what there is: epcachectl jobs"))
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				listed, err := c.Jobs(ctx)
				if err != nil {
					return exit.During("jobs cancel", err)
				}
				ids := make([]string, len(args))
				for i, name := range args {
					if ids[i], err = jobID(listed.GetJobs(), name); err != nil {
						return err
					}
				}
				if !dryRun {
					reply, err := c.CancelJobs(ctx, &wire.CancelJobs{Jobs: ids, All: all})
					return a.printEnded(reply, "cancelled", false, exit.During("jobs cancel", err))
				}
				chosen := &wire.JobsReply{}
				for _, id := range ids {
					if !slices.ContainsFunc(listed.GetJobs(), func(j *wire.Job) bool { return j.GetId() == id }) {
						return exit.Hint(exit.Missing(fmt.Sprintf("jobs cancel: no job %q", term.Brief(id))), "see what there is: epcachectl jobs")
					}
				}
				for _, j := range listed.GetJobs() {
					if all || slices.Contains(ids, j.GetId()) {
						chosen.Jobs = append(chosen.Jobs, j)
					}
				}
				return a.printEnded(chosen, "would cancel", true, nil)
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "give all of them up")
	cmd.Flags().BoolVarP(&dryRun, "dry-run", "n", false, "change nothing, print what would be")
	return cmd
}

func (a *app) jobsRetryCommand() *cobra.Command {
	var all, dryRun bool
	cmd := &cobra.Command{
		Use:   "retry ENTRY|MODEL... | retry --all",
		Short: "forget failures, so that they are tried again",
		Long: `retry has the daemon forget that compiles failed: the next request for one compiles again, and is not answered with what is
remembered. ENTRY is as for show, and a model's file or name stands for all that failed of it. With -n it prints what would be
forgotten.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl jobs retry mobilenet.onnx
  epcachectl jobs retry --all`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return exit.Usage(exit.Hint(errors.New("jobs retry: name entries, or give --all"), "see what failed: epcachectl jobs"))
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				entries, err := modelfile.Entries(ctx, args)
				if err != nil {
					return err
				}
				if !dryRun {
					reply, err := c.RetryJobs(ctx, &wire.RetryJobs{Entries: entries, All: all})
					return a.printEnded(reply, "forgot", false, exit.During("jobs retry", modelfile.AsGiven(err, args, entries)))
				}
				reply, err := c.Jobs(ctx)
				chosen := &wire.JobsReply{}
				for i, entry := range entries {
					if err == nil && !slices.ContainsFunc(reply.GetFailures(), func(f *wire.Failure) bool { return isOf(f, entry) }) {
						return exit.Hint(exit.Missing(fmt.Sprintf("jobs retry: no failure is remembered of %q", term.Brief(args[i]))), "see what there is: epcachectl jobs")
					}
				}
				for _, f := range reply.GetFailures() {
					if all || slices.ContainsFunc(entries, func(entry string) bool { return isOf(f, entry) }) {
						chosen.Failures = append(chosen.Failures, f)
					}
				}
				return a.printEnded(chosen, "would forget", true, err)
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "forget all of them")
	cmd.Flags().BoolVarP(&dryRun, "dry-run", "n", false, "forget nothing, print what would be")
	return cmd
}

// isOf tells whether the entry's name means the failure, as the daemon would.
func isOf(f *wire.Failure, entry string) bool {
	for _, key := range []string{f.GetBuild(), f.GetRequestKey(), f.GetModelDigest()} {
		if entry != "" && strings.HasPrefix(key, entry) {
			return true
		}
	}
	return entry == f.GetModelName()
}

// printEnded prints the jobs and failures that a change was about.
func (a *app) printEnded(reply *wire.JobsReply, did string, dryRun bool, err error) error {
	if err != nil {
		return err
	}
	if a.JSON {
		return a.PrintForScripts(dryRun, reply)
	}
	if len(reply.GetJobs())+len(reply.GetFailures()) == 0 {
		a.Print.Line("%s nothing", did)
	}
	for _, j := range reply.GetJobs() {
		what := did + " " + modelOf(j)
		switch state := j.GetState(); {
		case dryRun || state == "cancelled":
		case state == "done":
			what = modelOf(j) + " is done already"
		case state == "failed":
			what = modelOf(j) + " has failed already"
		default:
			what = "left " + modelOf(j) + " to others, who want it"
		}
		a.Print.Line("%s: %s, job %s", what, term.OrDash(j.GetEp()), term.OrDash(term.Short(j.GetId())))
	}
	for _, f := range reply.GetFailures() {
		a.Print.Line("%s %s: %s, %s", did, term.OrDash(f.GetModelName()), term.OrDash(f.GetEp()), term.OrDash(f.GetReason()))
	}
	return nil
}
