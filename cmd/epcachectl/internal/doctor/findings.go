// Package doctor finds problems that prevent applications from using epcached, and prints its
// findings.
package doctor

import (
	"context"
	"fmt"
	"slices"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Finding is the result of one check: the finding, why it matters, and the remedy. The names are a
// contract for scripts.
type Finding struct {
	Severity string `json:"severity"` // "problem", "warning", "info", "ok"
	Subject  string `json:"subject"`
	Text     string `json:"text"`
	Hint     string `json:"hint"`
	Side     string `json:"side"` // the side that looked: "client", "daemon", "application"
}

const (
	severityProblem = "problem"
	severityWarning = "warning"
	severityOK      = "ok"
)

// Result is what doctor prints with --json.
type Result struct {
	Problems int       `json:"problems"`
	Warnings int       `json:"warnings"`
	Daemon   bool      `json:"daemon"` // a daemon answers
	Findings []Finding `json:"findings"`
}

type findings struct {
	side string
	List []Finding
}

func (f *findings) problem(subject, text, hint string) {
	f.List = append(f.List, Finding{severityProblem, subject, text, hint, f.side})
}

func (f *findings) warning(subject, text, hint string) {
	f.List = append(f.List, Finding{severityWarning, subject, text, hint, f.side})
}

func (f *findings) ok(subject, format string, args ...any) {
	f.List = append(f.List, Finding{severityOK, subject, fmt.Sprintf(format, args...), "", f.side})
}

// Examine checks the connection, the daemon, and an application with this runtime and Python (""
// for none), and prints the findings.
func Examine(ctx context.Context, a *cli.Call, runtime, python string) error {
	client, all := lookForDaemon(ctx, a)
	answers := client != nil
	if answers {
		defer client.Close() // no request is under way
		all = append(all, askDoctor(ctx, client)...)
	}
	application := &Examination{Client: client, socket: a.Socket,
		findings: findings{side: "application"}}
	application.ownDaemon = answers && client.Hello().GetDaemonUid() == client.Hello().GetUid()
	if runtime != "" {
		application.runtime(ctx, runtime)
	}
	if python != "" {
		application.python(ctx, python)
	}
	all = append(all, application.List...)
	if ctx.Err() != nil {
		return fmt.Errorf("doctor: %w", ctx.Err())
	}
	return printFindings(a, all, answers)
}

func printFindings(a *cli.Call, all []Finding, answers bool) error {
	result := Result{Daemon: answers, Findings: append([]Finding{}, all...)}
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
	// A missing daemon is no problem if the next program would start it, or if it only refuses this
	// client.
	staysAway := func(f Finding) bool { return f.Side == "client" && f.Severity == severityProblem }
	refusesUs := func(f Finding) bool {
		return f.Subject == subjectProtocol || f.Subject == subjectRights
	}
	switch {
	case !answers && slices.ContainsFunc(all, staysAway) && !slices.ContainsFunc(all, refusesUs):
		return exit.Status(exit.NoDaemon)
	case result.Problems > 0:
		return exit.Status(exit.Failed)
	}
	return nil
}

func listFindings(p *term.Printer, r *Result) {
	rank := map[string]int{severityProblem: -2, severityWarning: -1}
	sorted := slices.SortedStableFunc(slices.Values(r.Findings), func(a, b Finding) int {
		return rank[a.Severity] - rank[b.Severity]
	})
	for _, f := range sorted {
		p.Line("%s %s: %s", p.State(fmt.Sprintf("%-8s", term.Printable(f.Severity))),
			term.Printable(f.Subject), term.Printable(f.Text))
		if f.Hint != "" {
			p.Line("         -> %s", term.Printable(f.Hint))
		}
	}
	if r.Problems+r.Warnings == 0 {
		p.Line("no problems found")
		return
	}
	p.Line("%s, %s", term.Count(r.Problems, "problem"), term.Count(r.Warnings, "warning"))
}

func askDoctor(ctx context.Context, c *unixsock.Client) []Finding {
	f := &findings{side: "daemon"}
	reply, err := unixsock.Ask[wire.DoctorReply](ctx, c, &wire.Doctor{}, nil)
	if err != nil {
		f.warning("daemon", fmt.Sprintf("it reports no findings: %v", err), "if it is older "+
			"than this program, restart the daemon with the same version")
		return f.List
	}
	for _, one := range reply.GetAdvice() {
		f.List = append(f.List, Finding{one.GetSeverity(), one.GetSubject(), one.GetText(),
			one.GetHint(), f.side})
	}
	return f.List
}
