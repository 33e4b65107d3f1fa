package identity

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// Difference is one field in which two records differ. An empty value means that the field is
// missing.
type Difference struct {
	Field, Asked, Found string
}

// Bounds of the differences reported for one pair of records.
const (
	maxDifferences = 50
	maxValue       = 200 // bytes
)

// Fields are a record's values by their paths: "eps[0].options.precision". A record has each value
// in one spelling, so equal fields mean equal requests.
type Fields map[string]string

// ParseFields reads a request record as JSON.
func ParseFields(record string) (Fields, error) {
	dec := json.NewDecoder(strings.NewReader(record))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return nil, fmt.Errorf("request record: %w", err)
	}
	out := make(Fields)
	out.add("", tree)
	return out, nil
}

func (f Fields) add(path string, value any) {
	switch v := value.(type) {
	case map[string]any:
		for name, inner := range v {
			if path == "" {
				f.add(name, inner)
			} else {
				f.add(path+"."+name, inner)
			}
		}
	case []any:
		for i, inner := range v {
			f.add(fmt.Sprintf("%s[%d]", path, i), inner)
		}
	case string:
		f[path] = v
	case nil: // an empty list
	default: // numbers and booleans
		f[path] = fmt.Sprint(v)
	}
}

// CountDifferences counts the fields in which two records differ.
func (f Fields) CountDifferences(found Fields) int {
	n := 0
	for name, value := range f {
		if other, ok := found[name]; !ok || other != value {
			n++
		}
	}
	for name := range found {
		if _, ok := f[name]; !ok {
			n++
		}
	}
	return n
}

// Differences lists the fields in which found differs, the model first, then in order of names.
func (f Fields) Differences(found Fields) []Difference {
	all := make(Fields, len(f))
	for _, side := range []Fields{f, found} {
		for name := range side {
			all[name] = ""
		}
	}
	delete(all, "model")
	var out []Difference
	for _, name := range append([]string{"model"}, slices.Sorted(maps.Keys(all))...) {
		out = differ(out, name, f[name], found[name])
	}
	return out
}

// differ appends a field if its values differ, up to maxDifferences.
func differ(list []Difference, field, asked, found string) []Difference {
	switch {
	case asked == found:
		return list
	case len(list) == maxDifferences:
		return append(list, Difference{Field: "and more"})
	case len(list) > maxDifferences:
		return list
	}
	return append(list, Difference{Field: Truncated(field), Asked: Truncated(asked),
		Found: Truncated(found)})
}

// Truncated shortens text of clients to maxValue bytes for a report.
func Truncated(s string) string {
	if len(s) <= maxValue {
		return s
	}
	return strings.ToValidUTF8(s[:maxValue], "") + "..."
}

// MakerDifferences compares the libraries that would make a build now with those that made b: for
// each execution provider the facts in the build key, and those that are judged besides. now is nil
// if no build can be made.
func MakerDifferences(now []index.EPFacts, ort string, b *index.Build) []Difference {
	if now == nil {
		return nil
	}
	var out []Difference
	for i := range max(len(now), len(b.EPs)) {
		var asked, found index.EPFacts
		if i < len(now) {
			asked = now[i]
		}
		if i < len(b.EPs) {
			found = b.EPs[i]
		}
		at := "eps[" + strconv.Itoa(i) + "]."
		out = differ(out, at+"name", asked.Name, found.Name)
		out = differ(out, at+"version", asked.Version, found.Version)
		out = differ(out, at+"library_digest", digestText(asked.LibraryDigest),
			digestText(found.LibraryDigest))
		out = differ(out, at+"sdk_version", asked.SDKVersion, found.SDKVersion)
		out = differ(out, at+"hardware_architecture", asked.HardwareArchitecture,
			found.HardwareArchitecture)
		out = differ(out, at+"compatibility_string", asked.CompatibilityString,
			found.CompatibilityString)
		out = differ(out, at+"driver_version", asked.DriverVersion, found.DriverVersion)
		out = differ(out, at+"devices", strings.Join(asked.Devices, ", "),
			strings.Join(found.Devices, ", "))
	}
	return differ(out, "ort_version", ort, b.ORTVersion)
}

func digestText(d cas.Digest) string {
	if d.IsZero() {
		return ""
	}
	return d.String()
}
