package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
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
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cmd/epcached/internal/backend"
	"github.com/epcached/epcached/cmd/epcached/internal/idle"
	"github.com/epcached/epcached/cmd/epcached/internal/logs"
	"github.com/epcached/epcached/cmd/epcached/internal/reload"
	"github.com/epcached/epcached/cmd/epcached/internal/systemd"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/remote"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// stopGrace is how long requests under way may take after SIGTERM; systemd kills after 90 s by
// default.
const stopGrace = 20 * time.Second

type process struct {
	read   reload.Reader
	stderr io.Writer
	idle   time.Duration // end after this time without use; 0: never
	ready  func()        // called when it is ready; may be nil
	// recreates the process's own files after the state directory was removed; may be nil
	recreate func() error

	startedBy   string         // as in wire.StatusReply
	stop        func(*os.File) // as in backend
	mu          sync.Mutex     // guards ends
	stopReasons []*os.File     // pipes of clients that wait for the end of the process

	systemdListener *os.File    // the socket that systemd passed; nil: none so far
	opening         atomic.Bool // the progress of opening a large store was reported to systemd

	rebuilt string // why the state directory was opened again; "": it was not

	broken func(error) // ends the process because the index is damaged

	open func(dir string, o cache.Options) (*cache.Cache, error) // nil: cache.Open
}

// damagedStopTime is how long a daemon with a damaged index may take to answer its current
// requests and to end its workers. A request that blocks in the index would do so forever.
const damagedStopTime = 2 * time.Second

// damagedError ends a running daemon because its next start can repair the damage.
type damagedError struct{ error }

func (e damagedError) Unwrap() error { return e.error }

// reopening says why a store is opened again while the daemon runs, and with which settings.
type reopening struct {
	why      string
	settings *config.Settings
	rules    *rules.Set
}

// serve runs the daemon until the context or its use ends, or its index turns out to be damaged.
func (p *process) serve(ctx context.Context, s *config.Settings, set *rules.Set) error {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP) // from here on SIGHUP does not end the process
	defer signal.Stop(hangup)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	p.stop = func(end *os.File) {
		p.mu.Lock()
		p.stopReasons = append(p.stopReasons, end)
		p.mu.Unlock()
		stop(nil)
	}
	damaged := make(chan error, 1) // has at most one
	p.broken = func(err error) {
		damaged <- damagedError{err}
		stop(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- p.serveReopening(ctx, s, set, hangup) }()
	select {
	case err := <-ended:
		select {
		case err = <-damaged:
		default:
		}
		return err
	case err := <-damaged:
		select {
		case <-ended:
		case <-time.After(damagedStopTime): // stop as a crash would
		}
		return err
	}
}

// serveReopening runs the daemon, and opens the store again when the state directory was removed,
// because a daemon that was started by hand would not be started again, and one without its
// directory would compile for every request. It also opens the store again to rebuild the index.
func (p *process) serveReopening(ctx context.Context, s *config.Settings, set *rules.Set,
	hangup <-chan os.Signal) error {
	for {
		gone, err := p.serveOnce(ctx, s, set, hangup)
		if gone == nil || ctx.Err() != nil {
			return err
		}
		s, set = gone.settings, gone.rules
		if gone.why == store.IndexDiscarded {
			continue
		}
		p.rebuilt = gone.why + ", " + time.Now().UTC().Format(time.RFC3339)
		if p.recreate != nil {
			if err := p.recreate(); err != nil {
				return err
			}
		}
	}
}

