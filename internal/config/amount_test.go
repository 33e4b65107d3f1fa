package config

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAmounts(t *testing.T) {
	for text, want := range map[string]Amount{
		"": {}, "1": {Bytes: 1}, "4096": {Bytes: 4096}, "1.5KiB": {Bytes: 1536},
		"2 MiB": {Bytes: 2 << 20}, "20GiB": {Bytes: 20 << 30},
		"1TiB": {Bytes: 1 << 40}, "15%": {Percent: 15}, "0.5%": {Percent: 0.5},
		"100%": {Percent: 100},
	} {
		got, err := ParseAmount(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{"0", "0KiB", "0%", "101%", "-1", "1GB", "x", "NaN", "NaN%",
		"9999999TiB", "%", "GiB", "1e400"} {
		_, err := ParseAmount(text)
		require.Error(t, err, text)
	}
}
