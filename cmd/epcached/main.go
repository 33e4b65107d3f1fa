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
		Long: `epcached compiles each ONNX model once on this machine, stores the result, and serves it to
applications over a Unix socket. It stays in the foreground. SIGTERM stops it after the running
requests are answered.

It needs a runtime: a directory with ONNX Runtime and a plugin execution provider, such as

    pip install --no-deps --target runtime onnxruntime onnxruntime-ep-openvino

Flags override the configuration file, which overrides the defaults. --check-config prints the
values in effect, or all mistakes. doc/configuration.md describes the file. The daemon reloads the
file and its rules when they change, and upon SIGHUP.

The state and socket are by default, for root, /var/lib/epcached and /run/epcached/epcached.sock;
for a user $XDG_STATE_HOME/epcached (~/.local/state/epcached) and $XDG_RUNTIME_DIR/epcached.

With --autostart it starts the user's own daemon in the background, with the configuration
$XDG_CONFIG_HOME/epcached/epcached.toml, and returns when that answers. Clients do the same. That
daemon logs to epcached.log in its state directory, and exits after 15 idle minutes.

Exit status: 0 stopped, 1 failed, 2 wrong flags or configuration, 4 the index is damaged: restart
it, and it rebuilds the index from its manifests before it serves.`,
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
