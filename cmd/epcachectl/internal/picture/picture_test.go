package picture

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// wellFormed reads a picture as XML, and gives the texts in it.
func wellFormed(t *testing.T, svg []byte) (texts []string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(string(svg)))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return texts
		}
		require.NoError(t, err)
		if s, ok := token.(xml.CharData); ok && strings.TrimSpace(string(s)) != "" {
			texts = append(texts, string(s))
		}
	}
}

// Two files of a megabyte: the second takes its first half from the first.
func half() *wire.LayoutReply {
	return &wire.LayoutReply{More: 7, MoreBytes: 7 << 20, Holders: []string{"h0", "h1"},
		Files: []*wire.FileLayout{
			{Build: "cdcdcdcdcdcdcdcd", ModelName: "batch1.onnx", Digest: "h0", Size: 1 << 20,
				OwnBytes:    1 << 20,
				SharedBytes: 1 << 19, Pieces: []*wire.Piece{{Length: 1 << 20}}},
			{Build: "efefefefefefefef", ModelName: `<b&"4.onnx`, Digest: "h1", Size: 1 << 20,
				OwnBytes:    1 << 19,
				SharedBytes: 1 << 19, Packed: true, Pieces: []*wire.Piece{
					{Length: 1 << 19, From: 1 << 19},
					{At: 1 << 19, Length: 1 << 19, Holder: 1, From: 1 << 19}}},
		}}
}

func TestPictureShowsCompression(t *testing.T) {
	files := half()
	files.Files[1].CompressedBytes = 1 << 18
	require.Contains(t, wellFormed(t, Draw(files)),
		"packed, 256.0 KiB of it compressed, 512.0 KiB its own")
}

func TestPictureShowsSharedParts(t *testing.T) {
	svg := Draw(half())
	texts := wellFormed(t, svg)
	require.Contains(t, texts, `<b&"4.onnx`, "escaped, and so itself again")
	require.Contains(t, texts, "packed, 512.0 KiB its own")
	require.Contains(t, texts, "stored whole, 512.0 KiB elsewhere too")
	require.Contains(t, texts, "batch1.onnx cdcdcdcdcdcd, also in 1 other file")
	require.Contains(t, texts, "7 files more, 7.0 MiB, are smaller and not drawn")
	x, width := svgMargin+svgLabels, svgBar/2
	bar := func(x, y int, colour string) string {
		return fmt.Sprintf(`<rect x="%d" y="%d" width="%d" height="%d" fill="%s"><title>`, x, y,
			width, svgBarHigh, colour)
	}
	first := strings.Index(string(svg), bar(x, 112, svgAlone))
	require.Positive(t, first, "what nobody takes of the first file: its first half\n%s", svg)
	require.Contains(t, string(svg), bar(x+width, 112, svgColours[0]), "what is taken")
	require.Contains(t, string(svg), bar(x, 112+svgRow, svgColours[0]),
		"by the second, for its first half")
	require.Contains(t, string(svg), bar(x+width, 112+svgRow, svgAlone))
}

// The part of a label that differs comes first, and the end is cut if it does not fit.
func TestPictureNamesVariantsByTheirDifference(t *testing.T) {
	file := func(digest, shapes string) *wire.FileLayout {
		return &wire.FileLayout{Build: digest + "cdcdcdcdcdcdcdcd", ModelName: "m.onnx",
			Ep:     "OpenVINOExecutionProvider",
			Shapes: shapes, Digest: digest, Size: 1, OwnBytes: 1}
	}
	texts := wellFormed(t, Draw(&wire.LayoutReply{Files: []*wire.FileLayout{
		file("a", "batch=1, channels=3, height=320, width=320"),
		file("b", "batch=1, channels=3, height=640, width=640")}}))
	require.Contains(t, texts, "height=320, width=320, acdcdcdcdcdc, batch=1,…")
	require.Contains(t, texts, "height=640, width=640, bcdcdcdcdcdc, batch=1,…")
	require.Contains(t, texts, "stored whole", "nothing of it stands elsewhere")
	require.Contains(t,
		wellFormed(t, Draw(&wire.LayoutReply{Files: []*wire.FileLayout{file("a", "batch=1")}})),
		"acdcdcdcdcdc, batch=1, OpenVINO")
}

// However many pieces files have, and whatever they say, a picture stays small and is one.
func TestAPictureIsBounded(t *testing.T) {
	l := &wire.LayoutReply{}
	for i := range MostFiles {
		f := &wire.FileLayout{ModelName: strings.Repeat("ü\x00", 500), Digest: fmt.Sprint(i),
			Size: 1 << 30}
		l.Holders = append(l.Holders, f.Digest)
		for at := int64(0); at < 1<<30; at += 1 << 21 {
			holder := uint32((i + int(at>>21)) % MostFiles)
			f.Pieces = append(f.Pieces,
				&wire.Piece{At: at, Length: 1 << 21, Holder: holder, From: at})
		}
		l.Files = append(l.Files, f)
	}
	svg := Draw(l)
	wellFormed(t, svg)
	require.Less(t, len(svg), 5<<20)
	wellFormed(t, Draw(&wire.LayoutReply{}))
	wellFormed(t,
		Draw(&wire.LayoutReply{Files: []*wire.FileLayout{{Digest: "x", Size: 0},
			{Digest: "y", Size: 1,
				Pieces: []*wire.Piece{{At: -5, Length: 1 << 40, Holder: 9, From: -1}}}}}))
}