// serveOnce runs the daemon on one store. gone is not nil if the store must be opened again; errors
// of closing it were logged then.
func (p *process) serveOnce(ctx context.Context, s *config.Settings, set *rules.Set,
	hangup <-chan os.Signal) (gone *reopening, err error) {
	level := &slog.LevelVar{}
	level.Set(s.Level())
	log := logs.New(p.stderr, level)
	reload.LogWarnings(log, s)
	worker, err := findWorker(s.Worker)
	if err != nil {
		return nil, err
	}
	if err := store.MakeDirectory(s.State); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	user, err := workerUser(s, worker)
	if err != nil {
		return nil, err
	}
	compiler := compilers.NewORT(compilers.ORTOptions{
		Worker: worker, Limits: limitsOf(s.Limits), Sandbox: sandboxOf(s.Sandbox), User: user,
		Socket: s.WorkerSocket, Log: log,
		// emptied at the start, so that a killed daemon leaves no files elsewhere
		Scratch: filepath.Join(s.State, "staging"),
	})
	var tools []compilers.Tool // the vendors' own compilers
	for i := range s.Compilers {
		tools = append(tools, s.Compilers[i].Tool())
	}
	if err := compiler.AddTools(tools); err != nil {
		return nil, errors.Join(err, compiler.Close())
	}
	e := p.newEntrance(s.Socket, log)
	options := optionsOf(s, set, compiler, log)
	options.RemoteClient = remote.New(remote.Options{Socket: p.helperSocket(),
		Program: filepath.Join(filepath.Dir(worker), "epcached-remote"), Log: log})
	options.Rebuilt = p.rebuilt
	options.OnOpening = func(what string) {
		p.opening.Store(true)
		systemd.Notify(log, systemd.StillOpening(what))
		e.refuseClients(what)
	}
	options.OnBroken = func(err error) {
		e.server.RefuseAll(unavailable("the index is damaged, so the daemon ends",
			"its next start rebuilds the index; compile without epcached until then"))
		p.broken(err)
	}
	open := p.open
	if open == nil {
		open = cache.Open
	}
	c, err := open(s.State, options)
	if err != nil {
		return nil, errors.Join(err, e.close(), compiler.Close())
	}
	r := &reload.Reloader{Read: p.read, Cache: c, Level: level, Log: log, Started: s,
		Active: s, Rules: set,
		Options: func(s *config.Settings, set *rules.Set) cache.Options {
			return optionsOf(s, set, compiler, log)
		}}
	why, err := p.answer(ctx, s, c, e, func() func() { return r.Follow(ctx, hangup) })
	err = errors.Join(err, c.Close(), compiler.Close())
	if why == "" {
		return nil, err
	}
	if err != nil {
		// its directory may not exist any more
		log.Warn("cannot close the store cleanly", "error", err)
	}
	return &reopening{why, r.Active, r.Rules}, nil
}

// answer serves the socket until the context ends, after which it lets current requests finish,
// until the daemon is idle, or until the store must be reopened; then gone has the reason. When
// ready it calls begin, and at the end begin's result.
func (p *process) answer(ctx context.Context, s *config.Settings, c *cache.Cache, e *socketEntrance,
	begin func() func()) (gone string, err error) {
	e.backend.Cache = c
	e.server.RefuseAll(nil)
	if err := e.listen(); err != nil {
		return "", err
	}
	server, log := e.server, e.log
	log.Info("ready", "version", version, "socket", e.backend.Socket, "started_by", p.startedBy,
		"state", c.Store.Directory(), "runtimes_configured", len(s.Runtimes))
	ready := daemon.SdNotifyReady
	if p.opening.Swap(false) {
		ready += "\nSTATUS=" // clears the earlier status
	}
	systemd.Notify(log, ready)
	defer systemd.Watchdog(ctx, log)()
	unneeded, stop := idle.Watch(p.idle, e.requiredFiles, server, c.Idle)
	defer stop()
	end := begin()
	defer end()
	select {
	case err := <-e.ended:
		stop()
		select {
		case why := <-unneeded: // the server has stopped accepting
			log.Info("leaving", "why", why)
		default:
		}
		return "", err
	case why := <-unneeded:
		end()
		log.Info("leaving", "why", why)
		return "", <-e.ended // no client is left to wait for
	case gone = <-c.Store.ReopenNeeded():
		end()
		log.Warn("opening the state directory again", "state", c.Store.Directory(), "why", gone)
	case <-ctx.Done():
		end() // before the daemon reports that it stops
		c.PrepareClose()
		log.Info("stopping")
		systemd.Notify(log, daemon.SdNotifyStopping)
	}
	grace, cancel := context.WithTimeout(context.Background(), stopGrace)
	defer cancel()
	if err := server.Shutdown(grace); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return gone, err
	}
	return gone, <-e.ended
}

type socketEntrance struct {
	server  *unixsock.Server
	backend *backend.Backend
	log     *slog.Logger
	listen  func() error // begins to serve, once
	// requiredFiles are as of before clients could see the socket; set by listen.
	requiredFiles []idle.RequiredFile
	ended         chan error // receives the server's error at its end
}

