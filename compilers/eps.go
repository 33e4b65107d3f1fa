package compilers

import (
	"bytes"
	_ "embed"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/pelletier/go-toml/v2"

	"github.com/epcached/epcached/epmodel"
)

//go:embed eps.toml
var epsData []byte

// EPInfo is what is known of an EP before any of its code runs. It comes from eps.toml.
type EPInfo struct {
	Name      string              `toml:"-"`
	Libraries []string            `toml:"libraries"` // patterns of the plugin library's file name
	Packages  []string            `toml:"packages"`  // Python packages that carry it
	Options   map[string]EPOption `toml:"options"`   // by name
	// FingerprintOptions change the SDK version, the hardware or the compatibility string.
	FingerprintOptions []string `toml:"fingerprint_options"`
	// Hardware takes the hardware architecture out of the compatibility string: its first group, or named groups joined by "/".
	Hardware       *regexp.Regexp `toml:"hardware"`
	Aliases        []string       `toml:"aliases"`          // other values of attribute "source" under which the EP takes EPContext nodes, in any case
	DriverMetadata []string       `toml:"driver_metadata"`  // keys of device metadata that hold a driver version, besides os_driver_version
	TargetAbsent   string         `toml:"target_absent_on"` // device type on which builds are made for a device that is elsewhere; load checks prove nothing there
}

// Policy tells who may set an option and how its value is understood.
type Policy string

// Policies of options.
const (
	Allowed      Policy = "allowed"
	LibraryName  Policy = "library" // a library beside the EP's own, by base name; the path is filled in here
	FileName     Policy = "file"    // a file whose content counts; comes as a descriptor, never as a path
	RefusedByUse Policy = "refused" // makes the EP write or load something; never from a client
)

// EPOption describes one provider option.
type EPOption struct {
	Policy  Policy `toml:"policy"`
	Kind    string `toml:"kind"`    // "bool", "int", "string", "json"; how equal values are told
	Default string `toml:"default"` // what the EP does when the option is absent; such a value is left out of keys
	Fill    string `toml:"fill"`    // what is passed when the option is absent
	Unless  string `toml:"unless"`  // another option, with which Fill is not passed
	Share   string `toml:"share"`   // what weight-sharing groups are compiled with when the option is absent

	// Unchecked: what is compiled with the option set ("1") is not loaded where the target is absent, for that takes the process down.
	Unchecked bool `toml:"unchecked"`
}

// epTable holds what eps.toml says, and what AddEPs added.
var epTable = struct {
	sync.RWMutex // guards eps
	eps          map[string]EPInfo
}{eps: mustParse(epsData)}

// mustParse is for the table that is part of the program: a mistake in it is ours, and no test run survives it.
func mustParse(data []byte) map[string]EPInfo {
	table, err := parseEPs(data)
	if err != nil {
		panic(err)
	}
	return table
}

// AddEPs adds EPs to the table, or replaces them: those that a configuration describes, and the stand-in's. data has the form of eps.toml.
func AddEPs(data []byte) error {
	added, err := parseEPs(data)
	if err != nil {
		return err
	}
	epTable.Lock()
	defer epTable.Unlock()
	maps.Copy(epTable.eps, added)
	return nil
}

func parseEPs(data []byte) (map[string]EPInfo, error) {
	var file struct {
		EP map[string]EPInfo `toml:"ep"`
	}
	if err := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().Decode(&file); err != nil {
		return nil, fmt.Errorf("table of EPs: %w", err)
	}
	for name, info := range file.EP {
		info.Name = name
		file.EP[name] = info
	}
	return file.EP, nil
}

// EPByName gives what is known of an EP under its canonical name.
func EPByName(name string) (EPInfo, bool) {
	epTable.RLock()
	defer epTable.RUnlock()
	info, ok := epTable.eps[name]
	return info, ok
}

// NameSources replaces aliases in the "source" of the model's EPContext nodes by the EPs' names, so that callers compare names alone.
func NameSources(m *epmodel.Model) {
	epTable.RLock()
	defer epTable.RUnlock()
	for i := range m.Contexts {
		source := &m.Contexts[i].Source
		for name, info := range epTable.eps {
			if slices.ContainsFunc(info.Aliases, func(alias string) bool { return strings.EqualFold(alias, *source) }) {
				*source = name
				break
			}
		}
	}
}

// EPNames lists the EPs that are known, sorted.
func EPNames() []string {
	epTable.RLock()
	defer epTable.RUnlock()
	return slices.Sorted(maps.Keys(epTable.eps))
}

func epOfLibrary(file string) (string, bool) {
	epTable.RLock()
	defer epTable.RUnlock()
	for name, info := range epTable.eps {
		for _, pattern := range info.Libraries {
			if ok, err := filepath.Match(pattern, filepath.Base(file)); err == nil && ok {
				return name, true
			}
		}
	}
	return "", false
}
