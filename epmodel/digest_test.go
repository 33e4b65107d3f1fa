package epmodel_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/epmodel"
)

// sum is BLAKE3 the plain way.
func sum(_ context.Context, r io.ReaderAt, off, n int64) (d [32]byte, err error) {
	h := blake3.New(32, nil)
	m, err := io.Copy(h, io.NewSectionReader(r, off, n))
	if err == nil && m != n {
		err = io.ErrUnexpectedEOF
	}
	copy(d[:], h.Sum(nil))
	return d, err
}

// digest of a model with the given external files.
func digest(t *testing.T, b msg, files map[string]string) ([32]byte, error) {
	t.Helper()
	opened := map[string]int{}
	return epmodel.Digest(context.Background(), mustRead(t, b), bytes.NewReader(b),
		func(l string) (epmodel.Source, error) {
			opened[l]++
			require.Equal(t, 1, opened[l], "opened once each")
			s, ok := files[l]
			if !ok {
				return nil, errors.New("no descriptor")
			}
			return strings.NewReader(s), nil
		}, sum)
}

func mustDigest(t *testing.T, b msg, files map[string]string) [32]byte {
	t.Helper()
	d, err := digest(t, b, files)
	require.NoError(t, err)
	return d
}

func TestDigestWithoutExternalDataIsTheFiles(t *testing.T) {
	b := model(msg{}.sub(5, inGraph("w", "abcdefgh")))
	require.Equal(t, blake3.Sum256(b), mustDigest(t, b, nil))
}

// the digest is on disks and in keys: it must not change unnoticed
func TestDigestIsKnown(t *testing.T) {
	b := model(msg{}.sub(5, external("w", 2, "location", "w.bin", "offset", "4", "length", "8")).
		sub(5, external("v", 1, "location", "a.bin")))
	d := mustDigest(t, b, map[string]string{"w.bin": "0123456789abcdef", "a.bin": "wxyz"})
	require.Equal(t, "c9a4fd1b6924fc5f3f879397b2db5f3c3fee45cbfdf888807fedae5684347e61",
		hex.EncodeToString(d[:]))

	// the same from the description
	graph, a, w := blake3.Sum256(b), blake3.Sum256([]byte("wxyz")),
		blake3.Sum256([]byte("456789ab"))
	u64 := func(n int) string { return string(binary.LittleEndian.AppendUint64(nil, uint64(n))) }
	record := "\x00epcached model 1\n" + string(graph[:]) + u64(len(b)) + u64(2) +
		u64(1) + u64(0) + u64(4) + string(a[:]) +
		u64(1) + u64(4) + u64(8) + string(w[:])
	require.Equal(t, blake3.Sum256([]byte(record)), d)
}

