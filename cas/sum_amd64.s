#include "textflag.h"

// BLAKE3's compression of sixteen inputs side by side: lane k of each vector
// belongs to input k. Z0-Z15 are the state, Z16-Z31 the words of the message.

DATA iv<>+0(SB)/4, $0x6A09E667
DATA iv<>+4(SB)/4, $0xBB67AE85
DATA iv<>+8(SB)/4, $0x3C6EF372
DATA iv<>+12(SB)/4, $0xA54FF53A
DATA iv<>+16(SB)/4, $0x510E527F
DATA iv<>+20(SB)/4, $0x9B05688C
DATA iv<>+24(SB)/4, $0x1F83D9AB
DATA iv<>+28(SB)/4, $0x5BE0CD19
GLOBL iv<>(SB), RODATA|NOPTR, $32

// Where a lane's chaining value begins, in bytes.
DATA at<>+0(SB)/8, $0x0000002000000000
DATA at<>+8(SB)/8, $0x0000006000000040
DATA at<>+16(SB)/8, $0x000000a000000080
DATA at<>+24(SB)/8, $0x000000e0000000c0
DATA at<>+32(SB)/8, $0x0000012000000100
DATA at<>+40(SB)/8, $0x0000016000000140
DATA at<>+48(SB)/8, $0x000001a000000180
DATA at<>+56(SB)/8, $0x000001e0000001c0
GLOBL at<>(SB), RODATA|NOPTR, $64

// A quarter of a round for four columns or diagonals: a += b + m; d = (d ^ a) >>> r; c += d; b = (b ^ c) >>> s.
#define HALF(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, m0, m1, m2, m3, r, s) \
	VPADDD m0, a0, a0; VPADDD m1, a1, a1; VPADDD m2, a2, a2; VPADDD m3, a3, a3; \
	VPADDD b0, a0, a0; VPADDD b1, a1, a1; VPADDD b2, a2, a2; VPADDD b3, a3, a3; \
	VPXORD a0, d0, d0; VPXORD a1, d1, d1; VPXORD a2, d2, d2; VPXORD a3, d3, d3; \
	VPRORD r, d0, d0; VPRORD r, d1, d1; VPRORD r, d2, d2; VPRORD r, d3, d3; \
	VPADDD d0, c0, c0; VPADDD d1, c1, c1; VPADDD d2, c2, c2; VPADDD d3, c3, c3; \
	VPXORD c0, b0, b0; VPXORD c1, b1, b1; VPXORD c2, b2, b2; VPXORD c3, b3, b3; \
	VPRORD s, b0, b0; VPRORD s, b1, b1; VPRORD s, b2, b2; VPRORD s, b3, b3

#define ROUND(m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15) \
	HALF(Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, Z8, Z9, Z10, Z11, Z12, Z13, Z14, Z15, m0, m2, m4, m6, $16, $12) \
	HALF(Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, Z8, Z9, Z10, Z11, Z12, Z13, Z14, Z15, m1, m3, m5, m7, $8, $7) \
	HALF(Z0, Z1, Z2, Z3, Z5, Z6, Z7, Z4, Z10, Z11, Z8, Z9, Z15, Z12, Z13, Z14, m8, m10, m12, m14, $16, $12) \
	HALF(Z0, Z1, Z2, Z3, Z5, Z6, Z7, Z4, Z10, Z11, Z8, Z9, Z15, Z12, Z13, Z14, m9, m11, m13, m15, $8, $7)

// Four rows become four quarters of columns: words 4l, 4l+1, 4l+2 and 4l+3 of the rows stand in part l of a, b, c and d.
#define FOUR(a, b, c, d) \
	VPUNPCKLDQ b, a, Z8; \
	VPUNPCKHDQ b, a, Z9; \
	VPUNPCKLDQ d, c, Z10; \
	VPUNPCKHDQ d, c, Z11; \
	VPUNPCKLQDQ Z10, Z8, a; \
	VPUNPCKHQDQ Z10, Z8, b; \
	VPUNPCKLQDQ Z11, Z9, c; \
	VPUNPCKHQDQ Z11, Z9, d

