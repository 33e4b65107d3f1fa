package config

import (
	"log/slog"
	"math"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/tomlfile"
)

// DefaultFile is where the service's unit has the configuration.
const DefaultFile = "/etc/epcached/epcached.toml"

// Settings are what the daemon runs with. Paths are absolute.
type Settings struct {
	File string // that was read; "": none

	State          string   // state directory
	Socket         string   // path of the Unix socket
	LogLevel       string   // "debug", "info", "warn", "error"
	Worker         string   // path of epcached-ort; "": beside epcached
	WorkerUser     string   // "name", "uid", either with ":group"; "": the daemon's own
	Jobs           uint64   // compiles at the same time; 0: one per processor
	JobsMemory     uint64   // bytes that compiles may take together; 0: half of the machine's memory
	PathAccess     bool     // shared models may be opened by path by every local user
	Administrators []uint32 // user ids
	AllowOptions   []string // "EP/option", "session/key"
	Runtimes       []Runtime
	Publishers     []uint32 // user ids
	Claims         Claims
	Limits         Limits
	Sandbox        Sandbox

	Rules            []string // files or folders of rules, over the shipped ones
	Quiet, Poll      float64  // seconds
	KeepSource       string   // "reference", "copy", "none"
	TrustedReporters []uint32 // user ids
	ReportQuorum     uint64
	Autostart        bool   // clients may start the user's own daemon
	IdleExit         string // as ParseDuration reads it; "": as for IdleAfter
	Drivers          []Driver
	Compilers        []Compiler
	Policies         map[string]Policy // by execution provider, "" for all others
	Rebuild          Rebuild
	Failures         Failures
	Space            Space

	fields   []field
	warnings Errors
}

// Runtime is one [[runtime]]: a directory, or the libraries one by one.
type Runtime struct {
	Directory   string
	ORTLibrary  string
	EPLibraries map[string]string // by execution provider
}

// Limits bound one compile.
type Limits struct {
	WallSeconds float64
	CPUSeconds  float64
	MemoryBytes uint64
	OutputBytes uint64
	OutputFiles uint64
	OpenFiles   uint64
	Processes   uint64
	StackBytes  uint64
	Nice        uint64
}

// Sandbox says what workers may do besides what they must.
type Sandbox struct {
	Network    bool
	Read       []string // folders and files
	Write      []string // folders and device files
	Namespaces bool     // workers get a pid namespace of their own
}

// Driver says where the version of a driver is read that an execution provider does not tell: one of File, Module and Command.
type Driver struct {
	EP      string   // "": for all that do not tell it
	File    string   // its first line
	Module  string   // /sys/module/MODULE/version
	Command []string // the first line of what it prints
}

// Compiler is one [[compiler]]: a vendor's own, for an execution provider. Its fields are those of compilers.Tool.
type Compiler struct {
	EP      string
	Command []string // the program and its arguments, with placeholders
	Version []string // arguments that make it print its version
	Files   []string // further files that make it what it is
	Read    []string // what it may read besides
	Device  string   // "CPU", "GPU", "NPU"
	Alone   bool     // also for runtimes without the provider's library
}

// Policy says what is done with builds, by what they are good for on this machine.
type Policy struct {
	Unknown             string  // "load_check", "serve", "refuse"
	PreferRecompilation string  // "serve_and_refresh", "serve", "refuse"
	Unsupported         string  // "recompile", "fail"
	MaxAge              string  // as ParseDuration reads it; "": no limit
	MinCompileSeconds   float64 // what compiles faster is not kept
	MeasureGain         bool
}

// Age is MaxAge as a duration; 0: no limit.
func (p Policy) Age() time.Duration {
	d, err := ParseDuration(p.MaxAge)
	if err != nil {
		return 0 // empty: what is wrong was refused when it was read
	}
	return d
}

// AutostartedIdle is how long a daemon that a client started waits for the next one, where nothing else is said.
const AutostartedIdle = 15 * time.Minute

// IdleAfter is the time without use after which the daemon leaves; 0: never. started says that a client started it.
func (s *Settings) IdleAfter(started bool) time.Duration {
	if s.IdleExit == "" && started {
		return AutostartedIdle
	}
	if s.IdleExit == "" {
		return 0
	}
	d, err := ParseDuration(s.IdleExit)
	if err != nil {
		return 0 // what is wrong was refused when it was read
	}
	return d
}

