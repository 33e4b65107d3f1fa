package identity

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/suggest"
)

// Options change the result of a compile, and some make the EP load a library or write a file.
// Therefore each has a policy, in compilers/eps.toml for provider options and session.toml for
// session config entries, and unknown options are refused.

// Allowed are unknown options that the administrator permits: "EP/option" and "session/key".
type Allowed []string

// canonicalOptions returns options in their canonical spelling, without those that equal the
// default.
func (a Allowed) canonicalOptions(ep EP) (map[string]string, error) {
	info, _ := compilers.EPByName(ep.Name)
	info.Name = ep.Name
	// Only the base name: the daemon looks for the library beside the EP's own, whatever the
	// client's path is.
	out, unknown, err := info.Normalize(LibraryBaseNames(info, ep.Options), true)
	if err != nil {
		return nil, apierr.New(apierr.BadRequest, err, "execution provider %s", ep.Name)
	}
	for _, name := range unknown {
		if !slices.Contains(a, ep.Name+"/"+name) {
			return nil, unknownOption(ep.Name, name, info)
		}
	}
	for name, value := range out {
		if info.Options[name].Kind != "json" {
			continue
		}
		if key, bad := namesFile([]byte(value)); bad {
			return nil, apierr.New(apierr.NotAllowed, nil,
				"option %q of %s: %q makes the execution provider read or write a file by name",
				name, ep.Name, key)
		}
	}
	return out, fileOptions(ep, info)
}

// Superseded is what Supersede removed.
type Superseded struct {
	Warnings []string                     // one for each option
	Loads    map[string]map[string]string // by EP: options for the session that loads the build
}

// Supersede returns the EPs without the options with which they keep compiled models themselves,
// because builds are kept instead, and requests with and without such options are equal.
func Supersede(eps []EP) (rest []EP, removed Superseded) {
	rest = eps
	for i, ep := range eps {
		info, _ := compilers.EPByName(ep.Name)
		options, gone := info.Supersede(ep.Options)
		if len(gone) == 0 {
			continue
		}
		if len(removed.Warnings) == 0 {
			rest, removed.Loads = slices.Clone(eps), make(map[string]map[string]string)
		}
		rest[i].Options = options
		for _, name := range slices.Sorted(maps.Keys(gone)) {
			use := "is not used"
			if info.Options[name].Loads {
				use = "is for the loading session only"
				if removed.Loads[ep.Name] == nil {
					removed.Loads[ep.Name] = make(map[string]string)
				}
				removed.Loads[ep.Name][name] = gone[name]
			}
			removed.Warnings = append(removed.Warnings, fmt.Sprintf(
				"option %q of %s %s: epcached keeps the compiled model", name, ep.Name, use))
		}
	}
	return rest, removed
}

