// Package cli has the code that all verbs of epcachectl share: flags, the connection to the daemon,
// and checks of arguments.
package cli

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cmd/epcachectl/internal/daemon"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/usage"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Call is one call of the program: its streams, the flags of all verbs, and its daemon.
type Call struct {
	Print *term.Printer
	Stdin io.Reader

	daemon.Finder
	JSON    bool
	Timeout time.Duration
	Looks   bool // the verb looks at the daemon itself, so none is started
}

// WithDaemon connects, and calls do with a context that ends at --timeout.
func (a *Call) WithDaemon(ctx context.Context,
	do func(context.Context, *unixsock.Client) error) error {
	return a.WithTimeout(ctx, func(ctx context.Context) error {
		connect := a.ConnectOrStart
		if a.Looks {
			connect = a.Connect
		}
		client, err := connect(ctx)
		if err != nil {
			return err
		}
		err = errors.Join(do(ctx, client), client.Close())
		return errors.Join(err, a.CloseOwn())
	})
}

// RunWithEntries returns the function of a command that passes its arguments to the daemon.
func (a *Call) RunWithEntries(ask func(ctx context.Context, c *unixsock.Client,
	args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
			return ask(ctx, c, args)
		})
	}
}

// WithTimeout calls do with a context that ends at --timeout.
func (a *Call) WithTimeout(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := a.WithDeadline(ctx)
	defer cancel()
	return exit.TimeoutError(ctx, do(ctx), a.Timeout, nil)
}

// WithDeadline returns a context that ends at --timeout.
func (a *Call) WithDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.Timeout > 0 {
		return context.WithTimeout(ctx, a.Timeout)
	}
	return context.WithCancel(ctx)
}

// WithReader is WithDaemon for calls that only read, and print after the answer. If the daemon ends
// before, it repeats look with the next one.
func (a *Call) WithReader(ctx context.Context,
	look func(context.Context, *unixsock.Client) error) error {
	return a.WithDaemon(ctx, func(ctx context.Context, c *unixsock.Client) error {
		err := look(ctx, c)
		if unixsock.ConnectionEnded(err) {
			err = a.Retry(ctx, func(c *unixsock.Client) error { return look(ctx, c) })
		}
		return err
	})
}

// AcrossRestarts calls do with a connection, and again after each restart of the daemon, until the
// context or --timeout ends, or the reader of the results is gone, which is no error. It calls back
// when a daemon answers again.
func (a *Call) AcrossRestarts(ctx context.Context,
	do func(context.Context, *unixsock.Client) error, back func()) error {
	ctx, cancel := a.WithDeadline(ctx)
	defer cancel()
	a.Print.OnReaderGone(cancel)
	client, err := a.Connect(ctx)
	for err == nil {
		err = errors.Join(do(ctx, client), client.Close())
		if err == nil || !daemon.IsConnectionLost(err) || ctx.Err() != nil {
			break
		}
		a.Print.Note("the connection to the daemon was lost; waiting for the daemon")
		if client, err = a.Reconnect(ctx); err == nil {
			back()
		}
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// WithProgress shows the progress of a query about the whole store, which may consist of several
// requests.
func (a *Call) WithProgress(ask func(progress func(*wire.Progress)) error) error {
	show := term.NewPhases(a.Print, false, 1)
	defer show.End()
	return ask(func(p *wire.Progress) {
		p.ElapsedMs = time.Since(show.Start).Milliseconds()
		show.Phase("", p)
	})
}

// AskWithProgress asks as unixsock.Ask does, and shows the daemon's progress.
func AskWithProgress[R any](ctx context.Context, a *Call, c *unixsock.Client,
	request proto.Message) (reply *R, err error) {
	err = a.WithProgress(func(progress func(*wire.Progress)) (err error) {
		reply, err = unixsock.Ask[R](ctx, c, request, progress)
		return err
	})
	return reply, err
}

// PrintForScripts prints a reply as JSON, with the field dry_run.
func (a *Call) PrintForScripts(dryRun bool, reply proto.Message) error {
	out := jsonout.Of(reply)
	out["dry_run"] = dryRun
	return a.Print.JSON(out)
}

// UsageArgs checks the number of a verb's arguments.
func UsageArgs(least, most int) cobra.PositionalArgs {
	return usage.Arguments(least, most, UsageError)
}

// UsageError gives a mistake in a call its exit code and its hint.
func UsageError(e *usage.Error) error {
	hint := e.Hint
	for spelling, instead := range removedSpellings {
		if strings.HasSuffix(e.Text, spelling) {
			hint = "removed: use " + instead
		}
	}
	return exit.Usage(exit.Hint(e, hint))
}

// removedSpellings has for the end of a mistake's text what to use instead. It stays for one
// version.
var removedSpellings = map[string]string{
	`unknown verb "key"`:               "epcachectl why MODEL --key",
	"unknown flag --dim-by-denotation": "dims_by_denotation in the file of --pipeline",
	"unknown flag --node-name-prefix":  "--session-option ep.context_node_name_prefix=PREFIX",
	"gc: unknown flag --to":            "epcachectl gc SIZE",
}

// setter is a flag that processes its values one by one, in order.
type setter struct {
	set  func(string) error
	kind string
}

// EachValue returns a flag that calls set with each value.
func EachValue(set func(string) error, kind string) pflag.Value { return setter{set, kind} }

func (s setter) Set(v string) error { return s.set(v) }
func (s setter) String() string     { return "" }
func (s setter) Type() string       { return s.kind }
