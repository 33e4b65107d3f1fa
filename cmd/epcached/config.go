package main

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
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
	LogLevel       logLevel          `toml:"log_level"`
	Worker         string            `toml:"worker"`         // path of epcached-ort; default: beside this program
	Jobs           uint32            `toml:"jobs"`           // compiles at the same time; 0: one per processor
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

// limitSettings bound one compile; 0: the default.
type limitSettings struct {
	WallSeconds float64 `toml:"wall_seconds"`
	MemoryBytes uint64  `toml:"memory_bytes"`
	OutputBytes uint64  `toml:"output_bytes"`
}

// logLevel is "debug", "info", "warn" or "error".
type logLevel struct{ slog.Level }

// UnmarshalText refuses what is no level, so that a configuration's error names the line.
func (l *logLevel) UnmarshalText(text []byte) error {
	if err := l.Level.UnmarshalText(text); err != nil {
		return fmt.Errorf("log level %q: it is one of debug, info, warn, error", text)
	}
	return nil
}

// Set and Type make it a flag's value.
func (l *logLevel) Set(text string) error { return l.UnmarshalText([]byte(text)) }

// Type is what help calls the value.
func (l *logLevel) Type() string { return "level" }

func (s *settings) addFlags(f *pflag.FlagSet) {
	f.StringVar(&s.State, "state", "", "state directory `DIR`, where models are kept")
	f.StringVar(&s.Socket, "socket", "", "Unix socket `PATH` to answer on")
	f.StringArrayVar(&s.flags.runtimes, "runtime", nil, "`DIR` with ONNX Runtime and execution providers, as pip --target or a virtual environment leaves it; repeatable")
	f.StringVar(&s.config, "config", "", "configuration `FILE` (TOML)")
	f.Var(&s.LogLevel, "log-level", "least `LEVEL` that is logged: debug, info, warn or error")
}

// load reads the configuration file under the flags that were given, and fills in the defaults.
func (s *settings) load(given *pflag.FlagSet) error {
	file := settings{}
	if s.config != "" {
		if err := readConfig(s.config, &file); err != nil {
			return usageError{fmt.Errorf("configuration %s%w", s.config, err)}
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
// The error is to be put behind the file's name, with no space between.
func readConfig(path string, to *settings) error {
	f, err := os.Open(path)
	var e *fs.PathError
	if errors.As(err, &e) {
		return fmt.Errorf(": %w", e.Err)
	}
	if err != nil {
		return fmt.Errorf(": %w", err)
	}
	defer f.Close()
	err = toml.NewDecoder(f).DisallowUnknownFields().Decode(to)
	var wrong *toml.DecodeError
	var unknown *toml.StrictMissingError
	switch {
	case errors.As(err, &unknown):
		return errors.New(unknownFields(unknown))
	case errors.As(err, &wrong):
		return errors.New(wrongField(wrong))
	case err != nil:
		return fmt.Errorf(": %w", err)
	}
	if err := to.check(); err != nil {
		return fmt.Errorf(": %w", err)
	}
	return nil
}

// check finds what is wrong with values that TOML cannot know about.
func (s *settings) check() error {
	if s.Limits.WallSeconds < 0 {
		return fmt.Errorf("field \"limits.wall_seconds\": %v is less than nothing", s.Limits.WallSeconds)
	}
	for i, rt := range s.Runtimes {
		if (rt.Directory == "") == (rt.ORTLibrary == "") {
			return fmt.Errorf("runtime %d: give either directory, or ort_library and ep_libraries", i+1)
		}
	}
	return nil
}

// unknownFields names each with its place; the file's name goes before.
func unknownFields(err *toml.StrictMissingError) string {
	var all []string
	for _, e := range err.Errors {
		row, col := e.Position()
		all = append(all, fmt.Sprintf(":%d:%d: unknown field %q", row, col, joinKey(e.Key())))
	}
	return strings.Join(all, "; ")
}

// wrongField says what is wrong where, without the names that the fields have in this program.
func wrongField(err *toml.DecodeError) string {
	row, col := err.Position()
	text, _, _ := strings.Cut(strings.TrimPrefix(err.Error(), "toml: "), " into struct field ")
	if key := joinKey(err.Key()); key != "" {
		text = fmt.Sprintf("field %q: %s", key, text)
	}
	return fmt.Sprintf(":%d:%d: %s", row, col, text)
}

func joinKey(k toml.Key) string { return strings.Join(k, ".") }

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
		Memory: int64(s.Limits.MemoryBytes), Output: int64(s.Limits.OutputBytes),
	}
}
