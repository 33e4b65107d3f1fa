// Command epcachectl requests compiled models from the daemon, and shows and changes its store.
//
// Each verb has a file with its help, flags and code. Common code is in the packages below
// internal: cli (the flags of all verbs, and the connection), acquire (asking for models, for get
// and warm), exit (exit codes, errors and hints), term and jsonout (what is printed), daemon
// (finding and starting the daemon) and modelfile (opening models with the caller's own rights).
package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/daemon"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/usage"
	"github.com/epcached/epcached/unixsock"
)

// version is set by the linker for releases.
var version = "0.1.0-dev"

func main() {
	ctx, stop := exit.Interruptible()
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program without its process, for main and for tests.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	return execute(ctx, &cli.Call{Print: term.NewPrinter(stdout, stderr), Stdin: stdin,
		Finder: daemon.Finder{Version: version}}, args)
}

func execute(ctx context.Context, a *cli.Call, args []string) int {
	root := newRoot(a)
	root.SetArgs(args)
	root.SetIn(a.Stdin)
	root.SetOut(a.Print.Out)
	root.SetErr(a.Print.Err)
	err := root.ExecuteContext(ctx)
	err = cmp.Or(a.Print.Failed(), err)
	if _, reported := errors.AsType[exit.Status](err); err != nil && !reported {
		// which is not read where another flag is wrong
		if a.JSON || slices.Contains(args, "--json") {
			a.Print.JSONFailure(err)
		}
		a.Print.Failure(err)
	}
	a.Print.Clear()
	return exit.Code(err)
}

func newRoot(a *cli.Call) *cobra.Command {
	root := &cobra.Command{
		Use:     "epcachectl",
		Short:   "get, inspect and manage compiled ONNX models",
		Version: a.Version,
		Long: `epcachectl requests compiled ONNX models from the epcached daemon, and shows and
changes what the daemon stores.

It finds the daemon by --socket, then EPCACHE_SOCKET, then the user's own socket, then the
system's. If no daemon runs, it starts the user's own (except status, doctor and stop), from
EPCACHE_DAEMON, the directory of this program, or PATH. EPCACHE_AUTOSTART=0 prevents that.

Every verb but completion has --json for scripts.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.Damage,
				exit.NoDaemon, exit.Stale, exit.NotAllowed, exit.Short, exit.Interrupt),
		Example: `  epcachectl get mobilenet.onnx --ep OpenVINOExecutionProvider:CPU
  epcachectl list`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cli.UsageArgs(0, 0),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	flags := root.PersistentFlags()
	flags.StringVar(&a.Socket, "socket", "", "the daemon's socket `PATH`")
	flags.BoolVar(&a.JSON, "json", false, "print the result as JSON")
	flags.DurationVar(&a.Timeout, "timeout", 0, "give up after `DURATION`, such as 30s or 5m")
	flags.DurationVar(&a.Wait, "wait", daemon.DefaultWait,
		"wait `DURATION` for a daemon that is starting, at most 10s")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		a.WaitSet = cmd.Flags().Changed("wait")
		if a.Timeout < 0 || a.Wait < 0 || a.Wait > daemon.MaxWait {
			return exit.Usagef("--timeout must not be negative, and --wait must be 0 to "+
				"%v", daemon.MaxWait)
		}
		return nil
	}
	usage.Set(root, cli.UsageError)
	for _, verb := range []func(*cli.Call) *cobra.Command{
		newGet, newWarm, newJobs, newList, newShow, newInspect, newStatus, newProbe,
		newCheck, newRepair, newInvalidate, newRm, newPin, newUnpin, newGc, newDu, newPack,
		newUnpack, newWhy, newEvents, newExport, newImport, newPush, newPull, newRemote, newFacts,
		newTrust, newConfig, newDoctor, newStop, newVersion, newRun,
	} {
		root.AddCommand(verb(a))
	}
	addCompletions(a, root)
	root.SetOut(a.Print.Out) // which cobra's completion keeps
	addCompletion(root)
	return root
}

func newVersion(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "print the version",
		Long: `version prints the version of epcachectl and of the protocol that it speaks. status
prints the daemon's version.` + exit.Help(exit.Done, exit.BadUsage),
		Example: "  epcachectl version",
		Args:    cli.UsageArgs(0, 0),
		RunE: func(*cobra.Command, []string) error {
			if a.JSON {
				return a.Print.JSON(jsonout.Object{"version": a.Version,
					"protocol": unixsock.Version})
			}
			a.Print.Line("epcachectl %s (protocol %d)", a.Version, unixsock.Version)
			return nil
		},
	}
}

// addCompletion adds cobra's own verb, with examples for each shell.
func addCompletion(root *cobra.Command) {
	// any word that is no request of a shell's for completions
	root.InitDefaultCompletionCmd("bash")
	completion, _, _ := root.Find([]string{"completion"}) // cobra has it
	completion.Short = "print the completions of a shell"
	completion.Args = cli.UsageArgs(0, 0)
	completion.RunE = root.RunE
	completion.Long = strings.TrimSpace(completion.Long) + exit.Help(exit.Done, exit.BadUsage)
	const bash = "  epcachectl completion bash > ~/.local/share/bash-completion/completions/" +
		"epcachectl"
	const fish = "  epcachectl completion fish > ~/.config/fish/completions/epcachectl.fish"
	completion.Example = bash + "\n" + fish
	for shell, example := range map[string]string{
		"bash": bash, "zsh": `  epcachectl completion zsh > "${fpath[1]}/_epcachectl"`,
		"fish":       fish,
		"powershell": "  epcachectl completion powershell | Out-String | Invoke-Expression",
	} {
		if cmd, _, err := completion.Find([]string{shell}); err == nil {
			cmd.Args, cmd.Example = cli.UsageArgs(0, 0), example
			cmd.Long = strings.TrimSpace(cmd.Long) + exit.Help(exit.Done, exit.BadUsage)
		}
	}
}
