package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/internal/config"
)

type call struct {
	config   string
	check    bool
	state    string
	socket   string
	runtimes []string
	logLevel logLevel
	idleExit string

	autostart bool // a client starts it
	detached  bool // and this is the process that stays
}

// logLevel is a flag that takes the configuration's words.
type logLevel string

// String, Set and Type make it a flag's value.
func (l *logLevel) String() string { return string(*l) }

// Set refuses what is no level.
func (l *logLevel) Set(text string) error {
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, text) {
		return fmt.Errorf("log level %q: it is one of debug, info, warn, error", text)
	}
	*l = logLevel(text)
	return nil
}

// Type is what help calls the value.
func (l *logLevel) Type() string { return "level" }

func (c *call) addFlags(f *pflag.FlagSet) {
	f.StringVar(&c.state, "state", "", "state directory `DIR`, where models are kept")
	f.StringVar(&c.socket, "socket", "", "Unix socket `PATH` to answer on")
	f.StringArrayVar(&c.runtimes, "runtime", nil, "`DIR` with ONNX Runtime and execution providers, as pip --target or a virtual environment leaves it; repeatable")
	f.StringVar(&c.config, "config", "", "configuration `FILE` (TOML)")
	f.BoolVar(&c.check, "check-config", false, "print the configuration in force, and where each value is from, and do nothing else")
	f.StringVar(&c.idleExit, "idle-exit", "", "leave after `DURATION` without connection, lease or job, such as 15m; 0s: never")
	f.BoolVar(&c.autostart, "autostart", false, "start the user's own daemon apart from the caller, as clients do that find none, and return when it answers")
	f.BoolVar(&c.detached, "detached", false, "")
	f.Lookup("detached").Hidden = true
	f.Var(&c.logLevel, "log-level", "least `LEVEL` that is logged: debug, info, warn or error")
}

// read reads the configuration and the rules that it names. Where only the rules are wrong the settings come with the error.
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
		load = config.LoadOwn
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
	over("log-level", &s.LogLevel, string(c.logLevel))
	over("idle-exit", &s.IdleExit, c.idleExit)
	if s.State == "" || s.Socket == "" {
		return nil, usageError{errors.New("no home directory to put the state in: give --state and --socket")}
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
