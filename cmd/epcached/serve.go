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
	"sync"
	"sync/atomic"
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
	anew   func() error  // makes what is needed besides the store, once more, when the state folder was removed; may be nil

	startedBy string         // as in wire.StatusReply
	stop      func(*os.File) // as in backend
	mu        sync.Mutex     // guards ends
	ends      []*os.File     // clients wait for the end of these, which is that of the process

	passed  *os.File    // the socket that systemd passed; nil: none, or not looked for yet
	opening atomic.Bool // systemd was told how far the opening of a large store is

	remade string // why the state folder is opened once more; "": it is the first time
}

// uprooted is why a store that was removed while the daemon ran is opened anew, and with what.
type uprooted struct {
	why      string
	settings *config.Settings
	rules    *rules.Set
}

// serve runs the daemon until the context ends, or nobody needs it any more. Where its state folder is removed it begins again, with an empty
// one: to stop would leave those without a daemon who started it by hand, and to go on would have every request compiled.
func (p *process) serve(ctx context.Context, s *config.Settings, set *rules.Set) error {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP) // from here on it ends nobody
	defer signal.Stop(hangup)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	p.stop = func(end *os.File) {
		p.mu.Lock()
		p.ends = append(p.ends, end)
		p.mu.Unlock()
		stop()
	}
	for {
		gone, err := p.once(ctx, s, set, hangup)
		if gone == nil || ctx.Err() != nil {
			return err
		}
		s, set = gone.settings, gone.rules
		p.remade = gone.why + ", " + time.Now().UTC().Format(time.RFC3339)
		if p.anew != nil {
			if err := p.anew(); err != nil {
				return err
			}
		}
	}
}

// once runs the daemon on one store. gone tells that it was removed; the error, of leaving it, then tells nothing more.
func (p *process) once(ctx context.Context, s *config.Settings, set *rules.Set, hangup <-chan os.Signal) (gone *uprooted, err error) {
	level := &slog.LevelVar{}
	level.Set(s.Level())
	log := newLog(p.stderr, level)
	worker, err := findWorker(s.Worker)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.State, 0o711); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	user, err := workerUser(s, worker)
	if err != nil {
		return nil, err
	}
	ort := compilers.NewORT(compilers.ORTOptions{
		Worker: worker, Limits: limitsOf(s.Limits), Sandbox: sandboxOf(s.Sandbox), User: user, Log: log,
		Scratch: filepath.Join(s.State, "staging"), // emptied at the start: a daemon that is killed leaves nothing elsewhere
	})
	compiler, err := compilers.NewCommand(ort, toolsOf(s))
	if err != nil {
		return nil, errors.Join(err, ort.Close())
	}
	options := optionsOf(s, set, compiler, log)
	options.Remade = p.remade
	options.Opening = func(what string) {
		p.opening.Store(true)
		notify(log, stillOpening(what))
	}
	c, err := cache.Open(s.State, options)
	if err != nil {
		return nil, errors.Join(err, compiler.Close())
	}
	r := &reloader{read: p.read, cache: c, level: level, log: log, started: s, inForce: s, rules: set,
		options: func(s *config.Settings, set *rules.Set) cache.Options { return optionsOf(s, set, compiler, log) }}
	why, err := p.answer(ctx, s, c, log, func() func() { return r.follow(ctx, hangup) })
	err = errors.Join(err, c.Close(), compiler.Close())
	if why == "" {
		return nil, err
	}
	if err != nil {
		log.Warn("the store that is gone is left", "error", err) // what was in memory has no place any more
	}
	return &uprooted{why, r.inForce, r.rules}, nil
}

// answer serves the socket until the context ends, and then lets requests under way finish, or until nobody needs it, or the store is gone, which
// it says. begin is called when it is ready, and gives what ends what it began.
func (p *process) answer(ctx context.Context, s *config.Settings, c *cache.Cache, log *slog.Logger, begin func() func()) (gone string, err error) {
	l, err := p.listen(s.Socket)
	if err != nil {
		return "", err
	}
	socket := l.Addr().String()
	places := placesOf(socket)
	b := &backend{cache: c, socket: socket, startedBy: p.startedBy, stop: p.stop}
	server := &unixsock.Server{Backend: b, Name: "epcached " + version, Log: log}
	b.server = server
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(context.Background(), l) }()
	log.Info("ready", "version", version, "socket", socket, "started_by", p.startedBy, "state", c.Directory(), "runtimes", len(s.Runtimes))
	ready := daemon.SdNotifyReady
	if p.opening.Swap(false) {
		ready += "\nSTATUS=" // what was said is over
	}
	notify(log, ready)
	if p.ready != nil {
		p.ready()
	}
	defer watchdog(ctx, log)()
	unneeded, stop := p.untilUnneeded(places, server, c)
	defer stop()
	end := begin()
	defer end()
	select {
	case err := <-failed:
		stop()
		select {
		case why := <-unneeded: // the server has ended for that
			log.Info("leaving", "why", why)
		default:
		}
		return "", err
	case why := <-unneeded:
		end()
		log.Info("leaving", "why", why)
		return "", <-failed // it has no clients any more
	case gone = <-c.Uprooted():
		end()
		log.Warn("beginning again with an empty state folder", "state", c.Directory(), "why", gone)
	case <-ctx.Done():
		end() // a daemon that stops is not ready again
		c.Leave()
		log.Info("stopping")
		notify(log, daemon.SdNotifyStopping)
	}
	grace, cancel := context.WithTimeout(context.Background(), stopGrace)
	defer cancel()
	if err := server.Shutdown(grace); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return gone, err
	}
	return gone, <-failed
}

// listen takes the socket that systemd passed, or makes one. The former is kept open, for systemd does not pass it again.
func (p *process) listen(path string) (net.Listener, error) {
	passed, err := activation.Listeners() // none, the second time
	if err != nil {
		return nil, fmt.Errorf("socket activation: %w", err)
	}
	for _, l := range passed {
		if own, ok := l.(*net.UnixListener); ok && own.Addr().Network() == "unix" && p.passed == nil {
			if p.passed, err = own.File(); err != nil {
				return nil, fmt.Errorf("socket activation: %w", err)
			}
		}
		if l != nil {
			_ = l.Close() // of another kind, or kept above
		}
	}
	if p.passed != nil {
		p.startedBy = "socket"
		return net.FileListener(p.passed)
	}
	return unixsock.Listen(path, unixsock.DefaultSocketMode())
}

// startedBy tells who started the daemon, as wire.StatusReply has it. A socket that systemd passed is seen later.
func (c *call) startedBy() string {
	switch {
	case c.detached:
		return "client"
	case os.Getenv("NOTIFY_SOCKET") != "":
		return "service"
	}
	return ""
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

// openingLimit is how long systemd is to wait for the next sign of a daemon that is opening a large store. Without one it ends a daemon
// that is not ready after 90 s, which then begins from the start, for ever.
const openingLimit = 2 * time.Minute

func stillOpening(what string) string {
	return fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d\nSTATUS=%s", openingLimit.Microseconds(), what)
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
