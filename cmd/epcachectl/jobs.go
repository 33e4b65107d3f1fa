package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/modelname"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func newJobs(a *cli.Call) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "jobs [follow|cancel|retry]",
		Short: "list compile jobs and remembered failures",
		Long: `jobs prints running and waiting compiles in queue order: state, phase, age,
estimate, and how many requests wait for each ("-": a background job). Below are remembered
failures, with their reason and the time at which a request may retry; until then requests get the
failure at once.

Users see jobs of builds that they may see. --json prints an object with the lists "jobs" and
"failures".` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon, exit.NotAllowed),
		Example: `  epcachectl jobs
  epcachectl jobs follow 6524d4
  epcachectl jobs cancel --all
  epcachectl jobs retry mobilenet.onnx`,
		Args: cli.UsageArgs(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.WithReader(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				reply, err := unixsock.Ask[wire.JobsReply](ctx, c, &wire.Jobs{}, nil)
				if err != nil {
					return err
				}
				return printJobs(a, reply)
			})
		},
	}
	cmd.AddCommand(newJobsFollow(a), newJobsCancel(a), newJobsRetry(a))
	return cmd
}

func printJobs(a *cli.Call, reply *wire.JobsReply) error {
	if a.JSON {
		return a.Print.JSON(jsonout.Of(reply))
	}
	if len(reply.GetJobs())+len(reply.GetFailures()) == 0 {
		a.Print.Note("no jobs, and no failures are remembered")
	}
	printJobTable(a.Print, reply.GetJobs())
	if len(reply.GetJobs()) > 0 && len(reply.GetFailures()) > 0 {
		a.Print.Line("")
	}
	printFailures(a.Print, reply.GetFailures())
	return nil
}

func printJobTable(p *term.Printer, jobs []*wire.Job) {
	rows := [][]string{{"JOB", "STATE", "PHASE", "ELAPSED", "USUALLY", "WAITING", "MODEL",
		"EP", "WHY"}}
	for _, j := range jobs {
		usually, waiting := "-", "-"
		if ms := j.GetEstimateMs(); ms > 0 {
			usually = term.RoundSeconds(term.Milliseconds(ms))
		}
		if n := j.GetWaiting(); n > 0 {
			waiting = fmt.Sprint(n)
		}
		rows = append(rows, []string{
			term.TextOrDash(term.Short(j.GetId())), p.State(term.TextOrDash(j.GetState())),
			term.TextOrDash(j.GetPhase()), term.RoundSeconds(term.Milliseconds(j.GetElapsedMs())),
			usually, waiting, modelOf(j), term.TextOrDash(j.GetEp()), term.TextOrDash(j.GetWhy()),
		})
	}
	if len(jobs) > 0 {
		p.Table(rows, "WAITING", "PHASE", "EP", "USUALLY", "WHY")
	}
}

// jobID completes an abbreviated id, as the table prints it. It returns an id that is not listed
// unchanged, for the daemon.
func jobID(listed []*wire.Job, name string) (string, error) {
	var found []string
	for _, j := range listed {
		if strings.HasPrefix(j.GetId(), name) {
			found = append(found, j.GetId())
		}
	}
	switch {
	case len(found) == 0 || slices.Contains(found, name):
		return name, nil
	case len(found) == 1:
		return found[0], nil
	}
	return "", exit.Usage(exit.Hint(fmt.Errorf("job %q: %s have this "+
		"prefix", term.Brief(name), term.Count(len(found), "job")), "give more digits: "+
		"epcachectl jobs --json"))
}

func modelOf(j *wire.Job) string {
	name := term.TextOrDash(cmp.Or(j.GetModelName(), term.Short(j.GetModelDigest())))
	if n := j.GetModels(); n > 1 {
		name += fmt.Sprintf(" and %d more", n-1)
	}
	return name
}

// printFailures prints a table, with the end of the compiler's output below each row.
func printFailures(p *term.Printer, failures []*wire.Failure) {
	for i, f := range failures {
		if i > 0 {
			p.Line("")
		}
		name := cmp.Or(f.GetModelName(), term.Short(f.GetModelDigest()))
		times := p.When(f.GetLastMs())
		if f.GetCount() > 1 {
			times = fmt.Sprintf("%d times, the last %s", f.GetCount(), times)
		}
		p.Line("failed %s: %s, %s, %s", term.TextOrDash(name), term.TextOrDash(f.GetEp()),
			term.TextOrDash(f.GetReason()), times)
		if f.GetText() != "" {
			p.Line("  %s",
				term.Printable(term.KeepEnd(strings.Join(strings.Fields(f.GetText()), " "))))
		}
		p.Line("  %s", retryOf(f, time.Now()))
	}
}

