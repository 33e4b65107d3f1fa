package wire

import (
	"encoding/hex"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
)

// MaxReply keeps an answer of unknown length well inside a frame.
const MaxReply = MaxFrame - 64<<10

// SpaceLeft is the space left in an answer, in bytes. An answer is cut where its frame is full.
type SpaceLeft int

// Reserve reports whether a message still fits, and counts it.
func (l *SpaceLeft) Reserve(m proto.Message) bool { return l.ReserveBytes(proto.Size(m)) }

// ReserveBytes reports whether a field of n bytes still fits, and counts it. After the first that
// does not fit, none fits, so that an answer is the beginning of a list.
func (l *SpaceLeft) ReserveBytes(n int) bool {
	const head = 8 // a field's tag and length, at most
	if *l < SpaceLeft(n+head) {
		*l = 0
		return false
	}
	*l -= SpaceLeft(n + head)
	return true
}

// Valid replaces bytes that are not UTF-8, which protobuf refuses: compilers and drivers print any.
func Valid(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }

// Clip shortens a name or a reason, so that many of them fit into a frame.
func Clip(text string) string { return Valid(text[:min(len(text), 400)]) }

// KeyText returns a key in hexadecimal digits, and "" for the zero key.
func KeyText(key [32]byte) string {
	if key == [32]byte{} {
		return ""
	}
	return hex.EncodeToString(key[:])
}

// Milliseconds returns Unix time, and 0 for the zero time.
func Milliseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}
