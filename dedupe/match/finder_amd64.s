#include "textflag.h"

// func pairsAVX2(at *int32, b *byte, base int32, words int) int
// Reads 64*words+1 bytes at b and writes up to 4 elements behind the last one.
// words is more than 0.
TEXT ·pairsAVX2(SB), NOSPLIT, $0-40
	MOVQ at+0(FP), DI
	MOVQ b+8(FP), SI
	MOVL base+16(FP), R8
	MOVQ words+24(FP), CX
	MOVQ DI, R13
	MOVL $0x3f3f3f3f, AX      // pairMask
	MOVL $0x03030303, BX      // pairDiffers
	VMOVD AX, X4
	VMOVD BX, X5
	VPBROADCASTD X4, Y4
	VPBROADCASTD X5, Y5

word:
	VMOVDQU (SI), Y0
	VMOVDQU 32(SI), Y1
	VPXOR 1(SI), Y0, Y0
	VPXOR 33(SI), Y1, Y1
	VPAND Y4, Y0, Y0
	VPAND Y4, Y1, Y1
	VPCMPEQB Y5, Y0, Y0
	VPCMPEQB Y5, Y1, Y1
	VPMOVMSKB Y0, AX
	VPMOVMSKB Y1, BX
	SHLQ $32, BX
	ORQ BX, AX

	// Few words have more than four bits: what is written too much is overwritten.
	POPCNTQ AX, DX
	TZCNTQ AX, R9
	BLSRQ AX, AX
	ADDL R8, R9
	MOVL R9, (DI)
	TZCNTQ AX, R10
	BLSRQ AX, AX
	ADDL R8, R10
	MOVL R10, 4(DI)
	TZCNTQ AX, R11
	BLSRQ AX, AX
	ADDL R8, R11
	MOVL R11, 8(DI)
	TZCNTQ AX, R12
	BLSRQ AX, AX
	ADDL R8, R12
	MOVL R12, 12(DI)
	TESTQ AX, AX
	JNZ more

next:
	LEAQ (DI)(DX*4), DI
	ADDQ $64, SI
	ADDL $64, R8
	DECQ CX
	JNZ word
	SUBQ R13, DI
	SHRQ $2, DI
	MOVQ DI, ret+32(FP)
	VZEROUPPER
	RET

more:
	LEAQ 16(DI), R9

one:
	TZCNTQ AX, R10
	BLSRQ AX, AX
	ADDL R8, R10
	MOVL R10, (R9)
	ADDQ $4, R9
	TESTQ AX, AX
	JNZ one
	JMP next