// fileOptions checks that exactly those options came with descriptors that name a file.
func fileOptions(ep EP, info compilers.EPInfo) error {
	for _, name := range slices.Sorted(maps.Keys(ep.Options)) {
		if info.Options[name].Policy == compilers.FileName {
			return apierr.New(apierr.BadRequest, nil, "option %q of %s names a file: send the "+
				"file as a descriptor", name, ep.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(ep.Files)) {
		if info.Options[name].Policy != compilers.FileName {
			return apierr.New(apierr.BadRequest, nil, "option %q of %s does not take a file",
				name, ep.Name)
		}
	}
	return nil
}

func namesFile(value []byte) (string, bool) {
	var tree map[string]json.RawMessage
	if json.Unmarshal(value, &tree) != nil {
		return "", false
	}
	for _, key := range slices.Sorted(maps.Keys(tree)) {
		upper := strings.ToUpper(key)
		for _, end := range []string{"_DIR", "_PATH", "_FILE", "_DIRECTORY"} {
			if strings.HasSuffix(upper, end) {
				return key, true
			}
		}
		if inner, bad := namesFile(tree[key]); bad {
			return inner, true
		}
	}
	return "", false
}

func unknownOption(ep, name string, info compilers.EPInfo) error {
	e := apierr.New(apierr.BadRequest, nil, "%s: unknown option %q", ep, name)
	if near := suggest.Closest(name, maps.Keys(info.Options)); near != "" {
		return e.WithHint("did you mean %q?", near)
	}
	return e.WithHint("if this version has the option, the administrator can allow it: "+
		"allow_options = [%q]", ep+"/"+name)
}

// ErrNoLibrary is the cause when an option for FillOptions names a library that does not exist.
var ErrNoLibrary = errors.New("a library is missing")

// FillOptions returns the options as the EP gets them: in the caller's spelling, libraries as paths
// beside the EP's own, and missing mandatory options added.
func FillOptions(ep string, options map[string]string,
	lib compilers.EPLibrary) (map[string]string, error) {
	info, _ := compilers.EPByName(ep)
	out := info.Resolve(lib.Path, LibraryBaseNames(info, options))
	for name, value := range out {
		if info.Options[name].Policy == compilers.LibraryName &&
			!slices.Contains(lib.Files, value) {
			_, asked := options[name]
			if lib.Absent && !asked {
				delete(out, name) // the vendor's tool uses its own libraries
				continue
			}
			e := apierr.New(apierr.BadRequest, nil,
				"option %q of %s: there is no library %q beside %q",
				name, ep, filepath.Base(value), lib.Path)
			if !asked {
				e = apierr.New(apierr.Unavailable, nil, "execution provider %s is incomplete: "+
					"there is no library %q beside %q", ep, filepath.Base(value), lib.Path).
					WithHint("install it again")
			}
			e.Err = ErrNoLibrary
			return nil, e
		}
	}
	return out, nil
}

// canonicalLevel returns the graph optimisation level of a compile, with the default for "". A
// session folds constants and shapes, "basic", before execution providers choose their nodes, and
// so does a compile here unless an option says otherwise: the compile API's own default,
// "disable_all", leaves nodes to the CPU that a session would not (QNN: whole models). The levels
// above "basic" only concern nodes that no provider took. The default is that of every route,
// because sessions request "basic" for groups, too, whose builds have to be those that were warmed.
func canonicalLevel(level string) (string, error) {
	switch level {
	case "":
		return "basic", nil
	case "disable_all", "basic", "extended", "layout", "all":
		return level, nil
	}
	return "", apierr.New(apierr.BadRequest, nil, "graph optimization level %q: it must be "+
		"disable_all, basic, extended, layout or all", level)
}

func canonicalRoute(route string) (string, error) {
	switch route {
	case "", compilers.RouteCompileAPI:
		return compilers.RouteCompileAPI, nil
	case compilers.RouteSessionOptions:
		return route, nil
	}
	return "", apierr.New(apierr.BadRequest, nil, "route %q: it must be %s or "+
		"%s", route, compilers.RouteCompileAPI, compilers.RouteSessionOptions)
}

// LibraryBaseNames reduces options that name libraries to the base names.
func LibraryBaseNames(info compilers.EPInfo, options map[string]string) map[string]string {
	out := make(map[string]string, len(options))
	for name, value := range options {
		if info.Options[name].Policy == compilers.LibraryName {
			value = filepath.Base(value)
		}
		out[name] = value
	}
	return out
}

// Denotations returns denotations in lower case, because ONNX Runtime ignores their case.
func Denotations(sizes map[string]int64) (map[string]int64, error) {
	out := make(map[string]int64, len(sizes))
	for name, size := range sizes {
		small := strings.ToLower(name)
		if other, twice := out[small]; twice && other != size {
			return nil, apierr.New(apierr.BadRequest, nil, "free dimensions of denotation %q "+
				"are set twice, to %d and to %d", small, min(size, other), max(size, other))
		}
		out[small] = size
	}
	return out, nil
}

// UnresolvedDevices returns the requested devices unchanged, for when no list of devices exists.
func UnresolvedDevices(ep EP) ([]compilers.Device, error) {
	out := slices.Clone(ep.Devices)
	if len(out) == 0 {
		out = []compilers.Device{{}} // the provider's first device; the machine is part of the key
	}
	for i := range out {
		out[i].Type = strings.ToUpper(out[i].Type)
	}
	return out, nil
}

//go:embed session.toml
var sessionData []byte

// sessionClass is the class of a session config entry, as in session.toml.
type sessionClass string

const (
	classCompile sessionClass = "compile"
	classRun     sessionClass = "run"
	classServe   sessionClass = "serve"
	classDir     sessionClass = "dir"
	classRefused sessionClass = "refused"
)

// onlyOptimal, set to "1", makes ONNX Runtime fail on a compiled model for which the EP recommends
// a recompile.
const onlyOptimal = "session.fail_on_suboptimal_compiled_model"

type sessionRule struct {
	Class   sessionClass `toml:"-"`
	Kind    string       `toml:"kind"`
	Default string       `toml:"default"`
	Because string       `toml:"-"` // why it is refused
}

var sessionKeys = mustParseSession(sessionData)

func mustParseSession(data []byte) map[string]sessionRule {
	table, err := parseSession(data)
	if err != nil {
		panic(err)
	}
	return table
}

func parseSession(data []byte) (map[string]sessionRule, error) {
	var file struct {
		Run     []string
		Serve   []string
		Dir     []string
		Compile map[string]sessionRule
		Refused map[string]string
	}
	if err := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().
		Decode(&file); err != nil {
		return nil, fmt.Errorf("session config entries: %w", err)
	}
	table := make(map[string]sessionRule)
	var twice error
	add := func(key string, rule sessionRule) {
		if _, there := table[key]; there {
			twice = fmt.Errorf("session config entries: %q is listed twice", key)
		}
		table[key] = rule
	}
	for class, keys := range map[sessionClass][]string{
		classRun: file.Run, classServe: file.Serve, classDir: file.Dir,
	} {
		for _, key := range keys {
			add(key, sessionRule{Class: class})
		}
	}
	for key, rule := range file.Compile {
		rule.Class = classCompile
		add(key, rule)
	}
	for key, because := range file.Refused {
		add(key, sessionRule{Class: classRefused, Because: because})
	}
	return table, twice
}

// SplitSession returns the session config entries that matter to a compile, without those that only
// matter when the model runs, and whether the request accepts optimal builds only. It does not
// validate entries; Record does.
func SplitSession(entries map[string]string) (compile map[string]string, optimal bool) {
	compile = entries
	for key, value := range entries {
		if class := sessionKeys[key].Class; class != classRun && class != classServe {
			continue
		}
		if len(compile) == len(entries) {
			compile = maps.Clone(entries)
		}
		delete(compile, key)
		optimal = optimal || key == onlyOptimal && value == "1" // as ONNX Runtime compares it
	}
	return compile, optimal
}

// ExternalDir returns the entries that a client sends, and the directory for external data that the
// removed entry names, "" if there is none. The client opens the files there.
func ExternalDir(entries map[string]string) (sent map[string]string, dir string) {
	sent = maps.Clone(entries)
	maps.DeleteFunc(sent, func(key, value string) bool {
		if sessionKeys[key].Class != classDir {
			return false
		}
		dir = value
		return true
	})
	return sent, dir
}

func (a Allowed) canonicalSession(entries map[string]string) (map[string]string, error) {
	out := make(map[string]string, len(entries))
	for _, key := range slices.Sorted(maps.Keys(entries)) {
		rule, known := sessionKeys[key]
		if !known {
			if strings.HasPrefix(key, "ep_factory.") { // no session entry reaches the factory
				return nil, apierr.New(apierr.NotAllowed, nil, "session option %q is not accepted "+
					"from clients: it configures an EP's library when that is loaded, and workers "+
					"load it without", key)
			}
			if !slices.Contains(a, "session/"+key) {
				return nil, unknownEntry(key)
			}
			out[key] = entries[key]
			continue
		}
		switch rule.Class {
		case classRun, classServe:
			continue
		case classDir:
			return nil, apierr.New(apierr.NotAllowed, nil, "session option %q is not accepted "+
				"from clients: it names a directory", key).
				WithHint("send external data as descriptors")
		case classRefused:
			return nil, apierr.New(apierr.NotAllowed, nil, "session option %q is not accepted "+
				"from clients: %s", key, rule.Because)
		}
		v, err := compilers.CanonicalValue(rule.Kind, entries[key])
		if err != nil {
			return nil, apierr.New(apierr.BadRequest, err, "session option %q", key)
		}
		if v != rule.Default {
			out[key] = v
		}
	}
	return out, nil
}

func unknownEntry(key string) error {
	e := apierr.New(apierr.BadRequest, nil, "unknown session option %q", key)
	if near := suggest.Closest(key, maps.Keys(sessionKeys)); near != "" {
		return e.WithHint("did you mean %q?", near)
	}
	return e.WithHint("the administrator can allow it: allow_options = [%q]", "session/"+key)
}
