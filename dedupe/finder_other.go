//go:build !amd64

package dedupe

func pairs(at []int32, b []byte, base int32, words int) int { return pairsPortable(at, b, base, words) }
