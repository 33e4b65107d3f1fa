package epmodel_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/epmodel"
)

// counting is a source that counts what is read of it.
type counting struct {
	epmodel.Source
	bytes int64
}

func (c *counting) ReadAt(p []byte, off int64) (int, error) {
	c.bytes += int64(len(p))
	return c.Source.ReadAt(p, off)
}

// sparseFile makes a file of holes with some bytes at its start and end.
func sparseFile(t *testing.T, head []byte, hole int64, tail []byte) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "sparse"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	_, err = f.Write(head)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(int64(len(head))+hole+int64(len(tail))))
	_, err = f.WriteAt(tail, int64(len(head))+hole)
	require.NoError(t, err)
	return f
}

// bigLength starts a length-delimited field with a payload of n bytes that follow elsewhere.
func bigLength(n protowire.Number, length int64) msg {
	return protowire.AppendVarint(protowire.AppendTag(nil, n, protowire.BytesType), uint64(length))
}

// allocated returns how much fn takes, in all.
func allocated(fn func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// A small file can have as many tensors as it likes: they take no memory, which would have to be
// collected at the cost of other requests.
func TestTensorsTakeNoMemoryEach(t *testing.T) {
	b := model(bytes.Repeat(msg{}.sub(5, msg{}), 400_000))
	var m *epmodel.Model
	took := allocated(func() { m = mustRead(t, b) })
	require.Zero(t, m.Nodes)
	require.Less(t, took, uint64(1<<20))
}

// weights of 10 GB in the graph file itself (more than protobuf libraries read) and an embedded
// context of 3 GB
func TestReadPassesOverHugeFields(t *testing.T) {
	var lengths map[string]int64 // of the tensors
	cases := map[string]struct {
		hole  int64
		wrap  func(hole int64) (head, tail msg)
		check func(*testing.T, *epmodel.Model)
	}{
		"weights of 10 GB": {10 << 30, func(hole int64) (msg, msg) {
			raw := append(msg{}.num(1, hole/4).num(2, 1).str(8, "w"), bigLength(9, hole)...)
			after := msg{}.sub(5, inGraph("last", "abcd"))
			tensor := append(bigLength(5, int64(len(raw))+hole), raw...)
			graph := append(bigLength(7, int64(len(tensor))+hole+int64(len(after))), tensor...)
			return append(msg{}.num(1, 9), graph...), after
		}, func(t *testing.T, m *epmodel.Model) {
			require.Equal(t, map[string]int64{"w": 10 << 30, "last": 4}, lengths)
		}},
		"an embedded context of 3 GB": {3 << 30, func(hole int64) (msg, msg) {
			value := append(msg{}.str(1, "ep_cache_context"), bigLength(4, hole)...)
			attribute := append(bigLength(5, int64(len(value))+hole), value...)
			name := msg{}.str(4, "EPContext").str(7, "com.microsoft").str(3, "n")
			node := append(bigLength(1, int64(len(attribute))+hole+int64(len(name))), attribute...)
			graph := append(bigLength(7, int64(len(node))+hole+int64(len(name))), node...)
			return append(msg{}.num(1, 9), graph...), name
		}, func(t *testing.T, m *epmodel.Model) {
			require.Equal(t, "n", m.Contexts[0].Node)
			require.EqualValues(t, 3<<30, m.Contexts[0].Inline.Length)
			var large *epmodel.TooLargeError
			require.ErrorAs(t, epmodel.Validate(m, nil), &large,
				"it can be read, and not be loaded")
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			head, tail := c.wrap(c.hole)
			src, err := epmodel.FileSource(sparseFile(t, head, c.hole, tail))
			require.NoError(t, err)
			in := &counting{Source: src}
			var m *epmodel.Model
			lengths = map[string]int64{}
			took := allocated(func() {
				m, err = epmodel.Tensors(context.Background(), "big.onnx", in,
					func(i *epmodel.Initializer) {
						lengths[i.Name] = i.Length
					})
			})
			require.NoError(t, err)
			c.check(t, m)
			require.Less(t, in.bytes, int64(1<<20), "bytes read")
			require.Less(t, took, uint64(1<<20), "memory")
		})
	}
}

// a model of 10 GB with 20,000 tensors in one external file: a few megabytes
func TestReadAndDigestOfALargeModel(t *testing.T) {
	const tensors, each = 20000, 10 << 30 / 20000
	g := msg{}
	for i := range tensors {
		g = g.sub(5,
			external(fmt.Sprintf("model.layers.%d.self_attn.q_proj.weight", i), each/4, "location",
				"model.onnx.data", "offset", fmt.Sprint(i*each), "length", fmt.Sprint(each)))
		g = g.sub(1, node("", "MatMul", fmt.Sprintf("/model/layers.%d/self_attn/q_proj/MatMul", i)))
	}
	b := model(g)
	f := sparseFile(t, nil, 10<<30, nil)
	data, err := epmodel.FileSource(f)
	require.NoError(t, err)
	var m *epmodel.Model
	took := allocated(func() { m = mustRead(t, b) })
	require.Less(t, took, uint64(64<<20), "taken in all, most of it at once free again")

	var ranges int
	var hashed int64
	took = allocated(func() {
		_, err = epmodel.Digest(context.Background(), m, bytes.NewReader(b),
			func(string) (epmodel.Source, error) { return data, nil },
			func(_ context.Context, _ io.ReaderAt, _, n int64) ([32]byte, error) {
				ranges++
				hashed += n
				return [32]byte{}, nil
			})
	})
	require.NoError(t, err)
	require.Equal(t, 3, ranges, "graph, the joined weights, the record")
	require.Greater(t, hashed, int64(tensors*each))
	require.Less(t, took, uint64(64<<20), "the graph is walked again, and its tensors are not kept")
}

// repeated is a graph of so many equal fields.
func repeated(n int, field msg) msg { return bytes.Repeat(field, n) }

// kept returns how much memory what fn returns takes for as long as it is used.
func kept(fn func() any) int64 {
	live := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := live()
	what := fn()
	after := live()
	runtime.KeepAlive(what)
	return after - before
}

// an initializer costs nothing, wherever its data is
func TestTensorsTakeNoMemory(t *testing.T) {
	for name, one := range map[string]msg{
		"empty":    msg{}.sub(5, nil),
		"named":    msg{}.sub(5, msg{}.str(8, "w").num(1, 1).num(2, 1)),
		"external": msg{}.sub(5, external("w", 1, "location", "w.bin", "length", "4")),
		"sparse":   msg{}.sub(15, msg{}.sub(1, inGraph("s", "abcd")).sub(2, inGraph("", "abcd"))),
		"constant": msg{}.sub(1, node("", "Constant", "c", attrT("value", inGraph("t", "abcd")))),
	} {
		t.Run(name, func(t *testing.T) {
			b := model(repeated(100_000, one))
			require.Less(t, kept(func() any { return mustRead(t, b) }), int64(100<<10))
		})
	}
}

// a file of nothing but small parts is refused before it costs more than it may
func TestReadBoundsMemory(t *testing.T) {
	for name, one := range map[string]msg{
		"inputs":   msg{}.sub(11, nil),
		"outputs":  msg{}.sub(12, nil),
		"contexts": msg{}.sub(1, contextNode("")),
		"dims": msg{}.sub(11,
			msg{}.sub(2, msg{}.sub(1, msg{}.sub(2, repeated(1000, msg{}.sub(1, nil)))))),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := read(model(repeated(1<<20/len(one)*2, one)))
			require.Contains(t, formatError(t, err).Reason, "16 MiB of memory")
			part := model(repeated(32_000/len(one), one))
			require.Less(t, kept(func() any { return mustRead(t, part) }), int64(16<<20))
		})
	}
	names := msg{}
	for i := range 300_000 {
		names = names.sub(1, msg{}.str(4, fmt.Sprint(i)))
	}
	_, err := read(model(names))
	require.Contains(t, formatError(t, err).Reason, "16 MiB of memory")
}

// Readings pass the gate, small ones and large ones; what waits there ends with its context.
func TestReadingsPassTheGate(t *testing.T) {
	var passed []bool
	inside := 0
	ctx := epmodel.WithGate(t.Context(), func(ctx context.Context, large bool) (func(), error) {
		require.Zero(t, inside, "no reading waits for memory while it has some")
		inside++
		passed = append(passed, large)
		return func() { inside-- }, ctx.Err()
	})
	small, large := model(msg{}.sub(5, inGraph("w", "abcd"))),
		model(repeated(5000, msg{}.sub(11, nil)))
	_, err := epmodel.Read(ctx, "m.onnx", bytes.NewReader(small))
	require.NoError(t, err)
	m, err := epmodel.Read(ctx, "m.onnx", bytes.NewReader(large))
	require.NoError(t, err)
	require.Len(t, m.Inputs, 5000)
	require.Equal(t, []bool{false, false, true}, passed)
	require.Zero(t, inside)

	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err = epmodel.Read(ended, "m.onnx", bytes.NewReader(small))
	require.ErrorIs(t, err, context.Canceled)
}
