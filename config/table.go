package config

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/spelling"
	"github.com/epcached/epcached/tomlfile"
)

// table reads one table of a document. Each method takes one field: it leaves the target alone where the field is not there, notes an error where the
// value does not do, and notes the field for Fields. What was never taken is not known, and done says so.
type table struct {
	document *tomlfile.Document
	settings *Settings
	path     []string
	values   map[string]any
	taken    map[string]bool
}

func (s *Settings) root(d *tomlfile.Document) *table {
	return (&table{document: d, settings: s}).inner(d.Values)
}

// take gives a field's value. show gives the value in force, for Fields.
func (t *table) take(name string, show func() any) (any, bool) {
	t.taken[name] = true
	v, there := t.values[name]
	if show != nil {
		t.settings.fields = append(t.settings.fields, field{append(slices.Clone(t.path), name), t.origin(name, there), t.at(name), show})
	}
	return v, there
}

func (t *table) origin(name string, there bool) string {
	if !there {
		return fromDefault
	}
	return fmt.Sprintf("%s:%d", t.document.File, t.at(name).Line)
}

func (t *table) spell(name ...string) string { return tomlfile.Spell(t.pathOf(name...)) }

func (t *table) at(name ...string) Position { return t.document.At(t.pathOf(name...)) }

func (t *table) pathOf(name ...string) []string { return append(slices.Clone(t.path), name...) }

// wrong notes that a field, or an element of it, does not do.
func (t *table) wrong(text string, name ...string) { t.document.Wrong(t.pathOf(name...), text) }

// done notes the fields that nobody took.
func (t *table) done() {
	for name := range t.values {
		if t.taken[name] {
			continue
		}
		if why, was := removed[t.spell(name)]; was {
			t.settings.warnings = append(t.settings.warnings, &Error{File: t.document.File,
				Position: t.at(name), Field: t.spell(name), Text: "it has no effect any more: " + why})
			continue
		}
		text := fmt.Sprintf("unknown field %q", t.spell(name))
		if like := spelling.Closest(name, maps.Keys(t.taken)); like != "" {
			text += fmt.Sprintf("; is it %q?", like)
		}
		t.document.Add(&Error{File: t.document.File, Position: t.at(name), Text: text})
	}
}

// text takes a text that check, where there is one, finds nothing wrong with.
func (t *table) text(name string, to *string, check func(string) error) {
	v, there := t.take(name, func() any { return *to })
	if !there {
		return
	}
	text, ok := v.(string)
	if !ok {
		said := "it is " + tomlfile.Kind(v) + ", not a text in quotes"
		if meant := fmt.Sprint(v); check != nil && check(meant) == nil {
			said += fmt.Sprintf(": write %s = %q", name, meant)
		}
		t.wrong(said, name)
		return
	}
	if check != nil {
		if err := check(text); err != nil {
			t.wrong(err.Error(), name)
			return
		}
	}
	*to = text
}

// file takes a path. One that is not absolute is meant from the configuration's folder on: a service is started anywhere.
func (t *table) file(name string, to *string) {
	t.text(name, to, notEmpty)
	*to = t.document.Absolute(*to)
}

// choice takes one of a few words.
func (t *table) choice(name string, to *string, words ...string) {
	t.text(name, to, func(text string) error {
		if !slices.Contains(words, text) {
			return fmt.Errorf("%q: it is one of %s", text, strings.Join(words, ", "))
		}
		return nil
	})
}

func (t *table) truth(name string, to *bool) {
	v, there := t.take(name, func() any { return *to })
	if !there {
		return
	}
	b, ok := v.(bool)
	if !ok {
		t.wrong("it is "+tomlfile.Kind(v)+", not true or false", name)
		return
	}
	*to = b
}

// count takes a whole number of at least least and at most most.
func (t *table) count(name string, to *uint64, least, most uint64) {
	if v, there := t.take(name, func() any { return *to }); there {
		t.whole(v, to, least, most, name)
	}
}

