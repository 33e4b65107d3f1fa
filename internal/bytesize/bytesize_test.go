package bytesize

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestText(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB",
		1536: "1.5 KiB", 256 << 30: "256.0 GiB", math.MaxInt64: "8.0 EiB"} {
		require.Equal(t, want, Text(n))
	}
}

func TestSeconds(t *testing.T) {
	for s, want := range map[float64]string{0: "0s", 0.00042: "420µs", 0.31742: "317.4ms",
		6.3349: "6.33s", 83.4: "1m23s"} {
		require.Equal(t, want, Seconds(s))
	}
}

func TestParse(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "1073741824": 1 << 30, "20GiB": 20 << 30,
		"1.5 MiB": 3 << 19, "1KiB": 1 << 10, "2TiB": 2 << 40, "3PiB": 3 << 50, "7EiB": 7 << 60,
		"0.5": 0} {
		n, ok := Parse(text)
		require.True(t, ok, text)
		require.Equal(t, want, n, text)
	}
	for _, text := range []string{"", "GiB", "much", "-1", "-1KiB", "NaN", "Inf", "1e30", "9e6TiB",
		"8388608TiB", "8EiB", "20GB", "1 KiB MiB", "15%"} {
		_, ok := Parse(text)
		require.False(t, ok, text)
	}
}
