package weights

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/epcached/epcached/epmodel"
)

// The forms in which a tensor may stand in a binary.
const (
	AsItIs       = "as in the model"
	Float16      = "float16"
	Float16Tiles = "float16 tiles"
)

// Types of ONNX that are more than bytes here.
const (
	typeFloat   = 1
	typeFloat16 = 10
)

// A tile is how QNN's processor multiplies 16-bit numbers: 32 x 32 of them, the inner dimension (the rows of a MatMul's second
// matrix, the input channels of a convolution) in pairs:
//
//	[0,0] [1,0] [0,1] [1,1] ... [0,31] [1,31]  [2,0] [3,0] ...
//
// What a dimension lacks to a multiple of 32 is zeros. Each point of a convolution's kernel is a matrix of its own.
const (
	tileSide  = 32
	tileBytes = 2 * tileSide * tileSide
)

// A unit is what is looked for as a whole. Smaller tensors than the least unit are not looked for: they stand in many places.
const leastUnit = 256

func unitOf(length int64) int64 {
	switch {
	case length <= 64<<10:
		return leastUnit
	case length <= 1<<20:
		return 1 << 10
	}
	return 4 << 10
}

// form is one tensor in one form, as units. Those of a flat form stand one behind the other, and the last one may be shorter.
type form struct {
	tensor *tensor
	name   string
	first  int // of its units, in Index.units
	count  int
	unit   int64
	length int64
}

func (f *form) size(i int) int { return int(min(f.unit, f.length-int64(i)*f.unit)) }

type tensor struct {
	epmodel.Initializer
	data   io.ReaderAt
	at     int64
	length int64
	matrix matrix
}

// matrix is a tensor as what is cut into tiles: points matrices of rows x columns, whose elements stand side by side.
type matrix struct {
	rows, columns, points int64
}

func (m matrix) tiles() int64 { return m.points * ceil(m.rows) * ceil(m.columns) }

func ceil(n int64) int64 { return (n + tileSide - 1) / tileSide }

// matrixOf reads a shape as matrices. Of more than two dimensions the first two are channels, the others the kernel's.
func matrixOf(shape []int64) (m matrix, ok bool) {
	for len(shape) > 2 && shape[0] == 1 {
		shape = shape[1:]
	}
	if len(shape) < 2 {
		return m, false
	}
	m = matrix{shape[0], shape[1], 1}
	for _, n := range shape[2:] {
		m.points *= n
	}
	return m, m.rows*m.columns >= tileSide*tileSide/4
}

// pieceOf is how long the strips are in which QNN's binaries have tables; 0: it is none.
func pieceOf(shape []int64) int64 {
	if len(shape) != 2 {
		return 0
	}
	piece := int64(2)
	for piece < 512 && shape[1]*2%(2*piece) == 0 {
		piece *= 2
	}
	if piece < leastUnit {
		return 0
	}
	return piece
}

// sizeOf is how many bytes an element of a type has that is more than bytes here; 0 for others.
func sizeOf(elementType int32) int64 {
	switch elementType {
	case typeFloat:
		return 4
	case typeFloat16:
		return 2
	}
	return 0
}

func readFull(r io.ReaderAt, p []byte, off int64) error {
	if n, err := r.ReadAt(p, off); n < len(p) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("at offset %d: %w", off, err)
	}
	return nil
}

func halves(dst []uint16, src []byte, elementType int32) []uint16 {
	if elementType == typeFloat16 {
		for ; len(src) >= 2; src = src[2:] {
			dst = append(dst, binary.LittleEndian.Uint16(src))
		}
		return dst
	}
	for ; len(src) >= 4; src = src[4:] {
		dst = append(dst, half(binary.LittleEndian.Uint32(src)))
	}
	return dst
}

