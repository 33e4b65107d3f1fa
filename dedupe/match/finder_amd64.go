package match

import "golang.org/x/sys/cpu"

var hasAVX2 = cpu.X86.HasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasPOPCNT

// pairs is pairsPortable, for 32 positions at a time if the processor has AVX2.
func pairs(at []int32, b []byte, base int32, words int) int {
	if !hasAVX2 || words == 0 {
		return pairsPortable(at, b, base, words)
	}
	_, _ = b[64*words], at[64*words+pairsSpare-1]
	return pairsAVX2(&at[0], &b[0], base, words)
}

//go:noescape
func pairsAVX2(at *int32, b *byte, base int32, words int) int
