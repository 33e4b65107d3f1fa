package printable

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTextHasNoControls(t *testing.T) {
	for in, want := range map[string]string{
		"plain, größer, 模型\n\tnext":  "plain, größer, 模型\n\tnext",
		"\x1b[2J\x07\r\x00":          `\x1b[2J\a\r\x00`,
		"del \x7f, csi \u009b31m":    `del \x7f, csi \u009b31m`,
		"a\u202egnp.exe\u2066\u200f": `a\u202egnp.exe\u2066\u200f`,
		"line\u2028end":              `line\u2028end`,
		"latin-1 \x9b \xff":          `latin-1 \x9b \xff`,
		"replaced \uFFFD":            "replaced \uFFFD",
		"mark \uE001":                `mark \ue001`,
	} {
		require.Equal(t, want, Text(in))
	}
	require.Equal(t, "mark \uE001", Text("mark \uE001", '\uE001'))
}
