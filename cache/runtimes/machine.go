package runtimes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/compilers"
)

// MachineID stands for what a device list and a fingerprint depend on besides the libraries:
// processor, devices and drivers.
type MachineID [32]byte

// Machine is the processor with its devices and drivers, as they were last looked at.
type Machine struct {
	current atomic.Pointer[MachineID] // nil before the first look
	looked  chan struct{}             // closed by the first look

	looking sync.Mutex // held for a whole look; taken before mu

	mu      sync.Mutex
	drivers []driver // replaced as a whole; guarded by mu
}

// DriverSource says where the version of an execution provider's driver can be read when its
// devices do not say it. One of File, Module and Command is set.
type DriverSource struct {
	EP      string   // "" for all
	File    string   // its first line is the version
	Module  string   // a kernel module: /sys/module/MODULE/version
	Command []string // what it prints on its first line is the version
}

// driver is a source of a driver's version as it was last read.
type driver struct {
	DriverSource
	version string // "" where there is none
	err     error  // why it could not be read at the last look
}

// NewMachine returns a machine that was not looked at. ID and Driver block until Refresh returns.
func NewMachine(sources []DriverSource) *Machine {
	m := &Machine{looked: make(chan struct{})}
	m.SetSources(sources)
	return m
}

// AwaitFirst blocks until the first look ends: a command that prints a version may be slow.
func (m *Machine) AwaitFirst(ctx context.Context) error {
	select {
	case <-m.looked:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ID returns the identity that the last look found, and blocks until the first one ends.
func (m *Machine) ID() MachineID {
	if known := m.current.Load(); known != nil {
		return *known
	}
	<-m.looked
	return *m.current.Load()
}

// SetSources has drivers read elsewhere from the next look on, and reports whether it is new.
func (m *Machine) SetSources(sources []DriverSource) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.EqualFunc(m.drivers, sources, driver.isOf) {
		return false
	}
	drivers := make([]driver, len(sources))
	for i, s := range sources {
		drivers[i].DriverSource = s
		if old := slices.IndexFunc(m.drivers, func(d driver) bool { return d.isOf(s) }); old >= 0 {
			drivers[i] = m.drivers[old]
		}
	}
	m.drivers = drivers
	return true
}

func (d driver) isOf(s DriverSource) bool {
	return d.EP == s.EP && d.File == s.File && d.Module == s.Module &&
		slices.Equal(d.Command, s.Command)
}

func (m *Machine) knownDrivers() []driver {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.drivers
}

// Refresh reads the drivers' versions and the machine's stamp, and returns what is different from
// the last time, a line each. A source that cannot be read keeps its last version, because a
// command that fails does not make the driver another one.
func (m *Machine) Refresh(ctx context.Context) (changes []string) {
	m.looking.Lock() // so that the later reading is kept
	defer m.looking.Unlock()
	drivers := slices.Clone(m.knownDrivers())
	for i := range drivers {
		d := &drivers[i]
		d.version, d.err = d.read(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.current.Load()
	if !slices.EqualFunc(drivers, m.drivers, func(d, now driver) bool {
		return d.isOf(now.DriverSource)
	}) {
		if before == nil {
			// ID must not block until the next look, which SetSources' caller begins
			m.noteFirst(m.stamp())
		}
		return nil
	}
	for i, old := range m.drivers {
		d := &drivers[i]
		if d.err != nil {
			d.version = old.version
		}
		if before != nil && old.version != d.version {
			changes = append(changes,
				fmt.Sprintf("driver version of %s: %q, was %q", d, d.version, old.version))
		}
	}
	m.drivers = drivers
	after := m.stamp()
	if before == nil {
		m.noteFirst(after)
		return nil
	}
	if *before != after && len(changes) == 0 {
		changes = append(changes, "the processor, a device or a kernel module has changed")
	}
	m.current.Store(&after)
	return changes
}

// stamp is called with mu held.
func (m *Machine) stamp() MachineID {
	own := readMachine()
	b := bytes.NewBuffer(own[:])
	for _, d := range m.drivers {
		fmt.Fprintf(b, "%s\x00%s\x00", d, d.version)
	}
	return blake3.Sum256(b.Bytes())
}

func (m *Machine) noteFirst(now MachineID) {
	m.current.Store(&now)
	close(m.looked)
}

// UnreadableSources lists the sources that the last look could not read.
func (m *Machine) UnreadableSources() (errs []error) {
	for _, d := range m.knownDrivers() {
		if d.err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d, d.err))
		}
	}
	return errs
}

