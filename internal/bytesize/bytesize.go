// Package bytesize reads and writes numbers of bytes for users: "500MiB", "1.5 GiB". It also writes
// durations, so that the daemon and its clients spell them alike.
package bytesize

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

const units = "KMGTPE"

// Text spells a number of bytes: "123 B", "256.0 GiB".
func Text(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/1024, 0
	for value >= 1024 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	return fmt.Sprintf("%.1f %ciB", value, units[unit])
}

// Seconds spells a number of seconds as a duration, with fewer decimals the longer it is.
func Seconds(s float64) string {
	d := time.Duration(s * float64(time.Second))
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(100 * time.Microsecond).String()
	case d < time.Minute:
		return d.Round(10 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

// Parse reads a number of bytes, or one followed by a unit from KiB to EiB. ok is false if the text
// is invalid or the number too large.
func Parse(text string) (n int64, ok bool) {
	digits, unit := text, 1.0
	for i := range len(units) {
		if rest, ok := strings.CutSuffix(text, units[i:i+1]+"iB"); ok {
			digits, unit = rest, math.Exp2(float64(10*(i+1)))
		}
	}
	value, err := strconv.ParseFloat(strings.TrimSpace(digits), 64)
	if err != nil || !(value >= 0) || value*unit >= math.MaxInt64 {
		return 0, false
	}
	return int64(value * unit), true
}
