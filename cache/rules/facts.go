package rules

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Facts is what is known of one side: of a build, or of a runtime on this machine. Empty fields are unknown.
type Facts struct {
	EP                   string // canonical name, e.g. "QNNExecutionProvider"; the same on both sides
	EPVersion            string // the EP's own metadata; not always telling
	LibraryDigest        string
	SDKVersion           string // attribute ep_sdk_version
	HardwareArchitecture string
	CompatibilityString  string // metadata ep_compatibility_info.<EP>
	DriverVersion        string
	ORTVersion           string
	IRVersion            int64 // of the build's graph; runtimes have none
}

// maxFact bounds a fact: what is longer does not count as known. Real compatibility strings have a few hundred bytes.
const maxFact = 64 << 10

const compatibilityString = "compatibility_string" // the fact that most others are taken out of

func (f Facts) given() map[string]string {
	m := map[string]string{
		"ep_version": f.EPVersion, "library_digest": f.LibraryDigest, "sdk_version": f.SDKVersion,
		"hardware_architecture": f.HardwareArchitecture, compatibilityString: f.CompatibilityString,
		"driver_version": f.DriverVersion, "ort_version": f.ORTVersion, "ir_version": "",
	}
	if f.IRVersion > 0 {
		m["ir_version"] = strconv.FormatInt(f.IRVersion, 10)
	}
	for name, value := range m {
		if len(value) > maxFact {
			m[name] = ""
		}
	}
	return m
}

var givenNames = slices.Sorted(maps.Keys(Facts{}.given()))

type extract struct {
	From   string  `toml:"from" is:"text"`
	JSON   string  `toml:"json" is:"text"` // keys from the outside in; "": the fact is no JSON
	Regexp pattern `toml:"regexp"`         // its named groups are the facts; nil: the whole is one
	As     string  `toml:"as" is:"text"`   // its name, without regexp
}

func (e extract) names() []string {
	if e.Regexp.Regexp == nil {
		return []string{e.As}
	}
	return slices.DeleteFunc(slices.Clone(e.Regexp.SubexpNames()), func(name string) bool { return name == "" })
}

// add puts into facts what is there and not known yet: of several extracts for one fact, the first that finds it counts.
func (e extract) add(facts map[string]string) {
	text := facts[e.From]
	if text == "" {
		return
	}
	if e.JSON != "" {
		if text = jsonValue(text, strings.Split(e.JSON, ".")); text == "" {
			return
		}
	}
	if e.Regexp.Regexp == nil {
		addFact(facts, e.As, text)
		return
	}
	match := e.Regexp.FindStringSubmatch(text)
	if match == nil {
		return
	}
	for i, name := range e.Regexp.SubexpNames() {
		addFact(facts, name, match[i])
	}
}

func addFact(facts map[string]string, name, value string) {
	if name != "" && facts[name] == "" {
		facts[name] = value
	}
}

func jsonValue(text string, keys []string) string {
	raw := json.RawMessage(text)
	for _, key := range keys {
		var object map[string]json.RawMessage
		if json.Unmarshal(raw, &object) != nil {
			return "" // other versions of an EP write other strings
		}
		raw = object[key]
	}
	var value any
	if json.Unmarshal(raw, &value) != nil {
		return ""
	}
	switch v := value.(type) {
	case string:
		return v
	case float64, bool:
		return string(raw)
	}
	return ""
}
