package weights_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/weights"
)

// stored is a model whose tensors stand one behind the other, with a byte before the first.
type stored struct {
	graph []byte
	model epmodel.Model
}

func (s *stored) add(name string, elementType int32, data []byte, shape ...int64) {
	if s.graph == nil {
		s.graph = []byte{0}
	}
	s.model.Initializers = append(s.model.Initializers,
		epmodel.Initializer{Name: name, Type: elementType, Shape: shape, Offset: int64(len(s.graph)), Length: int64(len(data))})
	s.graph = append(s.graph, data...)
	s.model.Size = int64(len(s.graph))
}

func (s *stored) index(t require.TestingT) *weights.Index {
	x, err := weights.NewIndex(context.Background(), weights.Model{Model: &s.model, Graph: bytes.NewReader(s.graph)})
	require.NoError(t, err)
	return x
}

func find(t require.TestingT, x *weights.Index, bin []byte) []epmodel.Named {
	out, err := x.Find(context.Background(), bytes.NewReader(bin), epmodel.Range{Length: int64(len(bin))})
	require.NoError(t, err)
	return out
}

// exact are numbers that float16 has too, no two neighbours the same.
func exact(seed uint64, n int) []float32 {
	r, out := rand.New(rand.NewPCG(seed, 1)), make([]float32, n)
	for i := range out {
		out[i] = float32(1+r.IntN(1000)) / 1024 * float32(1-2*r.IntN(2))
	}
	return out
}

func float32s(all []float32) (b []byte) {
	for _, x := range all {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
	}
	return b
}

// half16 is a number that float16 has, as that.
func half16(x float32) uint16 {
	if x == 0 {
		return 0
	}
	fraction, exponent := math.Frexp(math.Abs(float64(x)))
	h := uint16(exponent-1+15)<<10 | uint16(fraction*2048)&0x3ff
	if x < 0 {
		h |= 0x8000
	}
	return h
}

func float16s(all []float32) (b []byte) {
	for _, x := range all {
		b = binary.LittleEndian.AppendUint16(b, half16(x))
	}
	return b
}

// tiles writes a matrix of inner x outer numbers as QNN's binaries have it: for each 32 of outer, all inner; in a tile pairs of inner.
func tiles(inner, outer int, at func(i, o int) float32) (b []byte) {
	for o := 0; o < outer; o += 32 {
		for i := 0; i < inner; i += 2 {
			for k := o; k < o+32; k++ {
				for pair := range 2 {
					x := float32(0)
					if i+pair < inner && k < outer {
						x = at(i+pair, k)
					}
					b = binary.LittleEndian.AppendUint16(b, half16(x))
				}
			}
		}
		b = append(b, make([]byte, (32-inner%32)%32/2*128)...)
	}
	return b
}

