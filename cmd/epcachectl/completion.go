package main

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

type completer = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

// completesEntries are the verbs with arguments that name builds, by keys, models or files.
var completesEntries = []string{"show", "why", "rm", "pin", "unpin", "invalidate", "du", "pack",
	"unpack", "retry", "export", "push"}

// addCompletions adds completion of the arguments and flags of all verbs. Builds are completed only
// if a daemon answers at once; none is started.
func addCompletions(a *cli.Call, cmd *cobra.Command) {
	for _, verb := range cmd.Commands() {
		addCompletions(a, verb)
	}
	const noFiles = cobra.ShellCompDirectiveNoFileComp
	stored := func(jobs bool, or cobra.ShellCompDirective) completer {
		return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			return storedNames(ctx, a, jobs), or
		}
	}
	switch name := cmd.Name(); {
	case slices.Contains(completesEntries, name):
		cmd.ValidArgsFunction = stored(false, cobra.ShellCompDirectiveDefault)
	case name == "follow" || name == "cancel":
		cmd.ValidArgsFunction = stored(true, noFiles)
	case slices.Contains([]string{"get", "warm", "pull", "inspect"}, name):
		cmd.ValidArgsFunction = cobra.FixedCompletions([]string{"onnx"},
			cobra.ShellCompDirectiveFilterFileExt)
	}
	for flag, values := range map[string]completer{
		"ep":    cobra.FixedCompletions(compilers.EPNames(), noFiles),
		"model": stored(false, noFiles),
		"store": cobra.FixedCompletions([]string{"shared", "user", "none"}, noFiles),
		"optimization-level": cobra.FixedCompletions([]string{"disable_all", "basic", "extended",
			"layout", "all"}, noFiles),
		"on-miss": cobra.FixedCompletions([]string{"wait", "background", "claim", "fail",
			"fetch", "refresh", "bypass"}, noFiles),
		"route": cobra.FixedCompletions([]string{"compile_api", "session_options"}, noFiles),
	} {
		// fails if the verb has no such flag
		_ = cmd.RegisterFlagCompletionFunc(flag, values)
	}
}

// storedNames lists names of models with builds and keys of builds, or jobs, if the daemon answers
// in time.
func storedNames(ctx context.Context, a *cli.Call, jobs bool) (names []string) {
	a.Wait, a.WaitSet = 0, true
	c, err := a.Connect(ctx)
	if err != nil {
		return nil
	}
	defer c.Close() // no request follows
	if jobs {
		reply, _ := unixsock.Ask[wire.JobsReply](ctx, c, &wire.Jobs{}, nil)
		for _, j := range reply.GetJobs() {
			names = append(names, term.Short(j.GetId()))
		}
		return names
	}
	_ = c.ListPages(ctx, &wire.List{}, nil, func(page []*wire.Build) error {
		for _, b := range page {
			names = append(names, b.GetModelName(), term.Short(b.GetBuild()))
		}
		return nil
	})
	names = slices.DeleteFunc(names, func(name string) bool { return term.Printable(name) != name })
	slices.Sort(names)
	return slices.Compact(names)
}
