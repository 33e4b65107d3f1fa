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

// whenEmpty says what a value stands for that says nothing by itself.
var whenEmpty = map[string]string{
	"worker": "epcached-ort beside epcached", "worker_user": "the daemon's own", "jobs": "one for each processor",
	"jobs_memory_bytes": "half of the machine's memory", "max_age": "no limit", "unpacked_dir": "in the state directory", "window": "always",
	"idle_exit": "never, and 15m for a daemon that a client started",
}

// Print writes the settings in force as a file that would make them, with a comment behind each value that says where it is from.
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
			continue // of the fields that exclude each other
		}
		if h := tomlfile.Spell(table); h != header {
			header = h
			text.WriteString("\n" + heading(table, element) + "\n")
		}
		name := f.path[len(f.path)-1]
		origin := f.Origin
		if empty := whenEmpty[name]; empty != "" && isZero(f.Value) {
			origin += ": " + empty
		}
		if f.Origin == fromDefault && f.Value == "" {
			text.WriteString("# ") // there is no value to write that means the same
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

// spellText quotes as TOML's basic strings do, which know fewer escapes than Go's.
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

// oneLine keeps a file's name from ending the comment.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) {
			return r
		}
		return '?'
	}, text)
}