func retryOf(f *wire.Failure, now time.Time) string {
	ways := "epcachectl jobs retry " + term.TextOrDash(term.Short(f.GetBuild()))
	left := time.UnixMilli(f.GetRetryMs()).Sub(now)
	switch {
	case f.GetRetryMs() == 0:
		return "retried when the libraries or the model change, or after: " + ways
	case left <= 0:
		return "retried by the next request"
	}
	return fmt.Sprintf("retried by a request in %s, or after: %s", term.RoundSeconds(left), ways)
}

func newJobsCancel(a *cli.Call) *cobra.Command {
	var all, dryRun bool
	cmd := &cobra.Command{
		Use:   "cancel JOB... | cancel --all",
		Short: "cancel compile jobs",
		Long: `cancel withdraws the caller's requests from jobs: they fail with "cancelled". A job
that no other user wants is stopped; an administrator stops it for all users. --all means all jobs
that the caller requested, for an administrator all jobs.

With -n it prints what would be cancelled.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl jobs cancel 6524d4
  epcachectl jobs cancel --all -n`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return exit.Usage(exit.Hint(errors.New("jobs cancel: name jobs, or give "+
					"--all"), "list jobs: epcachectl jobs"))
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				listed, err := unixsock.Ask[wire.JobsReply](ctx, c, &wire.Jobs{}, nil)
				if err != nil {
					return exit.WithVerb("jobs cancel", err)
				}
				ids := make([]string, len(args))
				for i, name := range args {
					if ids[i], err = jobID(listed.GetJobs(), name); err != nil {
						return err
					}
				}
				if !dryRun {
					reply, err := unixsock.Ask[wire.JobsReply](ctx, c,
						&wire.CancelJobs{Jobs: ids, All: all}, nil)
					return printEnded(a, reply, "cancelled", false,
						exit.WithVerb("jobs cancel", err))
				}
				for _, id := range ids {
					if !slices.ContainsFunc(listed.GetJobs(), func(j *wire.Job) bool {
						return j.GetId() == id
					}) {
						return exit.Hint(exit.Missing(fmt.Sprintf("jobs cancel: no job "+
							"%q", term.Brief(id))), "list jobs: epcachectl jobs")
					}
				}
				others := func(j *wire.Job) bool { return !all && !slices.Contains(ids, j.GetId()) }
				chosen := slices.DeleteFunc(listed.GetJobs(), others)
				return printEnded(a, &wire.JobsReply{Jobs: chosen}, "would cancel", true, nil)
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "cancel all jobs")
	cmd.Flags().BoolVarP(&dryRun, "dry-run", "n", false, "cancel nothing, print what would be "+
		"cancelled")
	return cmd
}

func newJobsRetry(a *cli.Call) *cobra.Command {
	var all, dryRun bool
	cmd := &cobra.Command{
		Use:   "retry ENTRY|MODEL... | retry --all",
		Short: "forget remembered failures",
		Long: `retry makes the daemon forget failed compiles, so that the next request compiles
again instead of getting the remembered failure. ENTRY is as for show; a model's file or name means
all its failures.

With -n it prints what would be forgotten.` + exit.Help(exit.AskingCodes...),
		Example: `  epcachectl jobs retry mobilenet.onnx
  epcachectl jobs retry --all`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return exit.Usage(exit.Hint(errors.New("jobs retry: name entries, or give "+
					"--all"), "list failures: epcachectl jobs"))
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				entries, err := modelfile.Entries(ctx, args)
				if err != nil {
					return err
				}
				if !dryRun {
					reply, err := unixsock.Ask[wire.JobsReply](ctx, c,
						&wire.RetryJobs{Entries: entries, All: all}, nil)
					return printEnded(a, reply, "forgot", false,
						exit.WithVerb("jobs retry", modelfile.AsGiven(err, args, entries)))
				}
				reply, err := unixsock.Ask[wire.JobsReply](ctx, c, &wire.Jobs{}, nil)
				for i, entry := range entries {
					if err == nil && !slices.ContainsFunc(reply.GetFailures(),
						func(f *wire.Failure) bool { return failureMatches(f, entry) }) {
						return exit.Hint(exit.Missing(fmt.Sprintf("jobs retry: no remembered "+
							"failure of %q", term.Brief(args[i]))), "list jobs: epcachectl jobs")
					}
				}
				chosen := slices.DeleteFunc(reply.GetFailures(), func(f *wire.Failure) bool {
					return !all && !slices.ContainsFunc(entries, func(entry string) bool {
						return failureMatches(f, entry)
					})
				})
				return printEnded(a, &wire.JobsReply{Failures: chosen}, "would forget", true, err)
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "forget all failures")
	cmd.Flags().BoolVarP(&dryRun, "dry-run", "n", false, "forget nothing, print what would be "+
		"forgotten")
	return cmd
}

