package config

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/internal/tomlfile"
)

// emptyDefaults has descriptions of empty default values.
var emptyDefaults = map[string]string{
	"worker": "epcached-ort beside epcached", "worker_user": "the daemon's own",
	"jobs": "one for each processor", "jobs_memory_bytes": "half of the machine's memory",
	"memory_bytes": "three quarters of the machine's memory",
	"max_age":      "no limit", "window": "always", "rate": "no limit",
	"signing_key": "the credential signing-key of the unit, if there is one",
	"idle_exit":   "never, or 15m for a daemon started by a client",
}

// Print writes the settings in effect as a file that would make them, with a comment behind each
// value that says where it is from.
func (s *Settings) Print(w io.Writer) error {
	var text strings.Builder
	for _, w := range s.warnings {
		fmt.Fprintf(&text, "# warning: %s\n", oneLine(w.Error()))
	}
	header := ""
	for _, f := range s.Fields() {
		table := f.path[:len(f.path)-1]
		element := len(table) > 0 && isIndex(table[len(table)-1])
		if element && f.Origin == fromDefault {
			continue // one of fields that exclude each other
		}
		if h := tomlfile.Spell(table); h != header {
			header = h
			text.WriteString("\n" + heading(table, element) + "\n")
		}
		name := f.path[len(f.path)-1]
		origin := f.Origin
		if empty := emptyDefaults[name]; empty != "" && isZero(f.Value) {
			origin += ": " + empty
		}
		if f.Origin == fromDefault && f.Value == "" {
			text.WriteString("# ") // no value has the same meaning
		}
		fmt.Fprintf(&text, "%s = %s  # %s\n", spellKey(name), spellValue(f.Value), oneLine(origin))
	}
	_, err := io.WriteString(w, text.String())
	return err
}

func isIndex(part string) bool {
	_, err := strconv.Atoi(part)
	return err == nil
}

func heading(table []string, element bool) string {
	var parts []string
	for _, part := range table {
		if !isIndex(part) {
			parts = append(parts, spellKey(part))
		}
	}
	text := "[" + strings.Join(parts, ".") + "]"
	if element {
		return "[" + text + "]"
	}
	return text
}

var bareKey = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

func spellKey(key string) string {
	if bareKey.MatchString(key) {
		return key
	}
	return spellText(key)
}

// spellText quotes a TOML basic string, which has fewer escapes than Go's.
func spellText(text string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range text {
		switch {
		case r == '"' || r == '\\':
			b.WriteString(`\` + string(r))
		case !strconv.IsPrint(r):
			fmt.Fprintf(&b, `\U%08X`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

func spellValue(v any) string {
	switch v := v.(type) {
	case string:
		return spellText(v)
	case float64:
		text := strconv.FormatFloat(v, 'f', -1, 64)
		if !strings.Contains(text, ".") {
			text += ".0"
		}
		return text
	case []string:
		parts := make([]string, len(v))
		for i, one := range v {
			parts[i] = spellText(one)
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case []uint32:
		return strings.ReplaceAll(fmt.Sprint(v), " ", ", ")
	}
	return fmt.Sprint(v) // true, false and whole numbers
}

func isZero(v any) bool { return slices.Contains([]string{`""`, "0"}, spellValue(v)) }

// oneLine removes line breaks from a file's name, which would end the comment.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) {
			return r
		}
		return '?'
	}, text)
}

const fromDefault = "default"

// Field is one value in effect. In JSON it is a contract for scripts.
type Field struct {
	Name  string `json:"name"`  // "limits.wall_seconds", "runtime[1].directory"
	Value any    `json:"value"` // string, bool, uint64, float64, []string, []uint32
	// "default", "/etc/epcached/epcached.toml:12", "flag --state", "policy.max_age"
	Origin string `json:"origin"`

	path []string
}

// field is a Field that reads its value when it is printed, because a flag may set it later.
type field struct {
	path   []string
	origin string
	at     Position // in the file; zero: not in the file
	show   func() any
}

// Fields lists every value in effect, in the order in which doc/configuration.md describes them.
func (s *Settings) Fields() []Field {
	out := make([]Field, len(s.fields))
	for i, f := range s.fields {
		out[i] = Field{tomlfile.Spell(f.path), f.show(), f.origin, f.path}
	}
	return out
}

// Flag records that a field's value is from a flag, which goes before the file.
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
		first[i] = field{path: []string{"runtime", strconv.Itoa(i), "directory"},
			origin: "flag --" + flag, show: func() any { return r.Directory }}
	}
	at := slices.IndexFunc(s.fields, func(f field) bool {
		return f.path[0] == "runtime" || f.path[0] == "limits"
	})
	for _, f := range s.fields {
		if f.path[0] == "runtime" {
			i, _ := strconv.Atoi(f.path[1]) // always an index
			f.path[1] = strconv.Itoa(i + len(flagged))
		}
	}
	s.fields = slices.Insert(s.fields, at, first...)
}