// half rounds a float32 to the nearest float16, to the even one of two.
func half(bits uint32) uint16 {
	sign, x := uint16(bits>>16)&0x8000, bits&0x7fffffff
	var shift uint32
	switch {
	case x >= 0x38800000 && x < 0x47800000:
		x, shift = x-0x38000000, 13
	case x > 0x7f800000:
		return sign | 0x7e00
	case x >= 0x47800000:
		return sign | 0x7c00
	case x < 0x33000000:
		return sign
	default: // less than the least normal one
		x, shift = x&0x7fffff|0x800000, 126-x>>23
	}
	h, rest, middle := x>>shift, x&(1<<shift-1), uint32(1)<<(shift-1)
	if rest > middle || rest == middle && h&1 == 1 {
		h++
	}
	return sign | uint16(h)
}

func (t *tensor) flat(ctx context.Context, f *form, fn func(i int, unit []byte)) error {
	const some = 256 << 10 // of the form, at a time: a multiple of every unit
	per := t.length / f.length
	raw := make([]byte, min(some, f.length)*per)
	var numbers []uint16
	var half []byte
	for off := int64(0); off < f.length; off += some {
		if err := ctx.Err(); err != nil {
			return err
		}
		raw = raw[:min(some, f.length-off)*per]
		if err := readFull(t.data, raw, t.at+off*per); err != nil {
			return err
		}
		b := raw
		if per > 1 {
			numbers, half = halves(numbers[:0], raw, t.Type), half[:0]
			for _, n := range numbers {
				half = binary.LittleEndian.AppendUint16(half, n)
			}
			b = half
		}
		for i := int(off / f.unit); len(b) > 0; i++ {
			n := min(len(b), int(f.unit))
			fn(i, b[:n])
			b = b[n:]
		}
	}
	return nil
}

const mostColumns = 64 << 10 // how many elements of a row are read at a time

// tiled calls fn with the tiles of both orders: rows first, as of a MatMul's second matrix, and columns first, as of a convolution.
func (t *tensor) tiled(ctx context.Context, fn func(i int, rowsFirst, columnsFirst []byte)) error {
	m, size := t.matrix, sizeOf(t.Type)
	at := max(1, mostColumns/(m.points*tileSide)) * tileSide // columns at a time
	if at*m.points > 4*mostColumns {
		return nil // a kernel that large is no kernel
	}
	var raw []byte
	var band []uint16 // tileSide rows of some columns
	for row := int64(0); row < m.rows; row += tileSide {
		for column := int64(0); column < m.columns; column += at {
			if err := ctx.Err(); err != nil {
				return err
			}
			rows, columns := min(tileSide, m.rows-row), min(at, m.columns-column)
			n := columns * m.points * size
			if int64(cap(raw)) < n {
				raw = make([]byte, n)
			}
			raw, band = raw[:n], band[:0]
			for r := range rows {
				if err := readFull(t.data, raw, t.at+((row+r)*m.columns+column)*m.points*size); err != nil {
					return err
				}
				band = halves(band, raw, t.Type)
			}
			for point := range m.points {
				for c := int64(0); c < columns; c += tileSide {
					var one block
					for y := range rows {
						from := band[(y*columns+c)*m.points+point:]
						for x := range min(tileSide, columns-c) {
							one[y*tileSide+x] = from[x*m.points]
						}
					}
					i := (point*ceil(m.rows)+row/tileSide)*ceil(m.columns) + (column+c)/tileSide
					rowsFirst, columnsFirst := one.tiles()
					fn(int(i), rowsFirst[:], columnsFirst[:])
				}
			}
		}
	}
	return nil
}

type block [tileSide * tileSide]uint16

func (b *block) tiles() (rowsFirst, columnsFirst [tileBytes]byte) {
	for i := range tileSide / 2 {
		for k := range tileSide {
			at := (i*tileSide + k) * 4
			binary.LittleEndian.PutUint32(rowsFirst[at:], uint32(b[2*i*tileSide+k])|uint32(b[(2*i+1)*tileSide+k])<<16)
			binary.LittleEndian.PutUint32(columnsFirst[at:], uint32(b[k*tileSide+2*i])|uint32(b[k*tileSide+2*i+1])<<16)
		}
	}
	return rowsFirst, columnsFirst
}
