// Command epcached is the daemon that caches compiled ONNX Runtime models.
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
	"github.com/epcached/epcached/internal/parallel"
	"github.com/epcached/epcached/internal/slowfile"
	"github.com/epcached/epcached/internal/usage"
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
	if _, err := os.Getwd(); err != nil {
		_ = os.Chdir("/") // the starting application's working directory was removed
	}
	keepHeapFloor()
	addSchedulers()
	shortenSlices()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// usageError is a mistake in the command line or in the configuration.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func wrongCall(e *usage.Error) error { return usageError{e} }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var c call
	cmd := &cobra.Command{
		Use:   "epcached [flags]",
		Short: "keep compiled ONNX Runtime models and serve them to local applications",
		Long: `epcached compiles each ONNX model once on this machine, stores the result, and serves
it to applications over a Unix socket. It runs in the foreground. SIGTERM stops it after it has
answered the running requests.

It needs a runtime: a directory with ONNX Runtime and a plugin execution provider. This makes one:

    pip install --no-deps --target runtime onnxruntime onnxruntime-ep-openvino

Flags override the configuration file, which overrides the defaults. --check-config prints the
values in effect, or all mistakes. doc/configuration.md describes the file. The daemon reads the
file and its rules again when they change, and upon SIGHUP.

By default, root's daemon has the state directory /var/lib/epcached and the socket
/run/epcached/epcached.sock. A user's daemon has ~/.local/state/epcached (see XDG_STATE_HOME) and
$XDG_RUNTIME_DIR/epcached/epcached.sock.

--autostart starts the user's own daemon in the background, and returns when it answers; clients
start it in the same way. It reads ~/.config/epcached/epcached.toml (see XDG_CONFIG_HOME), logs to
epcached.log in its state directory, and exits when it was not used for 15 minutes.

Exit status:
    0  stopped
    1  failed
    2  wrong flags or configuration
    4  the index is damaged: start epcached again, and it rebuilds the index first`,
		Example:       "  epcached --runtime ./runtime --state ./state --socket ./epcached.sock",
		Version:       version,
		Args:          usage.Arguments(0, 0, wrongCall),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			read := func() (*config.Settings, *rules.Set, error) { return c.read(cmd.Flags()) }
			s, set, err := read()
			if wrong, is := errors.AsType[usageError](err); is && c.check {
				// as for epcachectl config check, the exit status is not that of a wrong call
				return wrong.error
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
			p := &process{read: read, stderr: stderr, idle: s.IdleAfter(c.autostart),
				startedBy: c.startedBy()}
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
	usage.Set(cmd, wrongCall)
	err := cmd.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if wrong, is := errors.AsType[usageError](err); is {
		hint := "epcached --help"
		if call, is := errors.AsType[*usage.Error](wrong); is {
			hint = call.Hint
		}
		logs.WriteFatal(stderr, fmt.Sprintf("epcached: %v\nepcached: hint: %s", err, hint))
		return exitUsage
	}
	if _, damaged := errors.AsType[damagedError](err); damaged {
		logs.WriteFatal(stderr, fmt.Sprintf("epcached: %v\nepcached: hint: start it again: it "+
			"rebuilds the index before it serves", err))
		return exitDamage
	}
	text := fmt.Sprintf("epcached: %v", err)
	if e, ok := errors.AsType[*apierr.Error](err); ok && e.Hint != "" {
		text += "\nepcached: hint: " + e.Hint
	}
	logs.WriteFatal(stderr, text)
	return exitFailure
}

// addSchedulers lets more goroutines run at the same time than there are processors, so that the
// kernel divides the processors and not Go's scheduler. With as many as processors, two requests of
// one user keep all of them busy; Go then looks for arrived frames of other users only every 10 ms.
// GOMAXPROCS is respected.
func addSchedulers() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(4 * parallel.Processors())
	}
}

// heapFloor is the size that the heap may have without a collection. Without it the runtime would
// collect the daemon's small heap every few hundred hits.
const heapFloor = 32 << 20

// keepHeapFloor lets a heap grow to the floor, and a larger one to twice its size. GOGC is
// respected.
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

// gcPercentFor returns the GC percentage with which a heap of live bytes grows to the floor, or to
// twice its size.
func gcPercentFor(live uint64) int {
	const most = 100 * heapFloor / (4 << 20) // the runtime's least heap is 4 MiB at 100
	return int(min(most, max(200, 100*heapFloor/max(live, 1))-100))
}
