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

	mu       sync.Mutex
	sources  []DriverSource // replaced as a whole; guarded by mu
	versions []string       // of the sources' drivers, "" where there is none; guarded by mu
	errs     []error        // why a source could not be read at the last look; guarded by mu
}

// machineEvery is how often the machine is looked at where nothing tells of a change.
const machineEvery = time.Minute

func newMachine(sources []DriverSource) *machineState {
	return &machineState{sources: sources, versions: make([]string, len(sources)), errs: make([]error, len(sources)), seen: make(chan struct{})}
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
	if slices.EqualFunc(m.sources, sources, DriverSource.equal) {
		return false
	}
	versions, errs := make([]string, len(sources)), make([]error, len(sources))
	for i, s := range sources {
		if old := slices.IndexFunc(m.sources, s.equal); old >= 0 {
			versions[i], errs[i] = m.versions[old], m.errs[old]
		}
	}
	m.sources, m.versions, m.errs = sources, versions, errs
	return true
}

func (s DriverSource) equal(o DriverSource) bool {
	return s.EP == o.EP && s.File == o.File && s.Module == o.Module && slices.Equal(s.Command, o.Command)
}

func (m *machineState) where() []DriverSource {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sources
}

// look reads the drivers' versions and the machine's stamp, and says what is different from the last time. A source that
// cannot be read keeps the version that it told last: that a command fails does not make the driver another one.
func (m *machineState) look(ctx context.Context) (changes []string) {
	m.looking.Lock() // so that the later reading is kept
	defer m.looking.Unlock()
	sources := m.where()
	versions, errs := make([]string, len(sources)), make([]error, len(sources))
	for i, s := range sources {
		versions[i], errs[i] = s.read(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.current.Load()
	if !slices.EqualFunc(sources, m.sources, DriverSource.equal) {
		if before == nil {
			m.first(m.stamp()) // nobody waits for the next look, which whoever set the others takes
		}
		return nil
	}
	for i, old := range m.versions {
		if errs[i] != nil {
			versions[i] = old
		}
		if before != nil && old != versions[i] {
			changes = append(changes, fmt.Sprintf("driver version of %s: %q, was %q", sources[i], versions[i], old))
		}
	}
	m.versions, m.errs = versions, errs
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
	for i, v := range m.versions {
		fmt.Fprintf(b, "%s\x00%s\x00", m.sources[i], v)
	}
	return digestOf(b.Bytes())
}

func (m *machineState) first(now machine) {
	m.current.Store(&now)
	close(m.seen)
}

// unreadable tells which sources could not be read at the last look.
func (m *machineState) unreadable() (errs []error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, err := range m.errs {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", m.sources[i], err))
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
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, s := range m.sources {
		if (s.EP == "" || s.EP == ep) && m.versions[i] != "" {
			return m.versions[i], s.String()
		}
	}
	return "", ""
}

// files are what can be watched for a change of a driver.
func (m *machineState) files() []string {
	var out []string
	for _, s := range m.where() {
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
