package config

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/tomlfile"
	"github.com/epcached/epcached/unixsock"
)

// DefaultFile is the configuration file of the systemd service.
const DefaultFile = "/etc/epcached/epcached.toml"

// Settings is the daemon's configuration, in the order of doc/configuration.md. Paths are absolute.
type Settings struct {
	File string // the file that was read; "": none

	// State directory, and path of the Unix socket.
	State    string `toml:"state" is:"path"`
	Socket   string `toml:"socket" is:"path"`
	LogLevel string `toml:"log_level" in:"debug,info,warn,error"`
	// Path of epcached-ort; "": beside epcached.
	Worker string `toml:"worker" is:"path"`
	// "name" or "uid", either with ":group"; "": the daemon's own.
	WorkerUser string `toml:"worker_user" is:"user"`
	// Socket of the systemd unit that starts workers; "": they are the daemon's children.
	WorkerSocket string `toml:"worker_socket" is:"path"`
	// Compiles at the same time; 0: one per processor.
	Jobs uint64 `toml:"jobs" range:"0 4096"`
	// Bytes of memory for all compiles together; 0: half of the machine's memory.
	JobsMemory uint64 `toml:"jobs_memory_bytes" range:"0"`
	// Every local user may open shared builds by path.
	PathAccess     bool     `toml:"path_access"`
	Administrators []uint32 `toml:"administrators" range:"0 4294967294"`
	Publishers     []uint32 `toml:"publishers" range:"0 4294967294"`
	// Files with the public keys that sign trusted imports.
	Trust []string `toml:"trust" is:"file"`
	// For builds of other machines, when no trust document is in effect.
	OnExpired string `toml:"on_expired" in:"refuse,warn"`
	// Socket of the systemd unit that starts epcached-remote; "": it is the daemon's child.
	RemoteSocket string `toml:"remote_socket" is:"path"`
	// File with the private key that signs published builds.
	SigningKey string `toml:"signing_key" is:"file"`
	// "EP/option", "session/key".
	AllowOptions []string `toml:"allow_options" is:"option"`
	// Files or directories of rules, over the shipped ones.
	Rules []string `toml:"rules" is:"path"`
	// Seconds.
	Quiet      float64 `toml:"quiet_seconds" range:"0.01 3600"`
	Poll       float64 `toml:"poll_seconds" range:"0.1 86400"`
	KeepSource string  `toml:"keep_source" in:"reference,copy,none"`
	// Clients may start the user's own daemon.
	Autostart bool `toml:"autostart"`
	// As ParseDuration reads it; "": as for IdleAfter.
	IdleExit  string     `toml:"idle_exit" is:"duration"`
	Runtimes  []Runtime  `toml:"runtime"`
	Layers    []Layer    `toml:"layer"`
	Limits    Limits     `toml:"limits"`
	Sandbox   Sandbox    `toml:"sandbox"`
	Claims    Claims     `toml:"claims"`
	Drivers   []Driver   `toml:"driver"`
	Compilers []Compiler `toml:"compiler"`
	Policies  Policies   `toml:"policy"`
	Rebuild   Rebuild    `toml:"rebuild"`
	Failures  Failures   `toml:"failures"`
	Space     Space      `toml:"space"`
	// By name.
	Remotes Remotes `toml:"remote"`

	fields   []field
	warnings Errors
}

// Runtime is one [[runtime]]: a directory, or the libraries one by one.
type Runtime struct {
	Directory  string `toml:"directory" is:"path"`
	ORTLibrary string `toml:"ort_library" is:"path"`
	// By execution provider.
	EPLibraries map[string]string `toml:"ep_libraries" is:"path"`
}

// Layer is one [[layer]]: a read-only store below the daemon's own.
type Layer struct {
	Path  string     `toml:"path" is:"path" required:"no layer named: give path"`
	Trust LayerTrust `toml:"trust"`
}

// LayerTrust lists files with keys, of which one must have signed a build. If it is empty ("owner"
// in the file), builds that root or the daemon's user wrote are trusted.
type LayerTrust []string

// Decode implements tomlfile.Decoder.
func (t *LayerTrust) Decode(v tomlfile.Value) {
	if v.Raw == "owner" || v.Raw == nil {
		return
	}
	if _, is := v.Raw.(string); is {
		*t = LayerTrust{v.Text("file")}
		return
	}
	for _, one := range v.Elements() {
		*t = append(*t, one.Text("file"))
	}
	if len(*t) == 0 {
		v.Errorf("it must be \"owner\", or files of public keys")
	}
}

