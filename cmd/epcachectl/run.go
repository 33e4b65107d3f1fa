package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// app is one call of the program.
type app struct {
	print *term.Printer
	stdin io.Reader

	socket  string
	json    bool
	timeout time.Duration
	wait    time.Duration
	waitSet bool
	looks   bool // at the daemon itself: where there is none, none is started
	// own is the connection to the user's own daemon, beside that of another user; nil until a
	// model needs it; guarded by once
	own *unixsock.Client

	replace func(path string, argv []string, files []*os.File) error // becomes another program; see program.go
}

// A client waits this long for a socket to appear that it was told about, or that was left by a daemon which is
// just restarting; and for the answer of one that listens, which may be starting under socket activation.
const (
	defaultWait  = 3 * time.Second
	maxWait      = 10 * time.Second
	helloTimeout = 10 * time.Second
)

// run is the program without its process, for main and for tests.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := &app{print: term.NewPrinter(stdout, stderr), stdin: stdin, replace: replaceProcess}
	return a.run(ctx, args)
}

func (a *app) run(ctx context.Context, args []string) int {
	root := a.root()
	root.SetArgs(args)
	root.SetIn(a.stdin)
	root.SetOut(a.print.Out)
	root.SetErr(a.print.Err)
	err := root.ExecuteContext(ctx)
	var reported exit.Status
	if err != nil && !errors.As(err, &reported) {
		a.print.Failure(err)
	}
	a.print.Clear()
	return exit.Code(err)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "epcachectl",
		Short: "ask for compiled ONNX models, and see what is kept",
		Long: `epcachectl asks the epcached daemon for the compiled form of ONNX models, and shows and changes what the
daemon keeps. It finds the daemon by --socket, else by EPCACHE_SOCKET, else it takes the user's own daemon
or the system's. Where there is neither, every verb but status, doctor and stop has the user's own started, if epcached stands beside this
program or in PATH, or EPCACHE_DAEMON names it; EPCACHE_AUTOSTART=0 keeps it from that.

Every verb but completion has --json for scripts.` + exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.Damage, exit.NoDaemon, exit.Stale, exit.NotAllowed, exit.Interrupt),
		Example: `  epcachectl get mobilenet.onnx --ep OpenVINOExecutionProvider:CPU
  epcachectl list`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          usageArgs(cobra.NoArgs),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	flags := root.PersistentFlags()
	flags.StringVar(&a.socket, "socket", "", "the daemon's socket `PATH`")
	flags.BoolVar(&a.json, "json", false, "print the result as JSON")
	flags.DurationVar(&a.timeout, "timeout", 0, "give up after `DURATION`, such as 30s or 5m")
	flags.DurationVar(&a.wait, "wait", defaultWait, "wait `DURATION` for a daemon that is starting, at most 10s")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		a.waitSet = cmd.Flags().Changed("wait")
		if a.timeout < 0 || a.wait < 0 || a.wait > maxWait {
			return exit.Usage(fmt.Errorf("--timeout must not be negative, and --wait be 0 to %v", maxWait))
		}
		return nil
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		var wrong *pflag.InvalidValueError
		if errors.As(err, &wrong) && len(wrong.GetValue()) > 100 { // the value is somebody's whole file
			err = fmt.Errorf("--%s: %q does not do", wrong.GetFlag().Name, term.Brief(wrong.GetValue()))
		}
		return exit.Usage(exit.Hint(err, cmd.CommandPath()+" --help"))
	})
	root.AddCommand(a.getCommand(), a.warmCommand(), a.jobsCommand(), a.listCommand(), a.showCommand(), a.inspectCommand(), a.keyCommand(), a.statusCommand(),
		a.probeCommand(), a.checkCommand(), a.invalidateCommand(), a.rmCommand(), a.pinCommand(), a.unpinCommand(), a.gcCommand(), a.duCommand(), a.packCommand(), a.unpackCommand(), a.whyCommand(), a.eventsCommand(), a.configCommand(), a.doctorCommand(), a.stopCommand(), a.versionCommand())
	root.AddCommand(a.runCommand())
	root.SetOut(a.print.Out) // which cobra's completion keeps
	addCompletion(root)
	return root
}

// usageArgs gives cobra's complaints about arguments the exit code for usage.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return exit.Usage(exit.Hint(err, cmd.CommandPath()+" --help"))
		}
		return nil
	}
}

// withDaemon connects, and calls with a context that ends at --timeout.
func (a *app) withDaemon(ctx context.Context, do func(context.Context, *unixsock.Client) error) error {
	return a.withTimeout(ctx, func(ctx context.Context) error {
		connect := a.connectOrStart
		if a.looks {
			connect = a.connect
		}
		client, err := connect(ctx)
		if err != nil {
			return err
		}
		err = errors.Join(do(ctx, client), client.Close())
		if a.own != nil {
			err = errors.Join(err, a.own.Close())
		}
		return err
	})
}

// withTimeout calls with a context that ends at --timeout.
func (a *app) withTimeout(ctx context.Context, do func(context.Context) error) error {
	if a.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, a.timeout)
		defer cancel()
	}
	return exit.Early(ctx, do(ctx), a.timeout, nil)
}

// withReader is withDaemon for what only looks and prints when it has its answer: where the daemon goes away before, it is asked of the next one.
func (a *app) withReader(ctx context.Context, look func(context.Context, *unixsock.Client) error) error {
	return a.withDaemon(ctx, func(ctx context.Context, c *unixsock.Client) error {
		err := look(ctx, c)
		if unixsock.WentAway(err) {
			err = a.again(ctx, func(c *unixsock.Client) error { return look(ctx, c) })
		}
		return err
	})
}

// sockets lists where the daemon is looked for, in order.
func (a *app) sockets() []string {
	if a.socket != "" {
		return []string{a.socket}
	}
	return unixsock.DefaultSocket()
}

func (a *app) connect(ctx context.Context) (*unixsock.Client, error) {
	paths := a.sockets()
	d := unixsock.Dialer{Name: "epcachectl " + version, HelloTimeout: helloTimeout}
	if a.waitSet || len(paths) == 1 || anyExists(paths) {
		d.Wait = a.wait
	}
	c, err := d.Dial(ctx, paths...)
	return c, a.howToStart(noDaemon(paths, err))
}

// again asks once more after the connection broke: a daemon that is restarted in the middle of a call is no failure
// of the call. Only for requests that may be asked twice.
func (a *app) again(ctx context.Context, ask func(*unixsock.Client) error) error {
	patient := *a
	patient.wait, patient.waitSet = maxWait, true
	c, err := patient.connect(ctx)
	if err != nil {
		return err
	}
	return errors.Join(ask(c), c.Close())
}

// anyExists tells whether there is, or was, a daemon: without a sign of one nobody wants to wait for it.
func anyExists(paths []string) bool {
	for _, path := range paths {
		if _, err := os.Lstat(path); err == nil {
			return true
		}
	}
	return false
}

// printForScripts prints a reply for scripts, with whether nothing was done.
func printForScripts(p *term.Printer, dryRun bool, reply proto.Message) error {
	out := jsonout.Of(reply)
	out["dry_run"] = dryRun
	return p.JSON(out)
}

// showing shows how far a question to the daemon is that goes through the whole store; it may be asked in several requests.
func (a *app) showing(ask func(progress func(*wire.Progress)) error) error {
	show := term.NewPhases(a.print, false, 1)
	defer show.End()
	return ask(func(p *wire.Progress) {
		p.ElapsedMs = time.Since(show.Start).Milliseconds()
		show.Phase("", p)
	})
}