// failureMatches reports whether the entry selects the failure, by the daemon's rules.
func failureMatches(f *wire.Failure, entry string) bool {
	begins := func(key string) bool { return entry != "" && strings.HasPrefix(key, entry) }
	return begins(f.GetBuild()) || begins(f.GetRequestKey()) || begins(f.GetModelDigest()) ||
		modelname.Matches(f.GetModelName(), entry)
}

func printEnded(a *cli.Call, reply *wire.JobsReply, did string, dryRun bool, err error) error {
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
			what = modelOf(j) + " has already ended"
		case state == "failed":
			what = modelOf(j) + " has failed already"
		default:
			what = "left " + modelOf(j) + " to the other callers"
		}
		a.Print.Line("%s: %s, job %s", what, term.TextOrDash(j.GetEp()),
			term.TextOrDash(term.Short(j.GetId())))
	}
	for _, f := range reply.GetFailures() {
		a.Print.Line("%s %s: %s, %s", did, term.TextOrDash(f.GetModelName()),
			term.TextOrDash(f.GetEp()), term.TextOrDash(f.GetReason()))
	}
	return nil
}

func newJobsFollow(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "follow JOB",
		Short: "wait for a compile and show progress",
		Long: `follow waits for the end of a job and prints the result. It shows progress on
standard error: a bar on a terminal, otherwise a line for each phase. It does not keep the job
alive: the job ends when all requests for it have ended, unless it runs in the background.` +
			exit.Help(exit.WaitingCodes...) + `

Status 1 means that the compile failed or was cancelled.`,
		Example: "  epcachectl jobs follow 6524d4",
		Args:    cli.UsageArgs(1, 1),
		RunE: a.RunWithEntries(func(ctx context.Context, c *unixsock.Client, args []string) error {
			listed, err := unixsock.Ask[wire.JobsReply](ctx, c, &wire.Jobs{}, nil)
			if err != nil {
				return err
			}
			id, err := jobID(listed.GetJobs(), args[0])
			if err != nil {
				return err
			}
			show := term.NewPhases(a.Print, !a.Print.Terminal && !a.JSON, 1)
			job, err := c.Follow(ctx, &wire.Follow{Job: id}, func(p *wire.Progress) {
				show.Phase(args[0], p)
			})
			show.End()
			if err != nil {
				return exit.TimeoutError(ctx, exit.WithOperation("follow", args[0], err), a.Timeout,
					func() (string, string) {
						return "", "the compile continues; to cancel it: epcachectl jobs cancel " +
							"" + term.Printable(args[0])
					})
			}
			return printEnd(a, job)
		}),
	}
}

// printEnd prints how a job ended. It returns the job's failure as the call's error.
func printEnd(a *cli.Call, job *wire.Job) error {
	failed := acquire.JobError(job)
	if a.JSON {
		if err := a.Print.JSON(jsonout.Of(job)); err != nil || failed == nil {
			return err
		}
		return exit.Status(exit.Code(failed))
	}
	if failed != nil {
		return exit.WithOperation("compile", cmp.Or(job.GetModelName(), job.GetId()), failed)
	}
	a.Print.Line("%s %s: %s", term.TextOrDash(job.GetState()), modelOf(job),
		acquire.JobResultLine(job))
	return nil
}
