package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/config"
	"github.com/epcached/epcached/rules"
	"github.com/epcached/epcached/unixsock"
)

// stopGrace is how long requests under way may take after SIGTERM; systemd kills after 90 s by default.
const stopGrace = 20 * time.Second

// process is one run of the daemon.
type process struct {
	read   reader
	stderr io.Writer
	idle   time.Duration // how long nobody may need it until it leaves; 0: it stays
	ready  func()        // is called when it answers; may be nil
}

// serve runs the daemon until the context ends, or nobody needs it any more.
func (p *process) serve(ctx context.Context, s *config.Settings, set *rules.Set) error {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP) // from here on it ends nobody
	defer signal.Stop(hangup)
	level := &slog.LevelVar{}
	level.Set(s.Level())
	log := slog.New(slog.NewTextHandler(p.stderr, &slog.HandlerOptions{Level: level}))
	worker, err := findWorker(s.Worker)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(s.State, 0o711); err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	user, err := workerUser(s, worker)
	if err != nil {
		return err
	}
	ort := compilers.NewORT(compilers.ORTOptions{
		Worker: worker, Limits: limitsOf(s.Limits), Sandbox: sandboxOf(s.Sandbox), User: user, Log: log,
		Scratch: filepath.Join(s.State, "staging"), // emptied at the start: a daemon that is killed leaves nothing elsewhere
		// ONNX Runtime's telemetry keeps a database, and syncs it a dozen times in each process.
		Env: []string{"ORT_DISABLE_TELEMETRY=1"},
	})
	compiler, err := compilers.NewCommand(ort, toolsOf(s))
	if err != nil {
		return errors.Join(err, ort.Close())
	}
	c, err := cache.Open(s.State, optionsOf(s, set, compiler, log))
	if err != nil {
		return errors.Join(err, compiler.Close())
	}
	r := &reloader{read: p.read, cache: c, level: level, log: log, started: s, inForce: s, rules: set,
		options: func(s *config.Settings, set *rules.Set) cache.Options { return optionsOf(s, set, compiler, log) }}
	err = p.answer(ctx, s, c, log, func() func() { return r.follow(ctx, hangup) })
	return errors.Join(err, c.Close(), compiler.Close())
}

// answer serves the socket until the context ends, and then lets requests under way finish, or until nobody needs it. begin is called when it
// is ready, and gives what ends what it began.
func (p *process) answer(ctx context.Context, s *config.Settings, c *cache.Cache, log *slog.Logger, begin func() func()) error {
	l, err := listen(s.Socket)
	if err != nil {
		return err
	}
	b := &backend{cache: c, socket: s.Socket}
	server := &unixsock.Server{Backend: b, Name: "epcached " + version, Log: log}
	b.server = server
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(context.Background(), l) }()
	log.Info("ready", "version", version, "socket", s.Socket, "state", c.Directory(), "runtimes", len(s.Runtimes))
	notify(log, daemon.SdNotifyReady)
	if p.ready != nil {
		p.ready()
	}
	defer watchdog(ctx, log)()
	unneeded, stop := p.untilUnneeded(s.Socket, server, c)
	defer stop()
	end := begin()
	defer end()
	select {
	case err := <-failed:
		return err
	case why := <-unneeded:
		end()
		log.Info("leaving", "why", why)
		return <-failed // it has no clients any more
	case <-ctx.Done():
	}
	end() // who stops is not ready again
	log.Info("stopping")
	notify(log, daemon.SdNotifyStopping)
	grace, cancel := context.WithTimeout(context.Background(), stopGrace)
	defer cancel()
	if err := server.Shutdown(grace); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return <-failed
}

// listen takes the socket that systemd passed, or makes one.
func listen(path string) (net.Listener, error) {
	passed, err := activation.Listeners()
	if err != nil {
		return nil, fmt.Errorf("socket activation: %w", err)
	}
	for _, l := range passed {
		if l != nil && l.Addr().Network() == "unix" {
			return l, nil
		}
	}
	return unixsock.Listen(path, unixsock.DefaultSocketMode())
}

// findWorker finds the program that loads vendor code: as configured, else beside this one.
func findWorker(configured string) (string, error) {
	path := configured
	if path == "" {
		self, err := os.Executable()
		if err != nil {
			return "", fmt.Errorf("worker program: %w", err)
		}
		if self, err = filepath.EvalSymlinks(self); err != nil {
			return "", fmt.Errorf("worker program: %w", err)
		}
		path = filepath.Join(filepath.Dir(self), "epcached-ort")
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("worker program: %w; it is built beside epcached, or named by worker in the configuration", err)
	}
	return path, nil
}

func notify(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("systemd not notified", "state", state, "error", err)
	}
}

// watchdog tells systemd regularly that the daemon is alive, where it asked for that.
func watchdog(ctx context.Context, log *slog.Logger) (stop func()) {
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil || every == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		tick := time.NewTicker(every / 2)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				notify(log, daemon.SdNotifyWatchdog)
			}
		}
	}()
	return cancel
}