func noise(seed uint64, n int) []byte {
	r, b := rand.New(rand.NewPCG(seed, 2)), make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

type place struct {
	name, form string
	at, length int
}

func places(all []epmodel.Named) (out []place) {
	for _, n := range all {
		out = append(out, place{n.Name, n.Form, int(n.Offset), int(n.Length)})
	}
	return out
}

func TestTensorsAreFoundInEachForm(t *testing.T) {
	var s stored
	matrix, kernel, table, short, bytes8 := exact(1, 96*64), exact(2, 40*48*2*3), exact(3, 100*384), exact(4, 70), noise(5, 3001)
	s.add("matrix", 1, float32s(matrix), 96, 64)
	s.add("kernel", 1, float32s(kernel), 40, 48, 2, 3)
	s.add("table", 1, float32s(table), 100, 384)
	s.add("short", 1, float32s(short), 70)
	s.add("bytes", 3, bytes8, 3001)
	s.add("halves", 10, float16s(exact(6, 64*32)), 64, 32)
	s.add("small", 1, float32s(exact(7, 63)), 63)
	x := s.index(t)

	var bin []byte
	var want []place
	put := func(name, form string, b []byte) {
		bin = append(bin, noise(uint64(len(bin)), 77)...)
		if form != "" {
			want = append(want, place{name, form, len(bin), len(b)})
		}
		bin = append(bin, b...)
	}
	put("bytes", weights.AsItIs, bytes8)
	put("matrix", weights.AsItIs, float32s(matrix))
	put("matrix", weights.Float16, float16s(matrix))
	put("matrix", weights.Float16Tiles, tiles(96, 64, func(i, o int) float32 { return matrix[i*64+o] }))
	put("matrix", weights.Float16Tiles, tiles(64, 96, func(i, o int) float32 { return matrix[o*64+i] }))
	put("halves", weights.Float16Tiles, tiles(64, 32, func(i, o int) float32 { return exact(6, 64*32)[i*32+o] }))
	for point := range 6 { // input channels are the inner dimension; 40 and 48 are filled up to 64
		put("kernel", weights.Float16Tiles, tiles(48, 40, func(i, o int) float32 { return kernel[(o*48+i)*6+point] }))
	}
	put("short", weights.AsItIs, float32s(short))
	put("small", "", float32s(exact(7, 63)))
	var strip []float32 // of the first 128 columns
	for row := range 100 {
		strip = append(strip, table[row*384:row*384+128]...)
	}
	put("table", weights.Float16, float16s(strip))
	require.Equal(t, want, places(find(t, x, bin)))

	// What is told is the model's own type and shape.
	require.Equal(t, "float", find(t, x, bin)[1].Type)
	require.Equal(t, "96x64", find(t, x, bin)[1].Shape)

	// A part is a part, and a changed byte is in no range.
	bin = tiles(96, 64, func(i, o int) float32 { return matrix[i*64+o] })
	bin[2048+77]++
	require.Equal(t, []place{{"matrix", weights.Float16Tiles, 0, 2048}, {"matrix", weights.Float16Tiles, 4096, 4 * 2048}}, places(find(t, x, bin)))
	require.Equal(t, []place{{"bytes", weights.AsItIs, 0, 2816}}, places(find(t, x, bytes8[:3000])), "its end is not there")
}

// Where one number fills a tensor it is not looked for, but told where it stands in the midst of a tensor.
func TestOneNumberIsNoName(t *testing.T) {
	var s stored
	values := exact(1, 4096)
	clear(values[1000:2000])
	s.add("zeros", 1, make([]byte, 4096), 1024)
	s.add("ones", 1, float32s(slicesRepeat(1, 1024)), 1024)
	s.add("some", 1, float32s(values), 4096)
	x := s.index(t)
	require.Empty(t, find(t, x, make([]byte, 1<<16)))
	require.Empty(t, find(t, x, float32s(slicesRepeat(1, 4096))))
	require.Equal(t, []place{{"some", weights.AsItIs, 100, 4096 * 4}}, places(find(t, x, append(noise(1, 100), float32s(values)...))))

	var m stored
	matrix := exact(2, 128*64)
	for row := 64; row < 96; row++ {
		clear(matrix[row*64 : row*64+32])
	}
	m.add("matrix", 1, float32s(matrix), 128, 64)
	bin := tiles(128, 64, func(i, o int) float32 { return matrix[i*64+o] })
	require.Equal(t, []place{{"matrix", weights.Float16Tiles, 0, len(bin)}}, places(find(t, m.index(t), bin)), "a tile of zeros")
}

func slicesRepeat(x float32, n int) (out []float32) {
	for range n {
		out = append(out, x)
	}
	return out
}

func TestExternalDataIsLookedForWhereItIs(t *testing.T) {
	data := noise(3, 9000)
	m := epmodel.Model{Initializers: []epmodel.Initializer{
		{Name: "a", Type: 3, Location: "w.bin", Offset: 1024, Length: 3976},
		{Name: "b", Type: 3, Location: "w.bin", Offset: 5000, Length: -1},
		{Name: "c", Type: 3, Location: "gone.bin", Offset: 0, Length: 4000},
		{Name: "d", Type: 3, Location: "w.bin", Offset: 5001, Length: 4000},
		{Name: "e", Type: 3, Location: "w.bin", Offset: -1, Length: 4000},
		{Name: "f", Type: 3, Location: "w.bin", Offset: math.MaxInt64, Length: -1},
		{Name: "g", Type: 3, Location: "w.bin", Offset: 10, Length: math.MaxInt64},
		{Name: "h", Type: 1, Location: "w.bin", Length: 1024, Shape: []int64{math.MaxInt64, math.MaxInt64, 3}},
		{Name: "i", Type: 1, Location: "w.bin", Length: 1024, Shape: []int64{0, 7}},
		{Name: "j", Type: 1, Location: "w.bin", Length: 1024, Shape: []int64{100, 100}},
	}}
	x, err := weights.NewIndex(context.Background(), weights.Model{Model: &m, Graph: bytes.NewReader(nil), External: map[string]epmodel.Source{"w.bin": bytes.NewReader(data)}})
	require.NoError(t, err)
	require.Equal(t, []place{{"h", weights.AsItIs, 0, 1024}, {"a", weights.AsItIs, 1024, 3976}, {"b", weights.AsItIs, 5000, 4000}}, places(find(t, x, data)))
}

// A model that says that it is larger than what is looked for is refused before anything is read of it, and takes no memory.
func TestAModelThatIsTooLargeIsRefused(t *testing.T) {
	m := epmodel.Model{Initializers: []epmodel.Initializer{{Name: "a", Type: 1, Location: "w", Shape: []int64{1 << 20, 1 << 20}, Length: 1 << 42}}}
	_, err := weights.NewIndex(context.Background(), weights.Model{Model: &m, Graph: bytes.NewReader(nil), External: map[string]epmodel.Source{"w": huge{}}})
	require.ErrorIs(t, err, weights.ErrTooLarge)
}

type huge struct{}

func (huge) Size() int64                       { return 1 << 43 }
func (huge) ReadAt([]byte, int64) (int, error) { panic("read") }

// A file that became shorter is an error, not a name.
func TestAModelThatEndsTooEarlyIsAnError(t *testing.T) {
	var s stored
	s.add("a", 1, float32s(exact(1, 2048)), 2048)
	_, err := weights.NewIndex(context.Background(), weights.Model{Model: &s.model, Graph: bytes.NewReader(s.graph[:5000])})
	require.ErrorContains(t, err, `read "a"`)
	_, err = s.index(t).Find(context.Background(), bytes.NewReader(nil), epmodel.Range{Length: 5000})
	require.ErrorContains(t, err, "unexpected EOF")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = weights.NewIndex(ctx, weights.Model{Model: &s.model, Graph: bytes.NewReader(s.graph)})
	require.ErrorIs(t, err, context.Canceled)
	_, err = s.index(t).Find(ctx, bytes.NewReader(s.graph), epmodel.Range{Length: 5000})
	require.ErrorIs(t, err, context.Canceled)
}

// Whatever a binary holds, what is told of it lies in it, in order, and has the bytes of the tensor.
func FuzzFind(f *testing.F) {
	values := exact(1, 33*34)
	f.Add(int64(33), int64(34), float32s(values), tiles(33, 34, func(i, o int) float32 { return values[i*34+o] }))
	f.Add(int64(1), int64(1024), float32s(exact(2, 1024)), float16s(exact(2, 1024)))
	f.Add(int64(-5), int64(1<<40), noise(1, 700), noise(1, 700))
	f.Fuzz(func(t *testing.T, rows, columns int64, data, bin []byte) {
		var s stored
		s.add("bytes", 2, data, int64(len(data)))
		s.add("numbers", 1, data, rows, columns)
		s.add("halves", 10, data, rows, columns, 1, 2)
		x, err := weights.NewIndex(context.Background(), weights.Model{Model: &s.model, Graph: bytes.NewReader(s.graph)})
		if err != nil {
			require.ErrorIs(t, err, weights.ErrTooLarge)
			return
		}
		end := int64(0)
		for _, n := range find(t, x, bin) {
			require.GreaterOrEqual(t, n.Offset, end)
			require.Positive(t, n.Length)
			end = n.Offset + n.Length
			require.LessOrEqual(t, end, int64(len(bin)))
			if n.Form == weights.AsItIs {
				require.True(t, bytes.Contains(append(data, data...), bin[n.Offset:end]))
			}
		}
	})
}