// Claims bound what applications compile themselves, with libraries of their own.
type Claims struct {
	DeadlineSeconds float64
	Bytes           uint64 // of one compiled model
	UserBytes       uint64 // of all that one user has put
	Open            uint64 // of one user at the same time
}

// Rebuild bounds the compiles that nobody waits for.
type Rebuild struct {
	Enabled  bool
	Jobs     uint64
	CPUShare float64 // processor seconds in each second, for each job
	Window   string  // "22:00-06:00" in local time; "": always
}

// Failures says how long compiles that failed are answered from memory. The durations are as ParseDuration reads them.
type Failures struct {
	Remember bool
	Crash    string // after the first crash, doubled with each further one
	Limit    string // after the first time that a limit was reached, likewise
	Longest  string // of what doubles
	Refused  string // of what the execution provider refuses, or makes no use of
}

// Space bounds what is kept, and says when builds are packed and where they are unpacked. Amounts are as ParseAmount reads them, durations as
// ParseDuration does; "" and 0: no bound.
type Space struct {
	Budget     string // on disk
	FreeFloor  string // that stays free on the file system
	MaxUnused  string // builds that were not used for so long go
	MaxEntries uint64
	UserBytes  string // of all builds that one user asked for

	Pack        string // "cold", "always", "off"
	PackAfter   string // time without use after which a build is cold, as ParseDuration reads it
	UnpackedDir string // "": in the state directory
}

// Defaults are the settings of an empty file.
func Defaults() *Settings {
	return &Settings{
		State: defaultState(), Socket: defaultSocket(), LogLevel: "info",
		Limits: Limits{
			WallSeconds: compilers.DefaultLimits.Wall.Seconds(),
			CPUSeconds:  compilers.DefaultLimits.CPU.Seconds(),
			MemoryBytes: uint64(compilers.DefaultLimits.Memory), OutputBytes: uint64(compilers.DefaultLimits.Output),
			OutputFiles: uint64(compilers.DefaultLimits.Files), OpenFiles: uint64(compilers.DefaultLimits.OpenFiles),
			Processes: uint64(compilers.DefaultLimits.Processes), StackBytes: uint64(compilers.DefaultLimits.Stack),
			Nice: uint64(compilers.DefaultLimits.Nice),
		},
		Sandbox: Sandbox{Namespaces: true},
		Claims:  Claims{DeadlineSeconds: 1800, Bytes: 64 << 30, UserBytes: 256 << 30, Open: 16},
		Quiet:   1, Poll: 2, KeepSource: "reference", ReportQuorum: 3, Autostart: true,
		Policies: map[string]Policy{"": {Unknown: "load_check", PreferRecompilation: "serve_and_refresh", Unsupported: "recompile", MeasureGain: true}},
		Rebuild:  Rebuild{Enabled: true, Jobs: 1, CPUShare: 0.5},
		Failures: Failures{Remember: true, Crash: "1m", Limit: "10m", Longest: "1d", Refused: "1d"},
		Space:    Space{Budget: "20%", FreeFloor: "2%", Pack: "cold", PackAfter: "2h"},
	}
}

// Load reads a file over the defaults; "" reads none. The error is an Errors where the file's content is what is wrong.
func Load(file string) (*Settings, error) {
	d, err := tomlfile.Read(file)
	if err != nil {
		return nil, err
	}
	s := Defaults()
	s.File = file
	s.read(s.root(d))
	if err := d.Err(); err != nil {
		return nil, err
	}
	s.warnings.Sort()
	return s, nil
}