// Limits bound one compile.
type Limits struct {
	WallSeconds float64 `toml:"wall_seconds" range:"0 31536000"`
	CPUSeconds  float64 `toml:"cpu_seconds" range:"0 31536000"`
	Verify      float64 `toml:"verify_seconds" range:"0 31536000"`
	MemoryBytes uint64  `toml:"memory_bytes" range:"0"`
	OutputBytes uint64  `toml:"output_bytes" range:"0"`
	OutputFiles uint64  `toml:"output_files" range:"0 1048576"`
	OpenFiles   uint64  `toml:"open_files" range:"0 1073741824"`
	Processes   uint64  `toml:"processes" range:"0 4194304"`
	StackBytes  uint64  `toml:"stack_bytes" range:"0 1099511627776"`
	Nice        uint64  `toml:"nice" range:"0 19"`
}

// Sandbox gives workers more access.
type Sandbox struct {
	Network    bool     `toml:"network"`
	Read       []string `toml:"read" is:"path"`  // directories and files
	Write      []string `toml:"write" is:"path"` // directories and device files
	Namespaces bool     `toml:"namespaces"`      // workers get a pid namespace of their own
}

// Driver says where to read the version of a driver that an execution provider does not report:
// from one of File, Module and Command.
type Driver struct {
	EP      string   `toml:"ep" is:"ep"`         // "": for all that do not report it
	File    string   `toml:"file" is:"path"`     // its first line
	Module  string   `toml:"module" is:"module"` // /sys/module/MODULE/version
	Command []string `toml:"command"`            // the first line of its output
}

// Compiler is one [[compiler]]: a vendor's own, for an execution provider. Its fields are those of
// compilers.Tool.
type Compiler struct {
	EP      string   `toml:"ep" is:"ep" required:"no execution provider named: give ep"`
	Command []string `toml:"command"`         // the program and its arguments, with placeholders
	Version []string `toml:"version"`         // arguments that make it print its version
	Files   []string `toml:"files" is:"path"` // more files that identify it
	Read    []string `toml:"read" is:"path"`  // more paths that it may read
	Device  string   `toml:"device" in:"CPU,GPU,NPU"`
	Alone   bool     `toml:"without_library"` // also for runtimes without the provider's library
}

// Policies has policies by execution provider, "" for all others.
type Policies map[string]Policy

// Policy decides how builds are used, by their verdict on this machine.
type Policy struct {
	Unknown             string `toml:"unknown" in:"load_check,serve,refuse"`
	PreferRecompilation string `toml:"prefer_recompilation" in:"serve_and_refresh,serve,refuse"`
	Unsupported         string `toml:"unsupported" in:"recompile,fail"`
	// As ParseDuration reads it; "": no limit.
	MaxAge string `toml:"max_age" is:"duration"`
	// Builds that compile faster are not stored.
	MinCompileSeconds float64 `toml:"min_compile_seconds" range:"0 31536000"`
	MeasureGain       bool    `toml:"measure_gain"`
}

// Age is MaxAge as a duration; 0: no limit.
func (p Policy) Age() time.Duration { return Duration(p.MaxAge) }

// AutostartIdleExit is how long a daemon that a client started stays without use by default.
const AutostartIdleExit = 15 * time.Minute

// IdleAfter returns the time without use after which the daemon ends, 0 for never. started says
// that a client started it.
func (s *Settings) IdleAfter(started bool) time.Duration {
	if s.IdleExit == "" && started {
		return AutostartIdleExit
	}
	return Duration(s.IdleExit)
}

// Claims bound the artefacts that applications compile themselves.
type Claims struct {
	DeadlineSeconds float64 `toml:"deadline_seconds" range:"1 604800"`
	Bytes           uint64  `toml:"bytes" range:"1"`      // of one compiled model
	UserBytes       uint64  `toml:"user_bytes" range:"1"` // of all builds that one user has put
	Open            uint64  `toml:"open" range:"1 1024"`  // of one user at the same time
}

// Rebuild bounds background recompiles.
type Rebuild struct {
	Enabled bool   `toml:"enabled"`
	Jobs    uint64 `toml:"jobs" range:"1 4096"`
	// processor seconds in each second, for each job
	CPUShare float64 `toml:"cpu_share" range:"0.01 1"`
	Window   string  `toml:"window" is:"window"` // "22:00-06:00" in local time; "": always
}

// Failures says how long failed compiles are remembered. ParseDuration reads the durations.
type Failures struct {
	Remember bool `toml:"remember"`
	// After the first crash; doubled by each further one.
	Crash string `toml:"crash" is:"pause"`
	// The same after a limit was reached.
	Limit   string `toml:"limit" is:"pause"`
	Longest string `toml:"longest" is:"pause"` // bound of the doubling
	// For models that the execution provider refuses, or takes no node of.
	Refused string `toml:"refused" is:"pause"`
}