// Parts l of a, b, c and d become the l-th of them.
#define PARTS(a, b, c, d) \
	VSHUFI32X4 $0x88, b, a, Z8; \
	VSHUFI32X4 $0xdd, b, a, Z9; \
	VSHUFI32X4 $0x88, d, c, Z10; \
	VSHUFI32X4 $0xdd, d, c, Z11; \
	VSHUFI32X4 $0x88, Z10, Z8, a; \
	VSHUFI32X4 $0x88, Z11, Z9, b; \
	VSHUFI32X4 $0xdd, Z10, Z8, c; \
	VSHUFI32X4 $0xdd, Z11, Z9, d

#define OUT(n, z) \
	KXNORW K1, K1, K1; \
	VPSCATTERDD z, K1, n(DI)(Z8*1)

// func compress16AVX512(a inputs)
// Reads blocks of 64 bytes at in, in+stride, ... and in+15*stride. low and high
// are the counters of the lanes; flags hold for all blocks, first and last for
// the first and the last one besides. out may begin where in does.
TEXT ·compress16AVX512(SB), NOSPLIT, $0-56
	MOVQ a_out+0(FP), DI
	MOVQ a_in+8(FP), SI
	MOVQ a_stride+16(FP), R8
	MOVQ a_blocks+24(FP), CX
	MOVQ a_low+32(FP), DX
	MOVL a_flags+44(FP), AX
	ORL a_first+48(FP), AX
	LEAQ (R8)(R8*2), R9

	VPBROADCASTD iv<>+0(SB), Z0
	VPBROADCASTD iv<>+4(SB), Z1
	VPBROADCASTD iv<>+8(SB), Z2
	VPBROADCASTD iv<>+12(SB), Z3
	VPBROADCASTD iv<>+16(SB), Z4
	VPBROADCASTD iv<>+20(SB), Z5
	VPBROADCASTD iv<>+24(SB), Z6
	VPBROADCASTD iv<>+28(SB), Z7

block:
	LEAQ (SI)(R8*4), R10
	LEAQ (SI)(R8*8), R11
	LEAQ (R10)(R8*8), R12
	VMOVDQU32 (SI), Z16
	VMOVDQU32 (SI)(R8*1), Z17
	VMOVDQU32 (SI)(R8*2), Z18
	VMOVDQU32 (SI)(R9*1), Z19
	VMOVDQU32 (R10), Z20
	VMOVDQU32 (R10)(R8*1), Z21
	VMOVDQU32 (R10)(R8*2), Z22
	VMOVDQU32 (R10)(R9*1), Z23
	VMOVDQU32 (R11), Z24
	VMOVDQU32 (R11)(R8*1), Z25
	VMOVDQU32 (R11)(R8*2), Z26
	VMOVDQU32 (R11)(R9*1), Z27
	VMOVDQU32 (R12), Z28
	VMOVDQU32 (R12)(R8*1), Z29
	VMOVDQU32 (R12)(R8*2), Z30
	VMOVDQU32 (R12)(R9*1), Z31
	FOUR(Z16, Z17, Z18, Z19)
	FOUR(Z20, Z21, Z22, Z23)
	FOUR(Z24, Z25, Z26, Z27)
	FOUR(Z28, Z29, Z30, Z31)

	// Word 4l+j comes to stand in Z(16+4l+j).
	PARTS(Z16, Z20, Z24, Z28)
	PARTS(Z17, Z21, Z25, Z29)
	PARTS(Z18, Z22, Z26, Z30)
	PARTS(Z19, Z23, Z27, Z31)

	CMPQ CX, $1
	JNE middle
	ORL a_last+52(FP), AX

