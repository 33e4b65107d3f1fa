package runtimes

import (
	"bytes"
	"cmp"
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

// MachineID is a digest of the facts that device lists and fingerprints depend on besides the
// libraries: processor, devices and drivers.
type MachineID [32]byte

// Machine has the processor, devices and drivers as of the last Refresh.
type Machine struct {
	current atomic.Pointer[MachineID] // nil before the first Refresh
	looked  chan struct{}             // closed by the first Refresh

	looking sync.Mutex // held during Refresh; locked before mu

	mu      sync.Mutex
	drivers []driver // replaced as a whole; guarded by mu
}

// DriverSource says where to read the version of an execution provider's driver if its devices do
// not state it. One of File and Command is set.
type DriverSource struct {
	EP      string   // "" for all
	File    string   // its first line is the version
	Command []string // the first line of its output is the version
}

// driver is a source with the version that was last read.
type driver struct {
	DriverSource
	version string // "" where there is none
	err     error  // why the last Refresh could not read it
}

// NewMachine returns a machine without facts. ID and Driver block until Refresh returns.
func NewMachine(sources []DriverSource) *Machine {
	m := &Machine{looked: make(chan struct{})}
	m.SetSources(sources)
	return m
}

// AwaitFirst blocks until the first Refresh ends, which may run slow commands.
func (m *Machine) AwaitFirst(ctx context.Context) error {
	select {
	case <-m.looked:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ID returns the identity from the last Refresh. It blocks until the first one ends.
func (m *Machine) ID() MachineID {
	if known := m.current.Load(); known != nil {
		return *known
	}
	<-m.looked
	return *m.current.Load()
}

// SetSources replaces the sources from the next Refresh on, and reports whether they differ.
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
	return d.EP == s.EP && d.File == s.File && slices.Equal(d.Command, s.Command)
}

func (m *Machine) knownDrivers() []driver {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.drivers
}

// Refresh reads the drivers' versions and the machine's stamp, and returns the changes since the
// last call, one line each. A source that cannot be read keeps its last version, because a failing
// command does not mean that the driver changed.
func (m *Machine) Refresh(ctx context.Context) (changes []string) {
	m.looking.Lock() // so that the result of the later call is kept
	defer m.looking.Unlock()
	drivers := slices.Clone(m.knownDrivers())
	for i := range drivers {
		d := &drivers[i]
		d.version, d.err = d.read(ctx)
	}
	own := readMachine()
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.current.Load()
	if !slices.EqualFunc(drivers, m.drivers, func(d, now driver) bool {
		return d.isOf(now.DriverSource)
	}) {
		if before == nil {
			// ID must not block until the Refresh that SetSources' caller begins
			m.noteFirst(m.stamp(own))
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
	after := m.stamp(own)
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

// stamp adds the drivers to the machine's own facts. The caller holds mu.
func (m *Machine) stamp(own [32]byte) MachineID {
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

// UnreadableSources lists the sources that the last Refresh could not read.
func (m *Machine) UnreadableSources() (errs []error) {
	for _, d := range m.knownDrivers() {
		if d.err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d, d.err))
		}
	}
	return errs
}

// Driver returns the version of an EP's driver and its origin: the device's metadata if they have
// it, otherwise a source.
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

// Files lists the files to watch for changes of drivers.
func (m *Machine) Files() []string {
	var out []string
	for _, s := range m.knownDrivers() {
		if s.File != "" {
			out = append(out, s.File)
		}
	}
	return out
}

// String returns the source of the version.
func (s DriverSource) String() string {
	if s.File != "" {
		return "file " + s.File
	}
	return "command " + strings.Join(s.Command, " ")
}

// Bounds of a source's output and time.
const (
	driverLine    = 200
	driverBytes   = 64 << 10
	driverSeconds = 5
)

// read returns the first line of the source. A missing driver is no error and has the version "".
func (s DriverSource) read(ctx context.Context) (string, error) {
	if s.File != "" {
		f, err := os.Open(s.File)
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
		return "", errors.New("give a file or a command")
	}
	ctx, cancel := context.WithTimeout(ctx, driverSeconds*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.Command[0], s.Command[1:]...)
	cmd.WaitDelay = time.Second // its children may keep its output open
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

// readMachine hashes the facts that device lists and fingerprints depend on besides the libraries:
// the processor with its instruction sets, the accelerators on the bus, the versions of kernel
// modules that state one, and the kernel.
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
				continue // a device that was removed in the meantime
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

// processor returns the lines with the model and features of the first processor. Frequencies are
// left out, because they change.
func processor() []byte {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil // without /proc only the probe's result counts
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

// WhyNoDevice returns why an execution provider that loads lists no device, and what would help.
func WhyNoDevice(ep string) (why, help string) { return whyNoDevice(ep, processorVendor()) }

func whyNoDevice(ep, vendor string) (why, help string) {
	if strings.HasPrefix(ep, "OpenVINO") && vendor != "GenuineIntel" {
		return "OpenVINO's plugin supports Intel devices only, and the processor is made by " +
				cmp.Or(vendor, "another vendor"),
			"use plain ONNX Runtime on this processor; onnxruntime-qnn compiles ahead of time " +
				"for Qualcomm's NPUs on any x86-64 machine"
	}
	return "its driver may be missing, or it does not support this processor",
		"for a GPU or NPU, install its driver and let the daemon's user open its device"
}

// processorVendor returns "GenuineIntel", "AuthenticAMD", or "" if the processor does not state it.
func processorVendor() string {
	for _, line := range bytes.Split(processor(), []byte("\n")) {
		if key, value, ok := strings.Cut(string(line), ":"); ok &&
			strings.TrimSpace(key) == "vendor_id" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
