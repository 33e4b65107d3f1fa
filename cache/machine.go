package cache

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
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/compilers"
)

// machine stands for what a device list and a fingerprint depend on besides the libraries: processor, devices and
// drivers.
type machine [32]byte

// machineState is the machine as it was last looked at.
type machineState struct {
	current atomic.Pointer[machine] // nil before the first look
	seen    chan struct{}           // closed by the first look

	looking sync.Mutex // held for a whole look; taken before mu

	mu      sync.Mutex
	drivers []driver // replaced as a whole; guarded by mu
}

// driver is a source of a driver's version as it was last read.
type driver struct {
	DriverSource
	version string // "" where there is none
	err     error  // why it could not be read at the last look
}

// machineEvery is how often the machine is looked at where nothing tells of a change.
const machineEvery = time.Minute

func newMachine(sources []DriverSource) *machineState {
	m := &machineState{seen: make(chan struct{})}
	m.setSources(sources)
	return m
}

// now waits for the first look: a command that tells a driver's version may take its time.
func (m *machineState) now() machine {
	if known := m.current.Load(); known != nil {
		return *known
	}
	<-m.seen
	return *m.current.Load()
}

// setSources has drivers' versions read elsewhere from the next look on, and tells whether that is anything new.
func (m *machineState) setSources(sources []DriverSource) bool {
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
	return d.EP == s.EP && d.File == s.File && d.Module == s.Module && slices.Equal(d.Command, s.Command)
}

func (m *machineState) known() []driver {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.drivers
}

// look reads the drivers' versions and the machine's stamp, and says what is different from the last time. A source that
// cannot be read keeps the version that it told last: that a command fails does not make the driver another one.
func (m *machineState) look(ctx context.Context) (changes []string) {
	m.looking.Lock() // so that the later reading is kept
	defer m.looking.Unlock()
	drivers := slices.Clone(m.known())
	for i := range drivers {
		d := &drivers[i]
		d.version, d.err = d.read(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.current.Load()
	if !slices.EqualFunc(drivers, m.drivers, func(d, now driver) bool { return d.isOf(now.DriverSource) }) {
		if before == nil {
			m.first(m.stamp()) // nobody waits for the next look, which whoever set the others takes
		}
		return nil
	}
	for i, old := range m.drivers {
		d := &drivers[i]
		if d.err != nil {
			d.version = old.version
		}
		if before != nil && old.version != d.version {
			changes = append(changes, fmt.Sprintf("driver version of %s: %q, was %q", d, d.version, old.version))
		}
	}
	m.drivers = drivers
	after := m.stamp()
	if before == nil {
		m.first(after)
		return nil
	}
	if *before != after && len(changes) == 0 {
		changes = append(changes, "the processor, a device or a kernel module is another")
	}
	m.current.Store(&after)
	return changes
}

// stamp is called with mu held.
func (m *machineState) stamp() machine {
	own := machineStamp()
	b := bytes.NewBuffer(own[:])
	for _, d := range m.drivers {
		fmt.Fprintf(b, "%s\x00%s\x00", d, d.version)
	}
	return digestOf(b.Bytes())
}

func (m *machineState) first(now machine) {
	m.current.Store(&now)
	close(m.seen)
}

// unreadable tells which sources could not be read at the last look.
func (m *machineState) unreadable() (errs []error) {
	for _, d := range m.known() {
		if d.err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d, d.err))
		}
	}
	return errs
}

// driver gives the version of an execution provider's driver, and where it is from: the device's own metadata come
// first.
func (m *machineState) driver(ep string, mark compilers.Fingerprint) (version, source string) {
	if mark.DriverVersion != "" {
		return mark.DriverVersion, "device metadata"
	}
	<-m.seen
	for _, d := range m.known() {
		if (d.EP == "" || d.EP == ep) && d.version != "" {
			return d.version, d.String()
		}
	}
	return "", ""
}

// files are what can be watched for a change of a driver.
func (m *machineState) files() []string {
	var out []string
	for _, s := range m.known() {
		if p := s.path(); p != "" {
			out = append(out, p)
		}
	}
	return out
}

// String says where the version is read.
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

// read gives the first line of what the source holds. A driver that is not there has no version, and that is no error.
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
		return "", errors.New("neither file, module nor command")
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

// bounded keeps the first bytes that are written, and swallows the rest.
type bounded struct {
	b     bytes.Buffer
	limit int
}

func (w *bounded) Write(p []byte) (int, error) {
	w.b.Write(p[:min(len(p), w.limit-w.b.Len())])
	return len(p), nil
}
