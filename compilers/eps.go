package compilers

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/pelletier/go-toml/v2"

	"github.com/epcached/epcached/epmodel"
)

//go:embed eps.toml
var epsData []byte

// EPInfo describes an EP without running its code. It comes from eps.toml.
type EPInfo struct {
	Name      string              `toml:"-"`
	Libraries []string            `toml:"libraries"` // patterns of the plugin library's file name
	Packages  []string            `toml:"packages"`  // Python packages that contain it
	Options   map[string]EPOption `toml:"options"`   // by name
	// FingerprintOptions change the SDK version, the hardware or the compatibility string.
	FingerprintOptions []string `toml:"fingerprint_options"`
	// Hardware extracts the hardware architecture from the compatibility string: its first group,
	// or named groups joined by "/".
	Hardware *regexp.Regexp `toml:"hardware"`
	// KnownCalls: it makes only the system calls that workers are known to need.
	KnownCalls bool `toml:"known_calls"`
	// Aliases are other values, in any case, of the attribute "source" of EPContext nodes that the
	// EP accepts.
	Aliases []string `toml:"aliases"`
	// NamedByRegistration: the library has no name of its own, but takes that of its registration.
	NamedByRegistration bool `toml:"named_by_registration"`
	// DriverMetadata has keys of device metadata for the driver version, besides os_driver_version.
	DriverMetadata []string `toml:"driver_metadata"`
	// TargetAbsent is the device type on which the EP compiles for a device that the machine does
	// not have. Failed load checks prove nothing there.
	TargetAbsent string `toml:"target_absent_on"`
}

// Policy is which users may set an option, and how its value is interpreted.
type Policy string

// Policies of options.
const (
	Allowed Policy = "allowed"
	// LibraryName: a library beside the EP's own, by base name. Resolve adds the path.
	LibraryName Policy = "library"
	// FileName: a file, identified by its content; clients send a descriptor, never a path.
	FileName     Policy = "file"
	RefusedByUse Policy = "refused" // makes the EP write or load a file; clients may not set it
	// Superseded: the EP keeps compiled models itself, which the daemon does instead. Supersede
	// removes the option.
	Superseded Policy = "superseded"
)

// EPOption describes one provider option.
type EPOption struct {
	Policy Policy `toml:"policy"`
	Kind   string `toml:"kind"` // "bool", "int", "string", "json"; how values are compared
	// Default is the value that equals the option's absence. It is left out of keys.
	Default string `toml:"default"`
	Fill    string `toml:"fill"`   // value to pass if the option is absent
	Unless  string `toml:"unless"` // another option; if it is set, Fill is not passed
	// Share is the value for compiling groups if the option is absent.
	Share string `toml:"share"`
	// Without are keys in a JSON value, in any case and depth, that are superseded.
	Without []string `toml:"without"`
	// Loads: a superseded option that also serves the session that loads the build.
	Loads bool `toml:"loads"`

	// Unchecked: a build with this option ("1") is not loaded without its target: it would crash.
	Unchecked bool `toml:"unchecked"`
}

// epTable has the EPs from eps.toml and from AddEPs.
var epTable = struct {
	sync.RWMutex // guards eps
	eps          map[string]EPInfo
}{eps: mustParse(epsData)}

// mustParse parses the embedded table. It panics on an error, which would be our own mistake.
func mustParse(data []byte) map[string]EPInfo {
	table, err := parseEPs(data)
	if err != nil {
		panic(err)
	}
	return table
}

// AddEPs adds EPs to the table, or replaces them: those that a configuration describes, and the
// stand-in's. data has the syntax of eps.toml.
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
	if err := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().
		Decode(&file); err != nil {
		return nil, fmt.Errorf("table of EPs: %w", err)
	}
	for name, info := range file.EP {
		info.Name = name
		file.EP[name] = info
	}
	return file.EP, nil
}

// EPByName returns the description of a known EP, by its canonical name.
func EPByName(name string) (EPInfo, bool) {
	epTable.RLock()
	defer epTable.RUnlock()
	info, ok := epTable.eps[name]
	return info, ok
}

