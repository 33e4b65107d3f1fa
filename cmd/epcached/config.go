package main

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/layer"
	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/store"
)

type call struct {
	config   string
	check    bool
	state    string
	socket   string
	workers  string
	runtimes []string
	logLevel string
	idleExit string

	autostart bool // a client starts it
	detached  bool // with autostart: the background process
}

func (c *call) addFlags(f *pflag.FlagSet) {
	f.StringVar(&c.state, "state", "", "store builds in the directory `DIR`")
	f.StringVar(&c.socket, "socket", "", "serve clients at the Unix socket `PATH`")
	f.StringVar(&c.workers, "worker-socket", "",
		"start workers by the systemd unit with the Unix socket `PATH`")
	f.StringArrayVar(&c.runtimes, "runtime", nil,
		"use the runtime in `DIR`, which pip --target made, "+
			"or a virtual environment; repeatable")
	f.StringVar(&c.config, "config", "", "read the configuration `FILE` (TOML)")
	f.BoolVar(&c.check, "check-config", false,
		"print each value of the configuration and where it comes from, and exit")
	f.StringVar(&c.idleExit, "idle-exit", "",
		"exit after `DURATION` without connections, leases and jobs, such as 15m; 0s: never")
	f.BoolVar(&c.autostart, "autostart", false, "start the user's own daemon in the background, "+
		"and return when it answers")
	f.BoolVar(&c.detached, "detached", false, "")
	f.Lookup("detached").Hidden = true
	f.Func("log-level", "log messages of `LEVEL` and above: debug, info, warn or error",
		func(text string) error {
			if !slices.Contains([]string{"debug", "info", "warn", "error"}, text) {
				return errors.New("it must be debug, info, warn or error")
			}
			c.logLevel = text
			return nil
		})
}

// read reads the configuration and the rules that it names. If only the rules are wrong, it returns
// the settings with the error.
func (c *call) read(given *pflag.FlagSet) (*config.Settings, *rules.Set, error) {
	s, err := c.settings(given)
	if err != nil {
		return nil, nil, err
	}
	set, err := s.LoadRules()
	if err != nil {
		return s, nil, usageError{fmt.Errorf("configuration: %w", err)}
	}
	return s, set, nil
}

func (c *call) settings(given *pflag.FlagSet) (*config.Settings, error) {
	load := config.Load
	if c.autostart {
		load = config.LoadUserFile
	}
	s, err := load(c.config)
	if err != nil {
		return nil, usageError{fmt.Errorf("configuration %w", err)}
	}
	if _, err := config.ParseDuration(c.idleExit); given.Changed("idle-exit") && err != nil {
		return nil, usageError{fmt.Errorf("--idle-exit: %w", err)}
	}
	over := func(flag string, to *string, value string) {
		if given.Changed(flag) {
			*to = value
			s.Flag(strings.ReplaceAll(flag, "-", "_"), flag)
		}
	}
	over("state", &s.State, c.state)
	over("socket", &s.Socket, c.socket)
	over("worker-socket", &s.WorkerSocket, c.workers)
	over("log-level", &s.LogLevel, c.logLevel)
	over("idle-exit", &s.IdleExit, c.idleExit)
	if s.State == "" || s.Socket == "" {
		return nil, usageError{errors.New("no home directory for the state: give --state and " +
			"--socket")}
	}
	for _, path := range []*string{&s.State, &s.Socket} {
		if *path, err = filepath.Abs(*path); err != nil {
			return nil, err
		}
	}
	if c.detached {
		addOwnRuntime(s)
	}
	flagged := make([]config.Runtime, len(c.runtimes))
	for i, dir := range c.runtimes {
		if flagged[i].Directory, err = filepath.Abs(dir); err != nil {
			return nil, err
		}
	}
	s.PreferRuntimes(flagged, "runtime")
	return s, nil
}

