package upkeep

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestWindow(t *testing.T) {
	at := func(text string) time.Time {
		when, err := time.ParseInLocation("15:04:05", text, time.UTC)
		require.NoError(t, err)
		return when.AddDate(2026, 5, 0)
	}
	for _, c := range []struct {
		window, now string
		opens       time.Duration
	}{
		{"", "12:00:00", 0},
		{"22:00-06:00", "22:00:00", 0},
		{"22:00-06:00", "23:59:59", 0},
		{"22:00-06:00", "05:59:59", 0},
		{"22:00-06:00", "06:00:00", 16 * time.Hour},
		{"22:00-06:00", "21:59:30", 30 * time.Second},
		{"09:15-17:00", "09:14:00", time.Minute},
		{"09:15-17:00", "16:59:59", 0},
		{"09:15-17:00", "17:00:00", 16*time.Hour + 15*time.Minute},
		{"00:00-00:00", "12:00:00", 0},
	} {
		w, err := parseWindow(c.window)
		require.NoError(t, err)
		require.Equal(t, c.opens, w.untilOpen(at(c.now)), "%s at %s", c.window, c.now)
	}
	for _, bad := range []string{"22:00", "22-06", "25:00-06:00", "22:00-06:00-07:00", "-",
		"22:61-06:00"} {
		_, err := RebuildOptions{Window: bad}.Limits()
		require.ErrorContains(t, err, bad)
	}
}
