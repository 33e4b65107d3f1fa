package config

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

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
	// Socket of the systemd unit that starts workers, from a flag; "": they are the daemon's
	// children.
	WorkerSocket string
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
	// File with the private key that signs published builds.
	SigningKey string `toml:"signing_key" is:"file"`
	// "EP/option", "session/key".
	AllowOptions []string `toml:"allow_options" is:"option"`
	// Files or directories of rules, over the shipped ones.
	Rules      []string `toml:"rules" is:"path"`
	KeepSource string   `toml:"keep_source" in:"reference,copy,none"`
	// Clients may start the user's own daemon.
	Autostart bool `toml:"autostart"`
	// As ParseDuration reads it; "": as for IdleAfter.
	IdleExit  string     `toml:"idle_exit" is:"duration"`
	Runtimes  []Runtime  `toml:"runtime"`
	Layers    []Layer    `toml:"layer"`
	Limits    Limits     `toml:"limits"`
	Sandbox   Sandbox    `toml:"sandbox"`
	Drivers   []Driver   `toml:"driver"`
	Compilers []Compiler `toml:"compiler"`
	Policies  Policies   `toml:"policy"`
	Rebuild   Rebuild    `toml:"rebuild"`
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
	Wall        string `toml:"wall" is:"pause"`
	MemoryBytes uint64 `toml:"memory_bytes" range:"0"`
	OutputBytes uint64 `toml:"output_bytes" range:"0"`
}

// Sandbox gives workers more access.
type Sandbox struct {
	Network bool     `toml:"network"`
	Read    []string `toml:"read" is:"path"`  // directories and files
	Write   []string `toml:"write" is:"path"` // directories and device files
}

// Driver says where to read the version of a driver that an execution provider does not report:
// from File or Command.
type Driver struct {
	EP      string   `toml:"ep" is:"ep"`     // "": for all that do not report it
	File    string   `toml:"file" is:"path"` // its first line
	Command []string `toml:"command"`        // the first line of its output
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
	MaxAge      string `toml:"max_age" is:"duration"`
	MeasureGain bool   `toml:"measure_gain"`
}

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

// Rebuild bounds background recompiles.
type Rebuild struct {
	Enabled bool   `toml:"enabled"`
	Window  string `toml:"window" is:"window"` // "22:00-06:00" in local time; "": always
}

// Space bounds the store, and says when builds are packed. ParseAmount reads the amounts,
// ParseDuration the durations; "": no bound.
type Space struct {
	Budget    string `toml:"budget" is:"budget"`    // on disk
	FreeFloor string `toml:"free_floor" is:"floor"` // free space to keep on the file system
	// builds that were not used for so long are evicted
	MaxUnused string `toml:"max_unused" is:"age"`
	// UserShare is the part of the budget for an ordinary user's builds and pins.
	UserShare string `toml:"user_share" is:"budget"`

	Pack string `toml:"pack" in:"cold,always,off"`
	// Time without use after which a build is cold.
	PackAfter string `toml:"pack_after" is:"pause"`
	// Period in which all stored bytes are verified once.
	VerifyEvery string `toml:"verify_every" is:"age"`
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
	// Rate is bytes per second of background transfers; "": no bound.
	Rate  string `toml:"rate" is:"budget"`
	Lease bool   `toml:"lease"` // one machine of a fleet compiles for all
}

// Defaults are the settings of an empty file.
func Defaults() *Settings {
	state, socket := defaultFiles()
	return &Settings{
		State: state, Socket: socket, LogLevel: "info",
		Limits:     Limits{Wall: "30m", OutputBytes: uint64(compilers.DefaultLimits.Output)},
		KeepSource: "reference", Autostart: true,
		Policies: Policies{"": {Unknown: "load_check", PreferRecompilation: "serve_and_refresh",
			Unsupported: "recompile", MeasureGain: true}},
		Rebuild: Rebuild{Enabled: true},
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
	replaced(d.Root())
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