func optionsOf(s *config.Settings, set *rules.Set, compiler compilers.Compiler,
	log *slog.Logger) cache.Options {
	budget, floor, share := s.Space.Amounts()
	limits := limitsOf(s.Limits)
	o := cache.Options{
		Compiler: compiler, Runtimes: runtimesOf(s), AllowOptions: s.AllowOptions,
		Jobs: int(s.Jobs), JobsMemory: int64(s.JobsMemory),
		PathAccess: s.PathAccess, Administrators: s.Administrators, Rules: set, Log: log,
		KeepSource: s.KeepSource, Publishers: s.Publishers,
		Claims:   claims.Limits{Deadline: limits.Wall, Bytes: limits.Output, Trust: s.Trust},
		Rebuild:  upkeep.RebuildOptions{Off: !s.Rebuild.Enabled, Window: s.Rebuild.Window},
		Policies: make(map[string]request.Policy, len(s.Policies)),
		Pack:     s.Space.Pack, PackAfter: config.Duration(s.Space.PackAfter),
		Verify: config.Duration(s.Space.VerifyEvery),
		Space: store.SpaceOptions{Budget: store.Amount(budget), Floor: store.Amount(floor),
			UserShare: store.Amount(share), MaxUnused: config.Duration(s.Space.MaxUnused)},
		Conditions: conditions(s), Remotes: remotesOf(s),
	}
	for _, l := range s.Layers {
		o.Layers = append(o.Layers, layer.Source{Path: l.Path, Trust: l.Trust})
	}
	for _, d := range s.Drivers {
		o.Drivers = append(o.Drivers,
			runtimes.DriverSource{EP: d.EP, File: d.File, Command: d.Command})
	}
	for ep, p := range s.Policies {
		o.Policies[ep] = request.Policy{
			Unknown: p.Unknown, PreferRecompilation: p.PreferRecompilation,
			Unsupported: p.Unsupported, MaxAge: config.Duration(p.MaxAge),
			MeasureGain: &p.MeasureGain,
		}
	}
	return o
}

func remotesOf(s *config.Settings) (out []remotes.Remote) {
	key := s.SigningKey
	if dir := os.Getenv("CREDENTIALS_DIRECTORY"); key == "" && dir != "" {
		key = filepath.Join(dir, "signing-key") // of LoadCredential=
	}
	for _, name := range slices.Sorted(maps.Keys(s.Remotes)) {
		r := s.Remotes[name]
		out = append(out, remotes.Remote{Config: r.Config(name), Trust: r.Trust,
			Ask: r.Ask != "never", Publish: r.Publish == "shared", Lease: r.Lease,
			LoseAtMost: remotes.DefaultLoss, SigningKey: key})
	}
	return out
}

func runtimesOf(s *config.Settings) []compilers.Runtime {
	var out []compilers.Runtime
	for _, rt := range s.Runtimes {
		spec := compilers.Runtime{Directory: rt.Directory, ORTLibrary: rt.ORTLibrary}
		// sorted, because the list is compared to notice changes
		for _, ep := range slices.Sorted(maps.Keys(rt.EPLibraries)) {
			spec.EPs = append(spec.EPs, compilers.EPLibrary{EP: ep, Path: rt.EPLibraries[ep]})
		}
		out = append(out, spec)
	}
	return out
}

func limitsOf(l config.Limits) compilers.Limits {
	wall := config.Duration(l.Wall)
	return compilers.Limits{Wall: wall, CPU: 16 * wall, Memory: int64(l.MemoryBytes),
		Output: int64(l.OutputBytes)}
}

func sandboxOf(s config.Sandbox) compilers.SandboxOptions {
	return compilers.SandboxOptions{Network: s.Network, Read: s.Read, Write: s.Write}
}

// conditions are the settings that a compile's outcome depends on; after a change, remembered
// failures do not count.
func conditions(s *config.Settings) string {
	limits, sandbox := limitsOf(s.Limits), sandboxOf(s.Sandbox)
	return strings.Join([]string{version, fmt.Sprintf("%+v %+v", limits, sandbox),
		s.Worker, s.WorkerUser, s.WorkerSocket}, "\n")
}

// workerUser returns the workers' user, nil for the daemon's own. It fails if compiles could not
// run as that user.
func workerUser(s *config.Settings, worker string) (*compilers.Credential, error) {
	if s.WorkerSocket != "" {
		c, err := compilers.UnitCredential(s.WorkerSocket)
		if err == nil && s.WorkerUser != "" {
			err = errors.New("the workers' systemd unit names their user: remove worker_user")
		}
		if err != nil {
			return nil, usageError{fmt.Errorf("configuration: worker_socket: %w", err)}
		}
		return c, nil
	}
	if s.WorkerUser == "" {
		return nil, nil
	}
	wrong := func(err error) error {
		return usageError{fmt.Errorf("configuration: worker_user %q: %w", s.WorkerUser, err)}
	}
	c, err := compilers.LookUpUser(s.WorkerUser)
	if err != nil {
		return nil, wrong(err)
	}
	switch {
	case int(c.UID) == os.Geteuid():
		return nil, nil
	case os.Geteuid() != 0:
		return nil,
			wrong(errors.New("only a daemon that runs as root can start workers as another user"))
	case c.GID == 0:
		return nil, wrong(errors.New("workers cannot run in root's group"))
	}
	paths := []string{filepath.Join(s.State, "staging"), worker}
	for _, rt := range s.Runtimes {
		paths = append(paths, rt.Directory, rt.ORTLibrary)
		paths = slices.AppendSeq(paths, maps.Values(rt.EPLibraries))
	}
	for _, path := range paths {
		if err := c.CanPass(path); err != nil {
			return nil, wrong(err)
		}
	}
	if err := c.CanRun(worker); err != nil {
		return nil, wrong(err)
	}
	return c, nil
}
