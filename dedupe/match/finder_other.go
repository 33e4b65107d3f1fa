//go:build !amd64

package match

func pairs(at []int32, b []byte, base int32,
	words int) int {
	return pairsPortable(at, b, base, words)
}