middle:
	MOVL $64, BX
	MOVL a_high+40(FP), R13
	VPBROADCASTD iv<>+0(SB), Z8
	VPBROADCASTD iv<>+4(SB), Z9
	VPBROADCASTD iv<>+8(SB), Z10
	VPBROADCASTD iv<>+12(SB), Z11
	VMOVDQU32 (DX), Z12
	VPBROADCASTD R13, Z13
	VPBROADCASTD BX, Z14
	VPBROADCASTD AX, Z15

	ROUND(Z16, Z17, Z18, Z19, Z20, Z21, Z22, Z23, Z24, Z25, Z26, Z27, Z28, Z29, Z30, Z31)
	ROUND(Z18, Z22, Z19, Z26, Z23, Z16, Z20, Z29, Z17, Z27, Z28, Z21, Z25, Z30, Z31, Z24)
	ROUND(Z19, Z20, Z26, Z28, Z29, Z18, Z23, Z30, Z22, Z21, Z25, Z16, Z27, Z31, Z24, Z17)
	ROUND(Z26, Z23, Z28, Z25, Z30, Z19, Z29, Z31, Z20, Z16, Z27, Z18, Z21, Z24, Z17, Z22)
	ROUND(Z28, Z29, Z25, Z27, Z31, Z26, Z30, Z24, Z23, Z18, Z21, Z19, Z16, Z17, Z22, Z20)
	ROUND(Z25, Z30, Z27, Z21, Z24, Z28, Z31, Z17, Z29, Z19, Z16, Z26, Z18, Z22, Z20, Z23)
	ROUND(Z27, Z31, Z21, Z16, Z17, Z25, Z24, Z22, Z30, Z26, Z18, Z28, Z19, Z20, Z23, Z29)

	VPXORD Z8, Z0, Z0
	VPXORD Z9, Z1, Z1
	VPXORD Z10, Z2, Z2
	VPXORD Z11, Z3, Z3
	VPXORD Z12, Z4, Z4
	VPXORD Z13, Z5, Z5
	VPXORD Z14, Z6, Z6
	VPXORD Z15, Z7, Z7

	MOVL a_flags+44(FP), AX
	ADDQ $64, SI
	DECQ CX
	JNZ block

	VMOVDQU32 at<>(SB), Z8
	OUT(0, Z0)
	OUT(4, Z1)
	OUT(8, Z2)
	OUT(12, Z3)
	OUT(16, Z4)
	OUT(20, Z5)
	OUT(24, Z6)
	OUT(28, Z7)
	VZEROUPPER
	RET


// BLAKE3's compression of eight inputs side by side, for processors without AVX-512: Y0-Y15 are the state, the words
// of the message stand in memory.

// Bytes of each word rotated by 16 and by 8 bits.
DATA rot16<>+0(SB)/8, $0x0504070601000302
DATA rot16<>+8(SB)/8, $0x0D0C0F0E09080B0A
DATA rot16<>+16(SB)/8, $0x0504070601000302
DATA rot16<>+24(SB)/8, $0x0D0C0F0E09080B0A
GLOBL rot16<>(SB), RODATA|NOPTR, $32
DATA rot8<>+0(SB)/8, $0x0407060500030201
DATA rot8<>+8(SB)/8, $0x0C0F0E0D080B0A09
DATA rot8<>+16(SB)/8, $0x0407060500030201
DATA rot8<>+24(SB)/8, $0x0C0F0E0D080B0A09
GLOBL rot8<>(SB), RODATA|NOPTR, $32

