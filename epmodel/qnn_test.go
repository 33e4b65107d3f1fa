package epmodel_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/epmodel"
)

// sized is the beginning of a file that has zeros behind it.
type sized struct {
	head []byte
	size int64
}

func (s *sized) Size() int64 { return s.size }

func (s *sized) ReadAt(p []byte, off int64) (int, error) {
	clear(p)
	if off < int64(len(s.head)) {
		copy(p, s.head[off:])
	}
	return len(p), nil
}

// sharedQNN is the beginning of a weight-sharing binary of two graphs, made by SDK 2.51.
func sharedQNN(t testing.TB) *sized {
	head, err := os.ReadFile("testdata/artefacts/qnn_shared.bin.head")
	require.NoError(t, err)
	return &sized{head, 42295296}
}

func TestQNNsBinariesNameTheirPartitions(t *testing.T) {
	all, err := epmodel.NamedRanges(context.Background(), "x.bin", sharedQNN(t))
	require.NoError(t, err)
	const first, second = "QNNExecutionProvider_QNNExecutionProvider_14761273109944884880_1_0", "QNNExecutionProvider_QNNExecutionProvider_13822550556457401002_1_0"
	require.Equal(t, []epmodel.Named{
		{Name: "header", Kind: epmodel.HeadKind, Range: epmodel.Range{Offset: 0, Length: 0x2000}},
		{Name: "ROOT", Kind: epmodel.HeadKind, Range: epmodel.Range{Offset: 0x3000, Length: 0x3128}},
		{Name: first, Kind: epmodel.PartitionKind, Range: epmodel.Range{Offset: 0x7000, Length: 0x26000}},
		{Name: second, Kind: epmodel.PartitionKind, Range: epmodel.Range{Offset: 0x2d000, Length: 0x1d000}},
		{Name: "WEIGHTS/0", Kind: epmodel.WeightsKind, Range: epmodel.Range{Offset: 0x4a000, Length: 0x280c000}},
	}, all)
}

// The flatbuffer stands at 0x2020: its root at 0x2030, and of the root the vector of sections at 0x2048.
func TestQNNsBinariesThatDoNotFitAreRefused(t *testing.T) {
	number := func(at int, v uint64) func(*sized) {
		return func(s *sized) { binary.LittleEndian.PutUint64(s.head[at:], v) }
	}
	half := func(at int, v uint32) func(*sized) {
		return func(s *sized) { binary.LittleEndian.PutUint32(s.head[at:], v) }
	}
	for name, c := range map[string]struct {
		edit func(*sized)
		want string
	}{
		"part beyond the file":      {number(24, 1<<40), "reach beyond the file"},
		"part that wraps around":    {number(32, 1<<64-1), "reach beyond the file"},
		"part that is too short":    {number(32, 31), "too few"},
		"table beyond the part":     {number(0x2018, 1<<40), "in a part of"},
		"table that is too long":    {number(0x2018, 1<<20+1), "in a part of"},
		"table that is too short":   {number(0x2018, 3), "beyond the end"},
		"root beyond the end":       {half(0x2020, 1<<31), "beyond the end"},
		"root that points nowhere":  {half(0x2030, 1<<31-1), "without its description"},
		"vector beyond the end":     {half(0x2034, 1<<20), "beyond the end"},
		"more elements than bytes":  {half(0x2048, 1<<32-1), "elements"},
		"more elements than fit":    {half(0x2048, 0x1cf), "beyond the end"},
		"element beyond the end":    {half(0x204c, 1<<20), "beyond the end"},
		"file that ends before it":  {func(s *sized) { s.size = 0x2000 }, "reach beyond the file"},
		"file that is a byte short": {func(s *sized) { s.size-- }, "reach beyond the file"},
	} {
		t.Run(name, func(t *testing.T) {
			s := sharedQNN(t)
			c.edit(s)
			all, err := epmodel.NamedRanges(context.Background(), "x.bin", s)
			require.Contains(t, formatError(t, err).Error(), c.want)
			require.Empty(t, all)
		})
	}
	other := sharedQNN(t)
	other.head[0x2000] = 5 // another backend's
	all, err := epmodel.NamedRanges(context.Background(), "x.bin", other)
	require.NoError(t, err)
	require.Empty(t, all)
}

// A section may not lie outside, whatever is said of the others.
func TestQNNsSectionsLieInTheFile(t *testing.T) {
	s := sharedQNN(t)
	size := binary.LittleEndian.AppendUint64(nil, 0x280c000)
	at := bytes.Index(s.head[0x2020:], size)
	require.Positive(t, at)
	binary.LittleEndian.PutUint64(s.head[0x2020+at:], 0x280c001)
	_, err := epmodel.NamedRanges(context.Background(), "x.bin", s)
	require.Contains(t, formatError(t, err).Error(), `section "WEIGHTS/0": 41992193 bytes from 294912 reach beyond`)
}

func FuzzQNN(f *testing.F) {
	seed := sharedQNN(f)
	f.Add(seed.head[:40], seed.head[0x2000:], uint32(0x2000), seed.size)
	f.Fuzz(func(t *testing.T, head, part []byte, at uint32, size int64) {
		if len(head) < 40 || size < 0 || at > 1<<16 {
			return
		}
		head = append(bytes.Clone(head), make([]byte, max(0, int(at)-len(head)))...)
		all, err := epmodel.NamedRanges(context.Background(), "x.bin", &sized{append(head, part...), size})
		if err != nil {
			formatError(t, err)
		}
		for _, n := range all {
			require.True(t, n.Offset >= 0 && n.Length >= 0 && n.Length <= size-n.Offset, "%+v", n)
		}
	})
}
