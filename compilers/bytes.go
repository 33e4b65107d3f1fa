package compilers

import "fmt"

// ByteSize spells a number of bytes for people: "123 B", "256.0 GiB". Programs get the number itself.
func ByteSize(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/1024, 0
	for value >= 1024 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	return fmt.Sprintf("%.1f %ciB", value, units[unit])
}