func (p *process) newEntrance(socket string, log *slog.Logger) *socketEntrance {
	e := &socketEntrance{backend: backend.New(), log: log, ended: make(chan error, 1)}
	e.backend.End, e.backend.Version = p.stop, version
	e.server = &unixsock.Server{Backend: e.backend, Name: "epcached " + version, Log: log,
		Errors: backend.WireError, Owner: e.backend.Owner, Administrator: e.backend.Administrator}
	e.backend.Server = e.server
	e.listen = sync.OnceValue(func() error {
		l, err := p.listen(socket)
		if err != nil {
			return err
		}
		e.backend.Socket, e.backend.StartedBy = l.Addr().String(), p.startedBy
		e.requiredFiles = idle.RequiredFiles(e.backend.Socket)
		go func() { e.ended <- e.server.Serve(context.Background(), l) }()
		if p.ready != nil {
			p.ready()
		}
		return nil
	})
	return e
}

// refuseClients refuses requests while opening a large store, so that clients fall back.
func (e *socketEntrance) refuseClients(what string) {
	e.server.RefuseAll(unavailable("the daemon is starting: "+what, "compile without epcached "+
		"until then"))
	if err := e.listen(); err != nil {
		e.log.Warn("cannot answer clients while the daemon is starting", "error", err)
	}
}

// close stops refuseClients, and removes the socket.
func (e *socketEntrance) close() error {
	now, cancel := context.WithCancel(context.Background())
	cancel()
	if err := e.server.Shutdown(now); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	if e.backend.Socket == "" {
		return nil // it has not listened
	}
	return <-e.ended // wait, because the server removes the socket at its end
}

func unavailable(text, hint string) *unixsock.Error {
	return &unixsock.Error{Class: wire.ErrorClass_UNAVAILABLE, Text: text, Hint: hint}
}

// listen takes the socket that systemd passed, or creates one. It keeps systemd's open, because
// systemd does not pass it again.
func (p *process) listen(path string) (net.Listener, error) {
	passed, err := activation.Listeners() // returns none when it is called again
	if err != nil {
		return nil, fmt.Errorf("socket activation: %w", err)
	}
	for _, l := range passed {
		if own, ok := l.(*net.UnixListener); ok && own.Addr().Network() == "unix" &&
			p.systemdListener == nil {
			if p.systemdListener, err = own.File(); err != nil {
				return nil, fmt.Errorf("socket activation: %w", err)
			}
		}
		if l != nil {
			_ = l.Close() // another kind of socket, or duplicated above
		}
	}
	if p.systemdListener != nil {
		p.startedBy = "socket"
		return net.FileListener(p.systemdListener)
	}
	return unixsock.Listen(path, unixsock.DefaultSocketMode())
}

// unitHelper is the socket of the shipped unit that starts epcached-remote.
var unitHelper = "/run/epcached/remote.sock"

// helperSocket returns the socket of the shipped unit that starts epcached-remote, where it exists.
// A daemon of the shipped unit has no network itself, so a helper that it starts reaches no remote.
// "": the daemon starts the helper.
func (p *process) helperSocket() string {
	if p.startedBy != "service" && p.startedBy != "socket" {
		return ""
	}
	if info, err := os.Stat(unitHelper); err != nil || info.Mode().Type() != fs.ModeSocket {
		return ""
	}
	return unitHelper
}

// startedBy returns wire.StatusReply.started_by, except for socket activation.
func (c *call) startedBy() string {
	switch {
	case c.detached:
		return "client"
	case os.Getenv("NOTIFY_SOCKET") != "":
		return "service"
	}
	return ""
}

// findWorker returns the path of epcached-ort: as configured, otherwise beside this program.
func findWorker(configured string) (string, error) {
	path := configured
	if path == "" {
		self, err := os.Executable()
		if err == nil {
			self, err = filepath.EvalSymlinks(self)
		}
		if err != nil {
			return "", fmt.Errorf("worker program: %w", err)
		}
		path = filepath.Join(filepath.Dir(self), "epcached-ort")
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("worker program: %w; put it beside epcached, or name it as worker "+
			"in the configuration", err)
	}
	return path, nil
}
