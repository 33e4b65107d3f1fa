package program

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock/wire"
)

// Settings is what the Python side reads; clients/python/epcache/_run/_settings.py is its twin.
type Settings struct {
	EPs          []ep    `json:"eps,omitempty"`
	Runtime      string  `json:"runtime,omitempty"`
	OnMiss       string  `json:"on_miss"`
	VerifyOutput float64 `json:"verify_output,omitempty"`
}

// ep is an execution provider that sessions are sent to.
type ep struct {
	Name    string            `json:"name"`
	Devices []device          `json:"devices,omitempty"`
	Options map[string]string `json:"options,omitempty"`
}

type device struct {
	Type     string            `json:"type,omitempty"`
	VendorID uint32            `json:"vendor_id,omitempty"`
	DeviceID uint32            `json:"device_id,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// Send has sessions that ask for the CPU sent to an execution provider.
func (s *Settings) Send(to *wire.ExecutionProvider) {
	one := ep{Name: to.GetName(), Options: to.GetOptions()}
	for _, d := range to.GetDevices() {
		one.Devices = append(one.Devices, device{d.GetType(), d.GetVendorId(), d.GetDeviceId(), d.GetMetadata()})
	}
	s.EPs = append(s.EPs, one)
}

// Environment is that of a program which makes its sessions from the cache: report is the file that
// its processes append to, and socket that of the daemon, "" for the usual ones.
func Environment(settings Settings, report, socket string) ([]string, error) {
	hook, err := findHook()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(settings)
	if err != nil {
		return nil, err
	}
	path := hook
	if own := os.Getenv("PYTHONPATH"); own != "" {
		path += string(os.PathListSeparator) + own
	}
	// Of two of one name the last counts.
	environment := append(os.Environ(), "PYTHONPATH="+path, "EPCACHE_RUN="+string(text), "EPCACHE_RUN_REPORT="+report)
	if socket != "" {
		if socket, err = filepath.Abs(socket); err != nil {
			return nil, err
		}
		environment = append(environment, "EPCACHE_SOCKET="+socket)
	}
	return environment, nil
}

// hookFolder is what goes to the front of PYTHONPATH, in the Python package.
var hookFolder = filepath.Join("epcache", "_run", "hook")

// findHook returns the hook's folder in the Python package that belongs to this program.
func findHook() (string, error) {
	program, err := os.Executable()
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(program); err == nil {
		program = real
	}
	for _, place := range hookPlaces(filepath.Dir(program)) {
		found, err := filepath.Glob(filepath.Join(place, hookFolder, "sitecustomize.py"))
		if err == nil && len(found) > 0 {
			return filepath.Dir(found[len(found)-1]), nil
		}
	}
	return "", exit.Hint(exit.Missing("the Python package epcache does not stand beside epcachectl"), "pip install epcache brings both")
}

// hookPlaces are the folders, as patterns, that may hold the package, for a program in dir.
func hookPlaces(dir string) []string {
	return []string{
		filepath.Join(dir, "..", ".."),                // the wheel: epcache/NAME/epcachectl
		filepath.Join(dir, "..", "clients", "python"), // a checkout: bin/epcachectl
		filepath.Join(dir, "..", "lib", "python3*", "site-packages"),
		filepath.Join(dir, "..", "lib", "epcached", "python"),
		filepath.Join(dir, "..", "share", "epcached", "python"),
		filepath.Join(dir, "..", "lib", "python3", "dist-packages"),
	}
}