func (s *Settings) read(t *table) {
	t.file("state", &s.State)
	t.file("socket", &s.Socket)
	t.choice("log_level", &s.LogLevel, "debug", "info", "warn", "error")
	t.file("worker", &s.Worker)
	t.text("worker_user", &s.WorkerUser, checkUser)
	t.count("jobs", &s.Jobs, 0, 4096)
	t.count("jobs_memory_bytes", &s.JobsMemory, 0, math.MaxInt64)
	t.truth("path_access", &s.PathAccess)
	t.users("administrators", &s.Administrators)
	t.users("publishers", &s.Publishers)
	t.texts("allow_options", &s.AllowOptions, checkOption)
	t.files("rules", &s.Rules)
	t.number("quiet_seconds", &s.Quiet, 0.01, 3600)
	t.number("poll_seconds", &s.Poll, 0.1, 86400)
	t.choice("keep_source", &s.KeepSource, "reference", "copy", "none")
	t.users("trusted_reporters", &s.TrustedReporters)
	t.count("report_quorum", &s.ReportQuorum, 1, 1<<20)
	t.truth("autostart", &s.Autostart)
	t.text("idle_exit", &s.IdleExit, checkDuration)
	runtimes := t.tables("runtime")
	s.Runtimes = make([]Runtime, len(runtimes))
	for i := range runtimes {
		s.Runtimes[i].read(runtimes[i])
	}
	s.Limits.read(t.table("limits"))
	s.Sandbox.read(t.table("sandbox"))
	s.Claims.read(t.table("claims"))
	drivers := t.tables("driver")
	s.Drivers = make([]Driver, len(drivers))
	for i := range drivers {
		s.Drivers[i].read(drivers[i])
	}
	tools := t.tables("compiler")
	s.Compilers = make([]Compiler, len(tools))
	for i := range tools {
		s.Compilers[i].read(tools[i])
	}
	s.oneEach(t)
	s.readPolicies(t.table("policy"))
	s.Rebuild.read(t.table("rebuild"))
	s.Failures.read(t.table("failures"))
	s.Space.read(t.table("space"))
	t.done()
}

func (l *Limits) read(t *table) {
	t.number("wall_seconds", &l.WallSeconds, 0, 365*86400)
	t.number("cpu_seconds", &l.CPUSeconds, 0, 365*86400)
	t.count("memory_bytes", &l.MemoryBytes, 0, math.MaxInt64)
	t.count("output_bytes", &l.OutputBytes, 0, math.MaxInt64)
	t.count("output_files", &l.OutputFiles, 0, 1<<20)
	t.count("open_files", &l.OpenFiles, 0, 1<<30)
	t.count("processes", &l.Processes, 0, 1<<22)
	t.count("stack_bytes", &l.StackBytes, 0, 1<<40)
	t.count("nice", &l.Nice, 0, 19)
	t.done()
}

func (x *Sandbox) read(t *table) {
	t.truth("network", &x.Network)
	t.files("read", &x.Read)
	t.files("write", &x.Write)
	t.truth("namespaces", &x.Namespaces)
	t.done()
}

func (c *Claims) read(t *table) {
	t.number("deadline_seconds", &c.DeadlineSeconds, 1, 7*86400)
	t.count("bytes", &c.Bytes, 1, math.MaxInt64)
	t.count("user_bytes", &c.UserBytes, 1, math.MaxInt64)
	t.count("open", &c.Open, 1, 1<<10)
	t.done()
}

func (r *Rebuild) read(t *table) {
	t.truth("enabled", &r.Enabled)
	t.count("jobs", &r.Jobs, 1, 4096)
	t.number("cpu_share", &r.CPUShare, 0.01, 1)
	t.text("window", &r.Window, checkWindow)
	t.done()
}

func (f *Failures) read(t *table) {
	t.truth("remember", &f.Remember)
	t.text("crash", &f.Crash, checkPause)
	t.text("limit", &f.Limit, checkPause)
	t.text("longest", &f.Longest, checkPause)
	t.text("refused", &f.Refused, checkPause)
	t.done()
}

func (x *Space) read(t *table) {
	t.text("budget", &x.Budget, checkBudget)
	t.text("free_floor", &x.FreeFloor, checkFloor)
	t.text("max_unused", &x.MaxUnused, checkUnused)
	t.count("max_entries", &x.MaxEntries, 0, math.MaxInt64)
	t.text("user_bytes", &x.UserBytes, checkBudget)
	t.choice("pack", &x.Pack, "cold", "always", "off")
	t.text("pack_after", &x.PackAfter, checkPause)
	t.file("unpacked_dir", &x.UnpackedDir)
	t.done()
}

// Level is the log level in log/slog's terms.
func (s *Settings) Level() slog.Level {
	var level slog.Level
	if err := level.UnmarshalText([]byte(s.LogLevel)); err != nil {
		return slog.LevelInfo // only a word that was refused already
	}
	return level
}
