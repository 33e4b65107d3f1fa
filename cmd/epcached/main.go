// Command epcached is the daemon that keeps compiled ONNX Runtime models.
//
// It only wires: flags and configuration (config.go), the cache behind the socket, signals and
// systemd (serve.go), and the daemon that a client starts (autostart_linux.go). Below internal,
// backend translates between the socket and the cache, reload puts a changed configuration into
// force, idle ends an unused daemon. The logic is in package cache.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cmd/epcached/internal/logs"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/internal/slowfile"
)

// version is set by the linker for releases.
var version = "0.1.0-dev"

// Exit codes, the same as epcachectl's.
const (
	exitFailure = 1
	exitUsage   = 2
	exitDamage  = 4
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == slowfile.Argument {
		os.Exit(slowfile.Main(os.Args[2]))
	}
	keepHeapFloor()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func noArguments(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unexpected argument %q: only flags are accepted", args[0])}
	}
	return nil
}

// usageError is a mistake in the call or in the configuration, not in the world.
type usageError struct{ error }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var c call
	cmd := &cobra.Command{
		Use:   "epcached [flags]",
		Short: "keep compiled ONNX Runtime models and serve them to local applications",
		Long: `epcached compiles each ONNX model once on this machine, keeps what the execution provider made of it,
and serves it to applications over a Unix socket. It stays in the foreground; SIGTERM stops it after
the requests under way are answered.

It needs a runtime, a folder with ONNX Runtime and a plugin execution provider, such as pip makes:

    pip install --no-deps --target runtime onnxruntime onnxruntime-ep-openvino

Flags go before the configuration file, which goes before the defaults. The defaults are, for root,
/var/lib/epcached and /run/epcached/epcached.sock, and for a user $XDG_STATE_HOME/epcached (or
~/.local/state/epcached) and the socket in $XDG_RUNTIME_DIR/epcached. doc/configuration.md describes the
file; --check-config prints what would be in force, or all that is wrong with it. While the daemon runs, a changed
file, and changed rules, are put into force as soon as they are at rest, and upon SIGHUP.

With --autostart it starts the user's own daemon as a process of its own, with $XDG_CONFIG_HOME/epcached/epcached.toml, and returns when that
answers: so clients do that find no daemon. It logs to epcached.log in the state folder and leaves when it was idle for 15 minutes.

Exit status: 0 stopped as asked, 1 failed, 2 wrong flags or configuration, 4 the index turned out to
be damaged: start it again, and it makes the index again from its manifests before it serves.`,
		Example:       "  epcached --runtime ./runtime --state ./state --socket ./epcached.sock",
		Version:       version,
		Args:          noArguments,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			read := func() (*config.Settings, *rules.Set, error) { return c.read(cmd.Flags()) }
			s, set, err := read()
			if wrong, is := errors.AsType[usageError](err); is && c.check {
				return wrong.error // what was asked for, as of epcachectl config check: the call is right
			}
			if err != nil {
				return err
			}
			if c.check {
				return s.Print(stdout)
			}
			if c.autostart && !c.detached {
				return c.launch(cmd.Context(), s)
			}
			p := &process{read: read, stderr: stderr, idle: s.IdleAfter(c.autostart), startedBy: c.startedBy()}
			if c.detached {
				return p.detached(cmd.Context(), s, set)
			}
			return p.serve(cmd.Context(), s, set)
		},
	}
	c.addFlags(cmd.Flags())
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	err := cmd.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if _, usage := errors.AsType[usageError](err); usage {
		logs.WriteFatal(stderr, fmt.Sprintf("epcached: %v\nepcached: hint: epcached --help", err))
		return exitUsage
	}
	if _, damaged := errors.AsType[damagedError](err); damaged {
		logs.WriteFatal(stderr, fmt.Sprintf("epcached: %v\nepcached: hint: restart it: it makes "+
			"the index from the manifests before it serves", err))
		return exitDamage
	}
	text := fmt.Sprintf("epcached: %v", err)
	if e, ok := errors.AsType[*apierr.Error](err); ok && e.Hint != "" {
		text += "\nepcached: hint: " + e.Hint
	}
	logs.WriteFatal(stderr, text)
	return exitFailure
}

// heapFloor is the size that the heap may have without a collection. By itself the runtime collects the
// small heap of a daemon every few hundred hits.
const heapFloor = 32 << 20

// keepHeapFloor lets a heap grow to the floor, and a larger one to twice its size. GOGC is respected.
func keepHeapFloor() {
	if os.Getenv("GOGC") != "" {
		return
	}
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	type cycle struct{ *cycle }
	var after func(*cycle)
	after = func(*cycle) {
		metrics.Read(live)
		debug.SetGCPercent(gcPercentFor(live[0].Value.Uint64()))
		runtime.SetFinalizer(new(cycle), after) // runs after the next collection
	}
	after(nil)
}

// gcPercentFor lets a heap with so many live bytes grow to the floor, or to twice its size.
func gcPercentFor(live uint64) int {
	const most = 100 * heapFloor / (4 << 20) // the runtime's least heap is 4 MiB at 100
	return int(min(most, max(200, 100*heapFloor/max(live, 1))-100))
}