// Driver returns the version of an EP's driver and its origin: first the device's metadata.
func (m *Machine) Driver(ep string, mark compilers.Fingerprint) (version, source string) {
	if mark.DriverVersion != "" {
		return mark.DriverVersion, "device metadata"
	}
	<-m.looked
	for _, d := range m.knownDrivers() {
		if (d.EP == "" || d.EP == ep) && d.version != "" {
			return d.version, d.String()
		}
	}
	return "", ""
}

// Files lists what can be watched for a change of a driver.
func (m *Machine) Files() []string {
	var out []string
	for _, s := range m.knownDrivers() {
		if p := s.path(); p != "" {
			out = append(out, p)
		}
	}
	return out
}

// String returns the source of the version.
func (s DriverSource) String() string {
	switch {
	case s.File != "":
		return "file " + s.File
	case s.Module != "":
		return "module " + s.Module
	}
	return "command " + strings.Join(s.Command, " ")
}

func (s DriverSource) path() string {
	switch {
	case s.File != "":
		return s.File
	case s.Module != "":
		return filepath.Join("/sys/module", filepath.Base(s.Module), "version")
	}
	return ""
}

// Bounds of what a source may say and take.
const (
	driverLine    = 200
	driverBytes   = 64 << 10
	driverSeconds = 5
)

// read returns the first line of what the source holds. A driver that is not there has no version,
// and that is no error.
func (s DriverSource) read(ctx context.Context) (string, error) {
	if path := s.path(); path != "" {
		f, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			return "", nil
		}
		if err != nil {
			return "", err
		}
		defer f.Close()
		text, err := io.ReadAll(io.LimitReader(f, driverBytes))
		return firstLine(text), err
	}
	if len(s.Command) == 0 {
		return "", errors.New("give a file, a module or a command")
	}
	ctx, cancel := context.WithTimeout(ctx, driverSeconds*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.Command[0], s.Command[1:]...)
	cmd.WaitDelay = time.Second // what it started may hold its output open
	out := &bounded{limit: driverBytes}
	cmd.Stdout = out
	if err := cmd.Run(); err != nil {
		return "", err
	}
	return firstLine(out.b.Bytes()), nil
}

func firstLine(text []byte) string {
	line, _, _ := bytes.Cut(text, []byte("\n"))
	line = bytes.TrimSpace(line)
	return strings.ToValidUTF8(string(line[:min(len(line), driverLine)]), "")
}

type bounded struct {
	b     bytes.Buffer
	limit int
}

func (w *bounded) Write(p []byte) (int, error) {
	w.b.Write(p[:min(len(p), w.limit-w.b.Len())])
	return len(p), nil
}

// readMachine digests what a device list and a fingerprint depend on besides the libraries: the
// processor with the limits of its instruction sets, the accelerators on the bus, the versions of
// kernel modules that say theirs, and the kernel.
func readMachine() [32]byte {
	var b bytes.Buffer
	b.Write(processor())
	b.WriteString(strings.Join(compilers.InstructionLimits(), "\n"))
	add := func(pattern string) {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return // only for a malformed pattern
		}
		sort.Strings(paths)
		for _, p := range paths {
			text, err := os.ReadFile(p)
			if err != nil {
				continue // a device that went away meanwhile
			}
			b.WriteString(p)
			b.Write(text)
		}
	}
	add("/sys/bus/pci/devices/*/modalias")
	add("/sys/class/accel/*/device/modalias")
	add("/sys/module/*/version")
	add("/proc/sys/kernel/osrelease")
	return blake3.Sum256(b.Bytes())
}

// processor returns the lines that name the first processor and what it can do: no frequencies,
// they change.
func processor() []byte {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil // without /proc the probe's own result has to do
	}
	first, _, _ := bytes.Cut(text, []byte("\n\n"))
	var out []byte
	for _, line := range bytes.Split(first, []byte("\n")) {
		key, _, _ := bytes.Cut(line, []byte(":"))
		switch string(bytes.TrimSpace(key)) {
		case "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
			"Features", "CPU part":
			out = append(append(out, line...), '\n')
		}
	}
	return out
}

// ProcessorVendor returns "GenuineIntel", "AuthenticAMD", or "" where the processor does not say.
func ProcessorVendor() string {
	for _, line := range bytes.Split(processor(), []byte("\n")) {
		if key, value, ok := strings.Cut(string(line), ":"); ok &&
			strings.TrimSpace(key) == "vendor_id" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
