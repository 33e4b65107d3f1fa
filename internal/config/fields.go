package config

import (
	"slices"
	"strconv"

	"github.com/epcached/epcached/internal/tomlfile"
)

const fromDefault = "default"

// Field is one value in force. In JSON it is a contract for scripts.
type Field struct {
	Name   string `json:"name"`   // "limits.wall_seconds", "runtime[1].directory"
	Value  any    `json:"value"`  // string, bool, uint64, float64, []string, []uint32
	Origin string `json:"origin"` // "default", "/etc/epcached/epcached.toml:12", "flag --state", "policy.max_age"

	path []string
}

// field is a Field whose value is looked at when it is asked for: it may be set later, by a flag.
type field struct {
	path   []string
	origin string
	at     Position // in the file; zero: it is not there
	show   func() any
}

// Fields lists every value in force, in the order in which doc/configuration.md describes them.
func (s *Settings) Fields() []Field {
	out := make([]Field, len(s.fields))
	for i, f := range s.fields {
		out[i] = Field{tomlfile.Spell(f.path), f.show(), f.origin, f.path}
	}
	return out
}

// Flag notes that a field's value is from a flag, which goes before the file.
func (s *Settings) Flag(name, flag string) {
	for i := range s.fields {
		if tomlfile.Spell(s.fields[i].path) == name {
			s.fields[i].origin = "flag --" + flag
		}
	}
}

// PreferRuntimes puts runtimes that a flag names before those of the file.
func (s *Settings) PreferRuntimes(flagged []Runtime, flag string) {
	s.Runtimes = append(flagged, s.Runtimes...)
	first := make([]field, len(flagged))
	for i, r := range flagged {
		first[i] = field{path: []string{"runtime", strconv.Itoa(i), "directory"}, origin: "flag --" + flag, show: func() any { return r.Directory }}
	}
	at := slices.IndexFunc(s.fields, func(f field) bool { return f.path[0] == "runtime" || f.path[0] == "limits" })
	for _, f := range s.fields {
		if f.path[0] == "runtime" {
			i, _ := strconv.Atoi(f.path[1]) // an index, by its making
			f.path[1] = strconv.Itoa(i + len(flagged))
		}
	}
	s.fields = slices.Insert(s.fields, at, first...)
}
