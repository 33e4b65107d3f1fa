package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

type completer = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

// completesEntries are the verbs whose arguments name builds, by keys, models or files.
var completesEntries = []string{"show", "why", "rm", "pin", "unpin", "invalidate", "du", "pack", "unpack", "retry"}

// addCompletions gives shells what the arguments and flags of all verbs may be. Where no daemon
// answers at once they know no builds, and none is started.
func addCompletions(a *cli.Call, cmd *cobra.Command) {
	for _, verb := range cmd.Commands() {
		addCompletions(a, verb)
	}
	known := func(list func(context.Context, *unixsock.Client) []string, or cobra.ShellCompDirective) completer {
		return func(cmd *cobra.Command, _ []string, begin string) ([]string, cobra.ShellCompDirective) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			a.Wait, a.WaitSet = 0, true
			c, err := a.Connect(ctx)
			if err != nil {
				return nil, or
			}
			defer c.Close() // nothing is asked after this
			words := slices.DeleteFunc(list(ctx, c), func(word string) bool { return !strings.HasPrefix(word, begin) })
			slices.Sort(words)
			return slices.Compact(words), or
		}
	}
	switch name := cmd.Name(); {
	case slices.Contains(completesEntries, name):
		cmd.ValidArgsFunction = known(entryNames, cobra.ShellCompDirectiveDefault)
	case name == "follow" || name == "cancel":
		cmd.ValidArgsFunction = known(jobNames, cobra.ShellCompDirectiveNoFileComp)
	case name == "get" || name == "warm" || name == "key":
		cmd.ValidArgsFunction = cobra.FixedCompletions([]string{"onnx"}, cobra.ShellCompDirectiveFilterFileExt)
	}
	for flag, values := range map[string]completer{
		"ep":                 cobra.FixedCompletions(compilers.EPNames(), cobra.ShellCompDirectiveNoFileComp),
		"model":              known(modelNames, cobra.ShellCompDirectiveNoFileComp),
		"store":              cobra.FixedCompletions([]string{"shared", "user", "none"}, cobra.ShellCompDirectiveNoFileComp),
		"optimization-level": cobra.FixedCompletions([]string{"disable_all", "basic", "extended", "layout", "all"}, cobra.ShellCompDirectiveNoFileComp),
		"on-miss":            cobra.FixedCompletions([]string{"wait", "background", "claim", "fail", "refresh", "bypass"}, cobra.ShellCompDirectiveNoFileComp),
	} {
		if cmd.Flags().Lookup(flag) != nil {
			_ = cmd.RegisterFlagCompletionFunc(flag, values) // which fails for a flag that there is not
		}
	}
}

// entryNames lists names of models with builds, and keys of builds.
func entryNames(ctx context.Context, c *unixsock.Client) []string {
	return eachBuild(ctx, c, func(b *wire.Build) []string {
		return []string{b.GetModelName(), term.Short(b.GetBuild())}
	})
}

func modelNames(ctx context.Context, c *unixsock.Client) []string {
	return eachBuild(ctx, c, func(b *wire.Build) []string { return []string{b.GetModelName()} })
}

func eachBuild(ctx context.Context, c *unixsock.Client, of func(*wire.Build) []string) (names []string) {
	_ = c.ListPages(ctx, &wire.List{}, nil, func(page []*wire.Build) error { // what comes in time
		for _, b := range page {
			names = append(names, of(b)...)
		}
		return nil
	})
	return names
}

func jobNames(ctx context.Context, c *unixsock.Client) (names []string) {
	reply, err := unixsock.Ask[wire.JobsReply](ctx, c, &wire.Jobs{}, nil)
	if err == nil {
		for _, j := range reply.GetJobs() {
			names = append(names, term.Short(j.GetId()))
		}
	}
	return names
}