// Space bounds the store, and says when builds are packed and where they are unpacked. ParseAmount
// reads the amounts, ParseDuration the durations; "" and 0: no bound.
type Space struct {
	Budget    string `toml:"budget" is:"budget"`    // on disk
	FreeFloor string `toml:"free_floor" is:"floor"` // free space to keep on the file system
	// builds that were not used for so long are evicted
	MaxUnused  string `toml:"max_unused" is:"age"`
	MaxEntries uint64 `toml:"max_entries" range:"0"`
	UserBytes  string `toml:"user_bytes" is:"budget"` // of all builds that one user requested
	// UserShare is the part of the budget for an ordinary user's builds and pins.
	UserShare string `toml:"user_share" is:"budget"`

	Pack string `toml:"pack" in:"cold,always,off"`
	// Time without use after which a build is cold.
	PackAfter string `toml:"pack_after" is:"pause"`
	// Period in which all stored bytes are verified once.
	VerifyEvery string `toml:"verify_every" is:"age"`
	UnpackedDir string `toml:"unpacked_dir" is:"path"` // "": in the state directory
}

// Remotes has the remotes by name.
type Remotes map[string]Remote

// Remote is one [remote.NAME]: a store of builds that machines share.
type Remote struct {
	URL      string   `toml:"url" is:"some" required:"no url given"`
	Endpoint string   `toml:"endpoint"`        // of s3:// and oci://
	Region   string   `toml:"region"`          // of s3://
	Trust    []string `toml:"trust" is:"file"` // files with the trusted public keys
	Publish  string   `toml:"publish" in:"never,shared"`
	Ask      string   `toml:"ask" in:"always,never"`
	// How long a request waits for a connection, and how much time it may lose to the remote in
	// all.
	Connect    string `toml:"connect" is:"duration"`
	LoseAtMost string `toml:"lose_at_most" is:"duration"`
	// Rate is bytes per second of background transfers; "": no bound.
	Rate  string `toml:"rate" is:"budget"`
	Lease bool   `toml:"lease"` // one machine of a fleet compiles for all
}

// Defaults are the settings of an empty file.
func Defaults() *Settings {
	state, socket := defaultFiles()
	return &Settings{
		State: state, Socket: socket, LogLevel: "info",
		Limits: Limits{
			WallSeconds: compilers.DefaultLimits.Wall.Seconds(),
			CPUSeconds:  compilers.DefaultLimits.CPU.Seconds(),
			Verify:      compilers.DefaultLimits.Verify.Seconds(),
			OutputBytes: uint64(compilers.DefaultLimits.Output),
			OutputFiles: uint64(compilers.DefaultLimits.Files),
			OpenFiles:   uint64(compilers.DefaultLimits.OpenFiles),
			Processes:   uint64(compilers.DefaultLimits.Processes),
			StackBytes:  uint64(compilers.DefaultLimits.Stack),
			Nice:        uint64(compilers.DefaultLimits.Nice),
		},
		Sandbox: Sandbox{Namespaces: true},
		Claims:  Claims{DeadlineSeconds: 1800, Bytes: 64 << 30, UserBytes: 256 << 30, Open: 16},
		Quiet:   1, Poll: 2, KeepSource: "reference", Autostart: true,
		OnExpired: "refuse",
		Policies: Policies{"": {Unknown: "load_check", PreferRecompilation: "serve_and_refresh",
			Unsupported: "recompile", MeasureGain: true}},
		Rebuild:  Rebuild{Enabled: true, Jobs: 1, CPUShare: 0.5},
		Failures: Failures{Remember: true, Crash: "1m", Limit: "10m", Longest: "1d", Refused: "1d"},
		Space: Space{Budget: "20%", FreeFloor: "2%", UserShare: "25%", Pack: "cold",
			PackAfter: "2h", VerifyEvery: "30d"},
	}
}

// Load reads a file over the defaults; "" reads none. The error is an Errors if the content is
// invalid.
func Load(file string) (*Settings, error) {
	d, err := tomlfile.Read(file)
	if err != nil {
		return nil, err
	}
	s := Defaults()
	s.File = file
	s.decode(d)
	if err := d.Err(); err != nil {
		return nil, err
	}
	s.warnings = d.Warnings
	s.warnings.Sort()
	return s, nil
}

func (s *Settings) decode(d *tomlfile.Document) {
	d.Checks, d.Removed = checks, removedKeys
	d.Note = func(v tomlfile.Value, show func() any) {
		origin := fromDefault
		switch {
		case v.Raw != nil:
			origin = fmt.Sprintf("%s:%d", d.File, v.Position().Line)
		case len(v.Path) == 3 && v.Path[0] == "policy": // of one execution provider
			origin = "policy." + v.Path[2]
		}
		s.fields = append(s.fields, field{v.Path, origin, v.Position(), show})
	}
	d.Root().Into(s)
}