func TestDigestCoversTheUsedExternalData(t *testing.T) {
	ext := func(kv ...string) msg {
		return external("w", 0,
			append([]string{"location", "w.bin"}, kv...)...)
	}
	function := func(x msg) msg {
		return msg{}.str(1, "F").
			sub(7, node("", "Constant", "c", attrT("value", x)))
	}
	part := ext("offset", "4", "length", "8")
	cases := map[string]struct {
		model     msg
		at        int // byte of w.bin (16 bytes) that is changed
		different bool
	}{
		"inside the range":      {model(msg{}.sub(5, part)), 4, true},
		"last of the range":     {model(msg{}.sub(5, part)), 11, true},
		"before the range":      {model(msg{}.sub(5, part)), 3, false},
		"after the range":       {model(msg{}.sub(5, part)), 12, false},
		"no length: to the end": {model(msg{}.sub(5, ext("offset", "4"))), 15, true},
		"length 0: to the end": {
			model(msg{}.sub(5, ext("offset", "4", "length", "0"))), 15, true},
		"unknown key: the whole file": {
			model(msg{}.sub(5, ext("offset", "4", "length", "8", "prepacked_0", "b|12;4"))), 15,
			true},
		"unknown key: the whole file, before": {
			model(msg{}.sub(5, ext("offset", "4", "length", "8", "prepacked_0", "b|0;4"))), 0,
			true},
		"in a subgraph": {
			model(msg{}.sub(1, node("", "If", "i", attrG("then_branch", msg{}.sub(5, part))))), 4,
			true},
		"in a function":    {model(nil).sub(25, function(part)), 4, true},
		"in sparse values": {model(msg{}.sub(15, msg{}.sub(1, part))), 4, true},
		"in sparse indices": {
			model(msg{}.sub(15, msg{}.sub(1, inGraph("s", "abcd")).sub(2, part))), 4, true},
		"in a constant": {
			model(msg{}.sub(1, node("", "Constant", "c", attrT("value", part)))), 4, true},
		"in a list of tensors": {
			model(msg{}.sub(1,
				node("my", "Op", "c", msg{}.str(1, "v").sub(10, inGraph("", "abcd")).
					sub(10, part)))), 4, true},
		"in a list of sparse tensors": {
			model(msg{}.sub(1,
				node("my", "Op", "c", msg{}.str(1, "v").sub(23, msg{}.sub(1, part))))), 4, true},
		"in a list of graphs": {
			model(msg{}.sub(1,
				node("my", "Op", "c", msg{}.str(1, "v").sub(11, msg{}).
					sub(11, msg{}.sub(5, part))))), 4, true},
		"in an EPContext node": {
			model(msg{}.sub(1, contextNode("c", attrT("value", part)))), 4, true},
		"in training": {model(nil).
			sub(20, msg{}.sub(1, msg{}.sub(5, part))), 4, true},
		"second of two ranges, gap unchanged": {
			model(msg{}.sub(5, ext("offset", "0", "length", "2")).
				sub(5, ext("offset", "8", "length", "2"))), 9, true},
		"gap between two ranges": {
			model(msg{}.sub(5, ext("offset", "0", "length", "2")).
				sub(5, ext("offset", "8", "length", "2"))), 5, false},
		"end of a range that covers a smaller": {
			model(msg{}.sub(5, ext("offset", "0", "length", "12")).
				sub(5, ext("offset", "2", "length", "2"))), 11, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			one := []byte("0123456789abcdef")
			before := mustDigest(t, c.model, map[string]string{"w.bin": string(one)})
			one[c.at]++
			require.Equal(t, c.different,
				before != mustDigest(t, c.model, map[string]string{"w.bin": string(one)}))
		})
	}
}

// equal bytes, other ranges: the graph distinguishes them
func TestDigestTellsRangesApart(t *testing.T) {
	seen := map[[32]byte]string{}
	for _, off := range []string{"0", "4", "8"} {
		b := model(msg{}.sub(5,
			external("w", 1, "location", "w.bin", "offset", off, "length", "4")))
		d := mustDigest(t, b, map[string]string{"w.bin": strings.Repeat("same", 4)})
		require.NotContains(t, seen, d)
		seen[d] = off
	}
	require.Len(t, seen, 3)
}

// a hostile model names one range a thousand times; it is hashed once
func TestDigestHashesEachByteOnce(t *testing.T) {
	g := msg{}
	for range 1000 {
		g = g.sub(5, external("w", 1, "location", "w.bin", "length", "1000"))
	}
	b := model(g)
	var hashed int64
	_, err := epmodel.Digest(context.Background(), mustRead(t, b), bytes.NewReader(b),
		func(string) (epmodel.Source, error) {
			return source{nil, 5000}, nil
		}, func(_ context.Context, _ io.ReaderAt, _, n int64) ([32]byte, error) {
			hashed += n
			return [32]byte{}, nil
		})
	require.NoError(t, err)
	require.Less(t, hashed, int64(len(b)+1000+200))
}

func TestDigestErrors(t *testing.T) {
	short := model(msg{}.sub(5,
		external("w", 3, "location", "w.bin", "offset", "8", "length", "12")))
	t.Run("external data too short", func(t *testing.T) {
		_, err := digest(t, short, map[string]string{"w.bin": "0123456789"})
		require.Equal(t, `tensor "w": 12 bytes from offset 8 of "w.bin": beyond its end at 10`,
			formatError(t, err).Reason)
	})
	t.Run("external data missing", func(t *testing.T) {
		_, err := digest(t, short, nil)
		require.EqualError(t, err, `m.onnx: external data "w.bin": no descriptor`)
	})
	t.Run("graph changed since Read", func(t *testing.T) {
		m := mustRead(t, short)
		_, err := epmodel.Digest(context.Background(), m, bytes.NewReader(short[1:]), nil, sum)
		require.Contains(t, formatError(t, err).Reason, "changed while being read")
	})
	t.Run("hash fails", func(t *testing.T) {
		broken := errors.New("input/output error")
		_, err := epmodel.Digest(context.Background(), mustRead(t, short), bytes.NewReader(short),
			nil,
			func(context.Context, io.ReaderAt, int64, int64) ([32]byte, error) {
				return [32]byte{},
					broken
			})
		require.ErrorIs(t, err, broken)
	})
}
