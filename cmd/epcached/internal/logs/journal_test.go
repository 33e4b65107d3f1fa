package logs

import (
	"bytes"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

// Names of files and texts of execution providers are in errors and log lines.
func TestErrorsArePrintable(t *testing.T) {
	const hostile = "views/a\x1b[2J\u009b1m\u202e\x7f"
	var out bytes.Buffer
	WriteFatal(&out, "epcached: "+hostile+"\nepcached: hint: none")
	require.Equal(t, `epcached: views/a\x1b[2J\u009b1m\u202e\x7f`+"\nepcached: hint: none\n",
		out.String())
	out.Reset()
	New(&out, slog.LevelInfo).Info(hostile, "error", hostile)
	require.Contains(t, out.String(), `msg="views/a\x1b[2J\u009b1m\u202e\x7f" error="views/a`)
}
