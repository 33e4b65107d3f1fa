// Package printable makes text of foreign origin safe to print: names of models and files, fields
// of bundles, messages of execution providers. Start reading at Text.
package printable

import (
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Text returns the text with escapes instead of characters that are not printable, because these
// could control a terminal or reorder what it shows: control characters of ASCII and of C1, marks
// of direction, and bytes that are not UTF-8. Newlines, tabs and the runes to keep stay.
func Text(text string, keep ...rune) string {
	plain := func(r rune) bool {
		return unicode.IsPrint(r) || r == '\n' || r == '\t' || slices.Contains(keep, r)
	}
	bad := func(r rune) bool { return r == utf8.RuneError || !plain(r) }
	if !strings.ContainsFunc(text, bad) {
		return text
	}
	var out strings.Builder
	for len(text) > 0 {
		r, n := utf8.DecodeRuneInString(text)
		if plain(r) && (r != utf8.RuneError || n > 1) {
			out.WriteString(text[:n])
		} else {
			quoted := strconv.Quote(text[:n])
			out.WriteString(quoted[1 : len(quoted)-1])
		}
		text = text[n:]
	}
	return out.String()
}