// HALF, where there is no register to spare: c0 stands in memory while it is needed for shifts. M(k) is word k.
#define M(k) (32*k)(R11)
#define SPARE 512(R11)
#define HALF8(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, m0, m1, m2, m3, bytes, right, left) \
	VPADDD M(m0), a0, a0; VPADDD M(m1), a1, a1; VPADDD M(m2), a2, a2; VPADDD M(m3), a3, a3; \
	VPADDD b0, a0, a0; VPADDD b1, a1, a1; VPADDD b2, a2, a2; VPADDD b3, a3, a3; \
	VPXOR a0, d0, d0; VPXOR a1, d1, d1; VPXOR a2, d2, d2; VPXOR a3, d3, d3; \
	VPSHUFB bytes<>(SB), d0, d0; VPSHUFB bytes<>(SB), d1, d1; VPSHUFB bytes<>(SB), d2, d2; VPSHUFB bytes<>(SB), d3, d3; \
	VPADDD d0, c0, c0; VPADDD d1, c1, c1; VPADDD d2, c2, c2; VPADDD d3, c3, c3; \
	VPXOR c0, b0, b0; VPXOR c1, b1, b1; VPXOR c2, b2, b2; VPXOR c3, b3, b3; \
	VMOVDQA c0, SPARE; \
	VPSRLD right, b0, c0; VPSLLD left, b0, b0; VPOR c0, b0, b0; \
	VPSRLD right, b1, c0; VPSLLD left, b1, b1; VPOR c0, b1, b1; \
	VPSRLD right, b2, c0; VPSLLD left, b2, b2; VPOR c0, b2, b2; \
	VPSRLD right, b3, c0; VPSLLD left, b3, b3; VPOR c0, b3, b3; \
	VMOVDQA SPARE, c0

#define ROUND8(m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15) \
	HALF8(Y0, Y1, Y2, Y3, Y4, Y5, Y6, Y7, Y8, Y9, Y10, Y11, Y12, Y13, Y14, Y15, m0, m2, m4, m6, rot16, $12, $20) \
	HALF8(Y0, Y1, Y2, Y3, Y4, Y5, Y6, Y7, Y8, Y9, Y10, Y11, Y12, Y13, Y14, Y15, m1, m3, m5, m7, rot8, $7, $25) \
	HALF8(Y0, Y1, Y2, Y3, Y5, Y6, Y7, Y4, Y10, Y11, Y8, Y9, Y15, Y12, Y13, Y14, m8, m10, m12, m14, rot16, $12, $20) \
	HALF8(Y0, Y1, Y2, Y3, Y5, Y6, Y7, Y4, Y10, Y11, Y8, Y9, Y15, Y12, Y13, Y14, m9, m11, m13, m15, rot8, $7, $25)

// Words k to k+3 of the eight inputs: those of inputs 0 and 4, 1 and 5, ... are read into one register, and transposed in both halves of it.
#define WORDS(k) \
	VMOVDQU (4*k)(SI), X8; VINSERTI128 $1, (4*k)(R10), Y8, Y8; \
	VMOVDQU (4*k)(SI)(R8*1), X9; VINSERTI128 $1, (4*k)(R10)(R8*1), Y9, Y9; \
	VMOVDQU (4*k)(SI)(R8*2), X10; VINSERTI128 $1, (4*k)(R10)(R8*2), Y10, Y10; \
	VMOVDQU (4*k)(SI)(R9*1), X11; VINSERTI128 $1, (4*k)(R10)(R9*1), Y11, Y11; \
	VPUNPCKLDQ Y9, Y8, Y12; \
	VPUNPCKHDQ Y9, Y8, Y13; \
	VPUNPCKLDQ Y11, Y10, Y14; \
	VPUNPCKHDQ Y11, Y10, Y15; \
	VPUNPCKLQDQ Y14, Y12, Y8; \
	VPUNPCKHQDQ Y14, Y12, Y9; \
	VPUNPCKLQDQ Y15, Y13, Y10; \
	VPUNPCKHQDQ Y15, Y13, Y11; \
	VMOVDQA Y8, M(k); \
	VMOVDQA Y9, (32*k+32)(R11); \
	VMOVDQA Y10, (32*k+64)(R11); \
	VMOVDQA Y11, (32*k+96)(R11)

// Lanes l and l+4: the first four words of both stand in y, the others in z.
#define OUT8(l, x, y, u, z) \
	VMOVDQU x, (32*l)(DI); \
	VMOVDQU u, (32*l+16)(DI); \
	VEXTRACTI128 $1, y, (32*l+128)(DI); \
	VEXTRACTI128 $1, z, (32*l+144)(DI)