// Level converts the log level for log/slog.
func (s *Settings) Level() slog.Level {
	var level slog.Level
	_ = level.UnmarshalText([]byte(s.LogLevel)) // cannot fail: the value was checked
	return level
}

// The mistakes of a file and their places: see package tomlfile.
type (
	Position = tomlfile.Position
	Error    = tomlfile.Error
	Errors   = tomlfile.Errors
)

// removedKeys has the fields of earlier versions, with the reason and the replacement; "*" stands
// for the tables around a field. They are accepted with a warning, so that the daemon starts after
// an upgrade.
var removedKeys = map[string]string{
	"space.compress_after": "packing now compresses a build's own bytes if that saves an eighth",
	"standby_seconds":      "a worker now starts with its compile",
	"threshold":            oneSignature,
	"report_quorum":        loadedOnReport,
	"trusted_reporters":    loadedOnReport,
	"*.threshold":          oneSignature, // of a remote
}

const loadedOnReport = "a report leads to a load of the build; to withhold a build from all " +
	"users without one, use epcachectl invalidate"

const oneSignature = "one signature counts; limit what a key may sign with the lines EPs, " +
	"Builders, Requests and Not-After in its file of trust"

// checkThreshold refuses a table in which several keys had to sign, because a build that only one
// of them signed would be accepted otherwise.
func checkThreshold(table tomlfile.Value) {
	v := table.In("threshold")
	if n, is := v.Raw.(int64); is && n > 1 {
		v.Errorf("%d signatures are not supported any more: %s; then remove this line", n,
			oneSignature)
	}
}

// Warnings returns the fields that have no effect any more, in the order of the file.
func (s *Settings) Warnings() Errors { return s.warnings }

// LoadRules reads the rules that the settings name, over the shipped ones. The error has file, line
// and column of all mistakes.
func (s *Settings) LoadRules() (*rules.Set, error) {
	if len(s.Rules) == 0 {
		return rules.Shipped(), nil
	}
	own, err := rules.Load(s.Rules...)
	if err != nil {
		return nil, fmt.Errorf("field \"rules\": %w", err)
	}
	return own.Overriding(rules.Shipped()), nil
}

// CheckUnpackedDir fails if unpacked_dir is set but is no directory in which this user can make the
// daemon's own, because the daemon would not start then. The error is an Errors.
func (s *Settings) CheckUnpackedDir() error {
	dir := s.Space.UnpackedDir
	if dir == "" {
		return nil
	}
	const field = "space.unpacked_dir"
	text := ""
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		text = fmt.Sprintf("directory %q does not exist: create it, or name another one", dir)
	case err != nil:
		text = fmt.Sprintf("%q: %v", dir, tomlfile.WithoutPath(err))
	case !info.IsDir():
		text = fmt.Sprintf("%q is not a directory", dir)
	default:
		if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
			text = fmt.Sprintf("user %d may not write to %q: %v; run the check as the daemon's "+
				"user", os.Getuid(), dir, tomlfile.WithoutPath(err))
		}
	}
	if text == "" {
		return nil
	}
	var at Position // none if a flag sets it
	for _, f := range s.fields {
		if tomlfile.Spell(f.path) == field {
			at = f.at
		}
	}
	return Errors{{File: s.File, Position: at, Field: field, Text: text}}
}

// defaultFiles returns the state and the socket, "" for a user without a home.
func defaultFiles() (state, socket string) {
	if os.Geteuid() == 0 {
		return "/var/lib/epcached", unixsock.SystemSocket
	}
	return unixsock.UserState(), unixsock.UserSocket()
}

// UserFile returns the path of the user's configuration for a daemon that clients start, "" without
// a home.
func UserFile() string {
	dir, err := os.UserConfigDir()
	if err != nil || !filepath.IsAbs(dir) {
		return ""
	}
	return filepath.Join(dir, "epcached", "epcached.toml")
}

// LoadUserFile loads the configuration of the daemon that clients start from a file, or with ""
// from the user's own, with the user's own paths as defaults. If the user has no file it returns
// the defaults, with File set.
func LoadUserFile(file string) (*Settings, error) {
	read := file
	if file == "" {
		file = UserFile()
		if _, err := os.Stat(file); err == nil {
			read = file
		}
	}
	s, err := Load(read)
	if err != nil {
		return nil, err
	}
	s.File = file
	// In place of the defaults, which for root are those of the system's daemon.
	state, socket := defaultFiles()
	if s.State == state {
		s.State = unixsock.UserState()
	}
	if s.Socket == socket {
		s.Socket = unixsock.UserSocket()
	}
	return s, nil
}
