package epmodel_test

import (
	"bytes"
	"encoding/binary"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/epmodel"
)

// container returns the start of a real sidecar, as if the rest were there.
func container(t *testing.T, name string) []byte {
	t.Helper()
	head, err := os.ReadFile("testdata/artefacts/" + name)
	require.NoError(t, err)
	return append(head, make([]byte, 131072-len(head))...)
}

func TestBinaryReferencesOfRealSidecars(t *testing.T) {
	refs, err := epmodel.BinaryReferences("x.bin",
		bytes.NewReader(container(t, "openvino.bin.head")))
	require.NoError(t, err)
	require.Empty(t, refs)

	// shared contexts of a model with external data need the source's weights beside them
	refs, err = epmodel.BinaryReferences("x.bin",
		bytes.NewReader(container(t, "openvino_shared.bin.head")))
	require.NoError(t, err)
	require.Equal(t,
		[]epmodel.Reference{{Node: "x.bin", Attribute: "weights_metadata_map", Name: "ext.data",
			Offset: 308}}, refs)
	require.Error(t, epmodel.ValidateReferences("x.bin", refs, map[string]int64{"x.bin": 1}))
	require.NoError(t, epmodel.ValidateReferences("x.bin", refs, map[string]int64{"ext.data": 1}))
}

func TestBinaryReferencesOfOtherBinaries(t *testing.T) {
	for name, b := range map[string]string{"empty": "", "short": "OVEP_BIN",
		"another maker's": string(make([]byte, 100)),
		"another version": "OVEP_BIN\x02" + string(make([]byte, 100))} {
		t.Run(name, func(t *testing.T) {
			refs, err := epmodel.BinaryReferences("x.bin", bytes.NewReader([]byte(b)))
			require.NoError(t, err)
			require.Empty(t, refs)
		})
	}
}

func TestBinaryReferencesRefuseDamage(t *testing.T) {
	put := func(at int, v uint64) func([]byte) []byte {
		return func(b []byte) []byte { binary.LittleEndian.PutUint64(b[at:], v); return b }
	}
	cases := map[string]struct {
		damage func([]byte) []byte
		want   string
	}{
		"document beyond the file": {put(24, 1<<40), "reach beyond the file"},
		"document of 2^64-1 bytes": {put(32, 1<<64-1), "reach beyond the file"},
		"document cut":             {put(32, 200), "ends too early"},
		"blob beyond the file": {func(b []byte) []byte { return b[:70000] },
			"reach beyond the file of 70000"},
		"unknown kind of value": {func(b []byte) []byte { b[44] = 0x7f; return b },
			"unknown kind"},
		"string of length 0": {
			func(b []byte) []byte {
				copy(b[bytes.Index(b, []byte("producer"))+9:],
					"\x00\x00\x00\x00")
				return b
			}, "length 0"},
		"key without end": {func(b []byte) []byte {
			return append(b[:45],
				bytes.Repeat([]byte("x"), 131072-45)...)
		}, "ends too early"},
		"location of a million bytes": {func(b []byte) []byte {
			copy(b[308:],
				"\x00\x00\x10\x00")
			return b
		}, "a location of 1048576 bytes"},
		"document in itself, deep": {func(b []byte) []byte {
			put(32, 131000-40)(b)
			return append(b[:44],
				bytes.Repeat([]byte("\x03a\x00\xff\xff\x00\x00"), (131072-44)/7)...)
		}, "nested too deep"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := epmodel.BinaryReferences("x.bin",
				bytes.NewReader(c.damage(container(t, "openvino_shared.bin.head"))))
			require.Contains(t, formatError(t, err).Error(), c.want)
		})
	}
}
