package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/spf13/pflag"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
)

// settings is what the daemon runs with: the configuration file's fields, under the flags that were given.
type settings struct {
	State          string            `toml:"state"`
	Socket         string            `toml:"socket"`
	LogLevel       string            `toml:"log_level"`
	Worker         string            `toml:"worker"`         // path of epcached-ort; default: beside this program
	Jobs           int               `toml:"jobs"`           // compiles at the same time; default: one per processor
	PathAccess     bool              `toml:"path_access"`    // shared models may be opened by path by every local user
	Administrators []uint32          `toml:"administrators"` // user ids
	AllowOptions   []string          `toml:"allow_options"`  // "EP/option", "session/key"
	Runtimes       []runtimeSettings `toml:"runtime"`
	Limits         limitSettings     `toml:"limits"`

	config string // path of the file, from the flag
	flags  struct{ runtimes []string }
}

// runtimeSettings is one [[runtime]]: a directory, or the libraries one by one.
type runtimeSettings struct {
	Directory   string            `toml:"directory"`
	ORTLibrary  string            `toml:"ort_library"`
	EPLibraries map[string]string `toml:"ep_libraries"` // by execution provider
}

// limitSettings bound one compile.
type limitSettings struct {
	WallSeconds float64 `toml:"wall_seconds"`
	MemoryBytes int64   `toml:"memory_bytes"`
	OutputBytes int64   `toml:"output_bytes"`
}

func (s *settings) addFlags(f *pflag.FlagSet) {
	f.StringVar(&s.State, "state", "", "state directory `DIR`, where models are kept")
	f.StringVar(&s.Socket, "socket", "", "Unix socket `PATH` to answer on")
	f.StringArrayVar(&s.flags.runtimes, "runtime", nil, "`DIR` with ONNX Runtime and execution providers, as pip --target or a virtual environment leaves it; repeatable")
	f.StringVar(&s.config, "config", "", "configuration `FILE` (TOML)")
	f.StringVar(&s.LogLevel, "log-level", "", "debug, info, warn or error (default info)")
}

// load reads the configuration file under the flags that were given, and fills in the defaults.
func (s *settings) load(given *pflag.FlagSet) error {
	file := settings{}
	if s.config != "" {
		if err := readConfig(s.config, &file); err != nil {
			return usageError{err}
		}
	}
	if given.Changed("state") {
		file.State = s.State
	}
	if given.Changed("socket") {
		file.Socket = s.Socket
	}
	if given.Changed("log-level") {
		file.LogLevel = s.LogLevel
	}
	var flagged []runtimeSettings
	for _, dir := range s.flags.runtimes {
		flagged = append(flagged, runtimeSettings{Directory: dir})
	}
	file.Runtimes = append(flagged, file.Runtimes...) // flags go first: they are preferred
	file.config = s.config
	*s = file
	return s.complete()
}

// readConfig is strict: a field that is not known is an error with its line, for a misspelled limit is no limit.
func readConfig(path string, to *settings) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	defer f.Close()
	err = toml.NewDecoder(f).DisallowUnknownFields().Decode(to)
	var syntax *toml.DecodeError
	var unknown *toml.StrictMissingError
	switch {
	case errors.As(err, &unknown):
		row, col := unknown.Errors[0].Position()
		return fmt.Errorf("configuration %s:%d:%d: unknown field %q", path, row, col, joinKey(unknown.Errors[0].Key()))
	case errors.As(err, &syntax):
		row, col := syntax.Position()
		return fmt.Errorf("configuration %s:%d:%d: %w", path, row, col, err)
	case err != nil:
		return fmt.Errorf("configuration %s: %w", path, err)
	}
	return nil
}

func joinKey(k toml.Key) string {
	out := ""
	for i, part := range k {
		if i > 0 {
			out += "."
		}
		out += part
	}
	return out
}

// complete fills in what was not said, and makes paths absolute.
func (s *settings) complete() error {
	if s.State == "" {
		s.State = defaultState()
	}
	if s.Socket == "" {
		s.Socket = defaultSocket()
	}
	if s.State == "" || s.Socket == "" {
		return usageError{errors.New("no home directory to put the state in: give --state and --socket")}
	}
	for _, p := range []*string{&s.State, &s.Socket} {
		abs, err := filepath.Abs(*p)
		if err != nil {
			return err
		}
		*p = abs
	}
	for i := range s.Runtimes {
		rt := &s.Runtimes[i]
		if (rt.Directory == "") == (rt.ORTLibrary == "") {
			return usageError{fmt.Errorf("runtime %d: give either directory, or ort_library and ep_libraries", i+1)}
		}
		if rt.Directory != "" {
			abs, err := filepath.Abs(rt.Directory)
			if err != nil {
				return err
			}
			rt.Directory = abs
		}
	}
	return nil
}

func defaultState() string {
	if os.Geteuid() == 0 {
		return "/var/lib/epcached"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "epcached")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".local", "state", "epcached")
}

func defaultSocket() string {
	if os.Geteuid() == 0 {
		return unixsock.SystemSocket
	}
	return unixsock.UserSocket()
}

func (s *settings) level() (slog.Level, error) {
	if s.LogLevel == "" {
		return slog.LevelInfo, nil
	}
	var l slog.Level
	if err := l.UnmarshalText([]byte(s.LogLevel)); err != nil {
		return 0, usageError{fmt.Errorf("log level %q: it is one of debug, info, warn, error", s.LogLevel)}
	}
	return l, nil
}

func (s *settings) runtimes() []compilers.Runtime {
	var out []compilers.Runtime
	for _, rt := range s.Runtimes {
		spec := compilers.Runtime{Directory: rt.Directory, ORTLibrary: rt.ORTLibrary}
		for ep, path := range rt.EPLibraries {
			spec.EPs = append(spec.EPs, compilers.EPLibrary{EP: ep, Path: path})
		}
		out = append(out, spec)
	}
	return out
}

func (s *settings) limits() compilers.Limits {
	return compilers.Limits{
		Wall:   time.Duration(s.Limits.WallSeconds * float64(time.Second)),
		Memory: s.Limits.MemoryBytes, Output: s.Limits.OutputBytes,
	}
}
