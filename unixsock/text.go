package unixsock

import (
	"strings"
	"unicode/utf8"
)

// cut shortens text to at most n bytes, at the boundary of a character, and makes it valid UTF-8: protobuf
// refuses strings that are not, and compilers print anything.
func cut(text string, n int) string {
	if len(text) > n {
		for n > 0 && !utf8.RuneStart(text[n]) {
			n--
		}
		text = text[:n]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