// func compress8AVX2(a inputs)
// The same as compress16AVX512, of eight.
TEXT ·compress8AVX2(SB), NOSPLIT, $576-56
	MOVQ a_out+0(FP), DI
	MOVQ a_in+8(FP), SI
	MOVQ a_stride+16(FP), R8
	MOVQ a_blocks+24(FP), CX
	MOVQ a_low+32(FP), DX
	MOVL a_flags+44(FP), AX
	ORL a_first+48(FP), AX
	LEAQ (R8)(R8*2), R9
	LEAQ 31(SP), R11
	ANDQ $~31, R11

	VPBROADCASTD iv<>+0(SB), Y0
	VPBROADCASTD iv<>+4(SB), Y1
	VPBROADCASTD iv<>+8(SB), Y2
	VPBROADCASTD iv<>+12(SB), Y3
	VPBROADCASTD iv<>+16(SB), Y4
	VPBROADCASTD iv<>+20(SB), Y5
	VPBROADCASTD iv<>+24(SB), Y6
	VPBROADCASTD iv<>+28(SB), Y7

block:
	LEAQ (SI)(R8*4), R10
	WORDS(0)
	WORDS(4)
	WORDS(8)
	WORDS(12)

	CMPQ CX, $1
	JNE middle
	ORL a_last+52(FP), AX

middle:
	MOVL $64, BX
	MOVL a_high+40(FP), R13
	VPBROADCASTD iv<>+0(SB), Y8
	VPBROADCASTD iv<>+4(SB), Y9
	VPBROADCASTD iv<>+8(SB), Y10
	VPBROADCASTD iv<>+12(SB), Y11
	VMOVDQU (DX), Y12
	VMOVD R13, X13
	VPBROADCASTD X13, Y13
	VMOVD BX, X14
	VPBROADCASTD X14, Y14
	VMOVD AX, X15
	VPBROADCASTD X15, Y15

	ROUND8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
	ROUND8(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
	ROUND8(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1)
	ROUND8(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6)
	ROUND8(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4)
	ROUND8(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7)
	ROUND8(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13)

	VPXOR Y8, Y0, Y0
	VPXOR Y9, Y1, Y1
	VPXOR Y10, Y2, Y2
	VPXOR Y11, Y3, Y3
	VPXOR Y12, Y4, Y4
	VPXOR Y13, Y5, Y5
	VPXOR Y14, Y6, Y6
	VPXOR Y15, Y7, Y7

	MOVL a_flags+44(FP), AX
	ADDQ $64, SI
	DECQ CX
	JNZ block

	VPUNPCKLDQ Y1, Y0, Y8
	VPUNPCKHDQ Y1, Y0, Y9
	VPUNPCKLDQ Y3, Y2, Y10
	VPUNPCKHDQ Y3, Y2, Y11
	VPUNPCKLDQ Y5, Y4, Y12
	VPUNPCKHDQ Y5, Y4, Y13
	VPUNPCKLDQ Y7, Y6, Y14
	VPUNPCKHDQ Y7, Y6, Y15
	VPUNPCKLQDQ Y10, Y8, Y0
	VPUNPCKHQDQ Y10, Y8, Y1
	VPUNPCKLQDQ Y11, Y9, Y2
	VPUNPCKHQDQ Y11, Y9, Y3
	VPUNPCKLQDQ Y14, Y12, Y4
	VPUNPCKHQDQ Y14, Y12, Y5
	VPUNPCKLQDQ Y15, Y13, Y6
	VPUNPCKHQDQ Y15, Y13, Y7
	OUT8(0, X0, Y0, X4, Y4)
	OUT8(1, X1, Y1, X5, Y5)
	OUT8(2, X2, Y2, X6, Y6)
	OUT8(3, X3, Y3, X7, Y7)
	VZEROUPPER
	RET
