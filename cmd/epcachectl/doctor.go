package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
)

// finding is one thing that was looked at: what is found, why it matters, and what to do. The names are a contract for scripts.
type finding struct {
	Severity string `json:"severity"` // "problem", "warning", "ok"
	Subject  string `json:"subject"`
	Text     string `json:"text"`
	Hint     string `json:"hint"`
	Side     string `json:"side"` // who looked: "client", "daemon", "application"
}

const (
	severityProblem = "problem"
	severityWarning = "warning"
	severityOK      = "ok"
)

// doctorResult is what doctor prints with --json.
type doctorResult struct {
	Problems int       `json:"problems"`
	Warnings int       `json:"warnings"`
	Daemon   bool      `json:"daemon"` // one answers
	Findings []finding `json:"findings"`
}

// findings collects what one side found.
type findings struct {
	side string
	list []finding
}

func (f *findings) problem(subject, text, hint string) {
	f.list = append(f.list, finding{severityProblem, subject, text, hint, f.side})
}

func (f *findings) warning(subject, text, hint string) {
	f.list = append(f.list, finding{severityWarning, subject, text, hint, f.side})
}

func (f *findings) ok(subject, format string, args ...any) {
	f.list = append(f.list, finding{severityOK, subject, fmt.Sprintf(format, args...), "", f.side})
}

func (a *app) doctorCommand() *cobra.Command {
	var runtime, python string
	cmd := &cobra.Command{
		Use:   "doctor [--runtime DIR] [--python PATH]",
		Short: "find what is wrong on this machine, and say what to do",
		Long: `doctor looks for what keeps epcached from being of use: first from this side (is there a socket, may the caller connect, does
a daemon answer in time, do the versions fit), then it asks the daemon what it sees (runtimes, disk, clock, rights, watching),
and then it looks at an application's side: --runtime DIR names the runtime that the application loads, --python PATH its
Python. With --python that program is run, imports onnxruntime and starts its plugin execution providers, each in a process of
its own, with the caller's rights and environment: just as the application would.

Each finding says what is wrong, why it matters, and what to do. Without a daemon doctor prints what it can see. Warnings do
not count as failure.` + exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NoDaemon) + `
Failed means that there are problems. Where no daemon answers, and the next program starts one, that is no problem.`,
		Example: `  epcachectl doctor
  epcachectl doctor --python .venv/bin/python`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.Within(cmd.Context())
			defer cancel()
			return a.doctor(ctx, runtime, python)
		},
	}
	cmd.Flags().StringVar(&runtime, "runtime", "", "also look at the runtime in `DIR`, which an application loads")
	cmd.Flags().StringVar(&python, "python", "", "also look at the Python at `PATH`, which an application runs in")
	return cmd
}

func (a *app) doctor(ctx context.Context, runtime, python string) error {
	client, all := a.lookForDaemon(ctx)
	answers := client != nil
	if answers {
		defer client.Close() // nothing is under way
		all = append(all, a.askDoctor(ctx, client)...)
	}
	application := &examination{client: client, socket: a.Socket, findings: findings{side: "application"}}
	application.own = answers && client.Hello().GetDaemonUid() == client.Hello().GetUid()
	if runtime != "" {
		application.runtime(ctx, runtime)
	}
	if python != "" {
		application.python(ctx, python)
	}
	all = append(all, application.list...)
	if ctx.Err() != nil {
		return fmt.Errorf("doctor: %w", ctx.Err())
	}
	return a.printFindings(all, answers)
}

func (a *app) printFindings(all []finding, answers bool) error {
	result := doctorResult{Daemon: answers, Findings: append([]finding{}, all...)}
	for _, f := range all {
		switch f.Severity {
		case severityProblem:
			result.Problems++
		case severityWarning:
			result.Warnings++
		}
	}
	if a.JSON {
		if err := a.Print.JSON(result); err != nil {
			return err
		}
	} else {
		listFindings(a.Print, &result)
	}
	switch {
	case !answers && slices.ContainsFunc(all, keepsFromStarting) && !slices.ContainsFunc(all, refusesUs):
		return exit.Status(exit.NoDaemon)
	case result.Problems > 0:
		return exit.Status(exit.Failed)
	}
	return nil
}

// keepsFromStarting tells a daemon that the next program would start from one that stays away.
func keepsFromStarting(f finding) bool { return f.Side == "client" && f.Severity == severityProblem }

// refusesUs tells a daemon that is there and that this client cannot talk to from one that is not there.
func refusesUs(f finding) bool { return f.Subject == subjectProtocol || f.Subject == subjectRights }

// listFindings prints the worst first.
func listFindings(p *term.Printer, r *doctorResult) {
	for _, severity := range []string{severityProblem, severityWarning, severityOK} {
		for _, f := range r.Findings {
			if f.Severity != severity && (severity != severityOK || f.Severity == severityProblem || f.Severity == severityWarning) {
				continue
			}
			p.Line("%-8s %s: %s", term.Printable(f.Severity), term.Printable(f.Subject), term.Printable(f.Text))
			if f.Hint != "" {
				p.Line("         -> %s", term.Printable(f.Hint))
			}
		}
	}
	switch {
	case r.Problems == 0 && r.Warnings == 0:
		p.Line("all is well")
	default:
		p.Line("%s, %s", term.Counted(r.Problems, "problem"), term.Counted(r.Warnings, "warning"))
	}
}

// askDoctor passes on what the daemon sees.
func (a *app) askDoctor(ctx context.Context, c *unixsock.Client) []finding {
	f := &findings{side: "daemon"}
	reply, err := c.Doctor(ctx)
	if err != nil {
		f.warning("daemon", fmt.Sprintf("it gives no advice: %v", err), "if it is older than this program, start the daemon again from the same version")
		return f.list
	}
	for _, one := range reply.GetAdvice() {
		f.list = append(f.list, finding{one.GetSeverity(), one.GetSubject(), one.GetText(), one.GetHint(), f.side})
	}
	return f.list
}
