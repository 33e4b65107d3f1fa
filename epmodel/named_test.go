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

// mask is the key that OpenVINO masks its models with.
var mask = []byte{0x30, 0x60, 0x70, 0x02, 0x04, 0x08, 0x3f, 0x6f, 0x72, 0x74, 0x78, 0x7f}

const compiledXML = `<?xml version="1.0"?>
<net name="m"><layers>
<layer id="0" name="x" type="Parameter"><data shape="1,64" element_type="i64" /></layer>
<layer id="1" name="layer0.query" type="Const"><data element_type="f32" shape="16, ` +
	`4" offset="0" size="256" /></layer>
<layer id="2" name="scale" type="Const"><data element_type="f32" shape="" offset="256" size="4" ` +
	`/></layer>
</layers></net>`

// exported is a container with one compiled model as OpenVINO 2026.4 writes them, with this
// description of its layers.
func exported(t *testing.T, xml string, masked bool) []byte {
	head, err := os.ReadFile("testdata/artefacts/openvino.bin.head")
	require.NoError(t, err)
	needs := []byte("meta=1.0;ov=2026.4.1")
	text := []byte(xml)
	if masked {
		for i := range text {
			text[i] ^= mask[i%len(mask)]
		}
	}
	blob := append([]byte("RR_UPCVO"), 1, 0, 0, 0)
	blob = binary.LittleEndian.AppendUint64(blob, uint64(len(needs)))
	blob = append(blob, needs...)
	for _, n := range []int{48, 0, 48, 260, 308, len(text)} {
		blob = binary.LittleEndian.AppendUint64(blob, uint64(n))
	}
	blob = append(append(blob, make([]byte, 260)...), text...)
	b := append(head, make([]byte, 131072-len(head))...)
	copy(b[65536:], blob)
	return b
}

func named(b []byte) ([]epmodel.Named, error) {
	return epmodel.NamedRanges(context.Background(), "x.bin", bytes.NewReader(b))
}

func TestOpenVINOsBinariesNameTheirTensors(t *testing.T) {
	for _, masked := range []bool{true, false} {
		all, err := named(exported(t, compiledXML, masked))
		require.NoError(t, err)
		require.Len(t, all, 6)
		require.Equal(t, epmodel.HeadKind, all[0].Kind)
		require.Equal(t, epmodel.PartitionKind, all[2].Kind)
		constants := int64(65536 + 20 + len("meta=1.0;ov=2026.4.1") + 48)
		require.Equal(t,
			epmodel.Named{Name: "layer0.query", Kind: epmodel.TensorKind, Type: "f32",
				Shape: "16x4", Range: epmodel.Range{Offset: constants, Length: 256}}, all[3])
		require.Equal(t,
			epmodel.Named{Name: "scale", Kind: epmodel.TensorKind, Type: "f32",
				Range: epmodel.Range{Offset: constants + 256, Length: 4}}, all[4])
		require.Equal(t, epmodel.GraphKind, all[5].Kind)
	}
	for name, b := range map[string][]byte{"empty": nil, "another maker's": make([]byte, 4096),
		"masked otherwise": exported(t, "?"+compiledXML, true)} {
		all, err := named(b)
		require.NoError(t, err, name)
		for _, n := range all {
			require.NotEqual(t, epmodel.TensorKind, n.Kind, name)
		}
	}
}

func TestNamesThatDoNotFitAreRefused(t *testing.T) {
	edit := func(from, to string) []byte {
		return exported(t, string(bytes.Replace([]byte(compiledXML), []byte(from), []byte(to), 1)),
			true)
	}
	number := func(at int, v uint64) []byte {
		b := exported(t, compiledXML, true)
		binary.LittleEndian.PutUint64(b[65536+at:], v)
		return b
	}
	places := 20 + len("meta=1.0;ov=2026.4.1")
	for name, c := range map[string]struct {
		b    []byte
		want string
	}{
		"tensor beyond the constants": {edit(`offset="256"`, `offset="257"`),
			"reach beyond the 260"},
		"offset that overflows": {edit(`offset="256"`, `offset="9223372036854775807"`),
			"reach beyond the 260"},
		"offset that is none": {edit(`offset="256"`, `offset="-1"`),
			`offset "-1" is not a number`},
		"size that is none": {edit(`size="4"`, `size="four"`),
			`size "four" is not a number`},
		"no XML after all":              {edit(`<net`, `<<net`), "xml"},
		"needs that are too long":       {number(12, 1<<40), "a text of"},
		"constants beyond the blob":     {number(places+16, 1<<40), "reach beyond"},
		"constants that wrap around":    {number(places+24, 1<<64-1), "reach beyond"},
		"model beyond the blob":         {number(places+32, 1<<20), "reach beyond"},
		"blob of a partition cut short": {exported(t, compiledXML, true)[:65600], "reach beyond"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := named(c.b)
			require.Contains(t, formatError(t, err).Error(), c.want)
		})
	}
}

func FuzzNamedRanges(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := named(b)
		if err != nil {
			formatError(t, err)
			return
		}
		for _, n := range all {
			require.True(t, n.Offset >= 0 && n.Length >= 0 && n.Length <= int64(len(b))-n.Offset,
				"%+v", n)
		}
	})
}