// NameSources replaces aliases in the "source" of the model's EPContext nodes by the EPs' names, so
// that callers compare names alone.
func NameSources(m *epmodel.Model) {
	epTable.RLock()
	defer epTable.RUnlock()
	for i := range m.Contexts {
		source := &m.Contexts[i].Source
		for name, info := range epTable.eps {
			if slices.ContainsFunc(info.Aliases, func(alias string) bool {
				return strings.EqualFold(alias, *source)
			}) {
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

// EPOfLibrary returns the known EP whose libraries have such a file name.
func EPOfLibrary(file string) (string, bool) {
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

// Supersede returns the options without superseded ones, and the removed ones by name; removed is
// nil if there are none, and options is returned then. A removed key of a JSON value is named
// OPTION.KEY.
func (i EPInfo) Supersede(options map[string]string) (rest, removed map[string]string) {
	rest = options
	for name, value := range options {
		opt := i.Options[name]
		if opt.Policy != Superseded && len(opt.Without) == 0 {
			continue
		}
		gone := map[string]string{name: value}
		kept := ""
		if opt.Policy != Superseded {
			if kept, gone = withoutKeys(name, value, opt.Without); len(gone) == 0 {
				continue
			}
		}
		if removed == nil {
			rest, removed = maps.Clone(options), map[string]string{}
		}
		maps.Copy(removed, gone)
		if delete(rest, name); kept != "" {
			rest[name] = kept
		}
	}
	return rest, removed
}

// withoutKeys removes keys from a JSON value, and the objects that become empty: kept is "" if
// nothing is left. A value that is not JSON has no keys.
func withoutKeys(name, value string, keys []string) (kept string, removed map[string]string) {
	tree, err := parseJSON(value)
	if err != nil {
		return value, nil // Normalize returns the error
	}
	removed = map[string]string{}
	var prune func(node any) (empty bool)
	prune = func(node any) bool {
		object, ok := node.(map[string]any)
		if !ok {
			return false
		}
		before := len(object)
		for key, inner := range object {
			named := func(k string) bool { return strings.EqualFold(k, key) }
			switch {
			case slices.ContainsFunc(keys, named):
				removed[name+"."+key] = fmt.Sprint(inner)
				delete(object, key)
			case prune(inner):
				delete(object, key)
			}
		}
		return len(object) == 0 && before > 0
	}
	if prune(tree) {
		return "", removed
	}
	return formatJSON(tree), removed
}

// Normalize returns the canonical spelling of an EP's options: equivalent values become equal, and
// options with their default value are left out. Options that may not be given are an error that
// wraps ErrOption and names the option. Unknown options are such an error too, unless allowUnknown;
// then they are kept unchanged, and listed in unknown.
func (i EPInfo) Normalize(options map[string]string, allowUnknown bool) (normal map[string]string,
	unknown []string, err error) {
	normal = map[string]string{}
	for name, value := range options {
		opt, known := i.Options[name]
		if !known {
			if !allowUnknown {
				return nil, nil, fmt.Errorf("option %q of %s: %w: unknown to epcached", name,
					i.Name, ErrOption)
			}
			unknown = append(unknown, name)
			normal[name] = value
			continue
		}
		value, err := opt.normalize(value)
		if err != nil {
			return nil, nil, fmt.Errorf("option %q of %s: %w", name, i.Name, err)
		}
		if opt.Default != "" && value == opt.Default {
			continue
		}
		normal[name] = value
	}
	slices.Sort(unknown)
	return normal, unknown, nil
}

func (o EPOption) normalize(value string) (string, error) {
	switch o.Policy {
	case RefusedByUse:
		return "", fmt.Errorf("%w: it makes the EP write or load a file", ErrOption)
	case LibraryName:
		if value == "" || value != filepath.Base(value) || value == "." || value == ".." {
			return "", fmt.Errorf("%w: %q is a path: give the name of a library beside the EP "+
				"library", ErrOption, value)
		}
	}
	return CanonicalValue(o.Kind, value)
}

// CanonicalValue returns equal texts for values that the EP reads as equal.
func CanonicalValue(kind, value string) (string, error) {
	switch kind {
	case "bool":
		switch strings.ToLower(value) {
		case "1", "true", "on", "yes":
			return "1", nil
		case "0", "false", "off", "no":
			return "0", nil
		}
		return "", fmt.Errorf("%w: %q is neither true nor false", ErrOption, value)
	case "int":
		n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
		if err != nil {
			return "", fmt.Errorf("%w: %q is not a whole number", ErrOption, value)
		}
		return strconv.FormatInt(n, 10), nil
	case "json":
		return canonicalJSON(value)
	}
	return value, nil
}

// canonicalJSON sorts keys and drops white space; numbers keep their spelling, because an EP may
// distinguish 1.0 and 1.
func canonicalJSON(value string) (string, error) {
	tree, err := parseJSON(value)
	if err != nil {
		return "", err
	}
	return formatJSON(tree), nil
}

func parseJSON(value string) (tree any, err error) {
	dec := json.NewDecoder(strings.NewReader(value))
	dec.UseNumber()
	if err := dec.Decode(&tree); err != nil {
		return nil, fmt.Errorf("%w: not JSON: %w", ErrOption, err)
	}
	if dec.More() {
		return nil, fmt.Errorf("%w: more than one JSON value", ErrOption)
	}
	return tree, nil
}

// formatJSON formats a value of parseJSON.
func formatJSON(tree any) string {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(tree); err != nil {
		return "null" // cannot happen: a tree of parseJSON can be encoded
	}
	return strings.TrimSuffix(out.String(), "\n")
}

// Resolve returns the options as the EP wants them: fills in what must be passed, and turns names
// of libraries into absolute paths beside the EP library at lib. It is used just before a compile,
// and for the options that an application gets with its lease.
func (i EPInfo) Resolve(lib string, options map[string]string) map[string]string {
	full := map[string]string{}
	maps.Copy(full, options)
	for name, opt := range i.Options {
		_, given := full[name]
		if _, excluded := options[opt.Unless]; opt.Fill != "" && !given && !excluded {
			full[name] = opt.Fill
		}
		if value, ok := full[name]; ok && opt.Policy == LibraryName && !filepath.IsAbs(value) {
			full[name] = filepath.Join(filepath.Dir(lib), filepath.Base(value))
		}
	}
	return full
}

// HardwareOf extracts the hardware architecture from a compatibility string, "" if the string has
// none.
func (i EPInfo) HardwareOf(compatibility string) string {
	if i.Hardware == nil {
		return ""
	}
	m := i.Hardware.FindStringSubmatch(compatibility)
	return strings.Join(m[min(1, len(m)):], "/")
}

// ForFingerprint keeps those options that the fingerprint depends on. For an EP without an entry,
// or without known options, it keeps all, because the fingerprint may depend on any.
func (i EPInfo) ForFingerprint(options map[string]string) map[string]string {
	if len(i.Options) == 0 {
		return options
	}
	kept := map[string]string{}
	for _, name := range i.FingerprintOptions {
		if value, ok := options[name]; ok {
			kept[name] = value
		}
	}
	return kept
}