func (t *table) whole(v any, to *uint64, least, most uint64, name ...string) {
	n, ok := v.(int64)
	switch {
	case !ok:
		t.wrong("it is "+tomlfile.Kind(v)+", not a whole number", name...)
	case n < 0, uint64(n) < least, uint64(n) > most:
		t.wrong(fmt.Sprintf("%d is not %s", n, bounds(float64(least), float64(most))), name...)
	default:
		*to = uint64(n)
	}
}

// number takes a number of at least least and at most most, whole or not.
func (t *table) number(name string, to *float64, least, most float64) {
	v, there := t.take(name, func() any { return *to })
	if !there {
		return
	}
	n, ok := v.(float64)
	if i, whole := v.(int64); whole {
		n, ok = float64(i), true
	}
	switch {
	case !ok:
		t.wrong("it is "+tomlfile.Kind(v)+", not a number", name)
	case math.IsNaN(n), n < least, n > most:
		t.wrong(fmt.Sprintf("%v is not %s", n, bounds(least, most)), name)
	default:
		*to = n
	}
}

func bounds(least, most float64) string {
	number := func(n float64) string {
		if n == math.Trunc(n) {
			return strconv.FormatInt(int64(n), 10) // all digits of 1<<62
		}
		return strconv.FormatFloat(n, 'f', -1, 64)
	}
	if most >= math.MaxInt64 || math.IsInf(most, 1) {
		return number(least) + " or more"
	}
	return number(least) + " to " + number(most)
}

// texts takes an array of texts.
func (t *table) texts(name string, to *[]string, check func(string) error) {
	v, there := t.take(name, func() any { return *to })
	if !there {
		return
	}
	*to = nil
	for i, e := range t.array(v, name) {
		text, ok := e.(string)
		if !ok {
			t.wrong("it is "+tomlfile.Kind(e)+", not a text in quotes", name, strconv.Itoa(i))
			continue
		}
		if check != nil {
			if err := check(text); err != nil {
				t.wrong(err.Error(), name, strconv.Itoa(i))
			}
		}
		*to = append(*to, text)
	}
}

// users takes an array of user ids. The highest number is no user: the kernel means "none" by it.
func (t *table) users(name string, to *[]uint32) {
	v, there := t.take(name, func() any { return *to })
	if !there {
		return
	}
	*to = nil
	for i, e := range t.array(v, name) {
		var uid uint64
		t.whole(e, &uid, 0, math.MaxUint32-1, name, strconv.Itoa(i))
		*to = append(*to, uint32(uid))
	}
}

// files takes an array of paths, as file does.
func (t *table) files(name string, to *[]string) {
	t.texts(name, to, notEmpty)
	for i := range *to {
		(*to)[i] = t.document.Absolute((*to)[i])
	}
}

func (t *table) array(v any, name string) []any {
	list, ok := v.([]any)
	if !ok {
		t.wrong("it is "+tomlfile.Kind(v)+", not an array in brackets", name)
	}
	return list
}

// table takes a table; it is empty where there is none, so that its fields are noted with their defaults.
func (t *table) table(name string) *table {
	v, there := t.take(name, nil)
	values, ok := v.(map[string]any)
	if there && !ok {
		t.wrong("it is "+tomlfile.Kind(v)+", not a table", name)
	}
	return t.inner(values, name)
}

// tables takes an array of tables.
func (t *table) tables(name string) []*table {
	v, there := t.take(name, nil)
	if !there {
		return nil
	}
	var all []*table
	for i, e := range t.array(v, name) {
		values, ok := e.(map[string]any)
		if !ok {
			t.wrong("it is "+tomlfile.Kind(e)+", not a table", name, strconv.Itoa(i))
			continue
		}
		all = append(all, t.inner(values, name, strconv.Itoa(i)))
	}
	return all
}

func (t *table) inner(values map[string]any, name ...string) *table {
	return &table{document: t.document, settings: t.settings, path: append(slices.Clone(t.path), name...), values: values, taken: map[string]bool{}}
}
