package query

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// Overlapping ranges are counted once, in any order.
func TestBytesThatARelativeHasAreCountedOnce(t *testing.T) {
	h, other := cas.Digest{1}, cas.Digest{2}
	has := rangesIn([]Piece{{Length: 60, Holder: h, From: 1030},
		{Length: 60, Holder: h, From: 1000}, {Length: 5, Holder: h, From: 1140},
		{Length: 9, Holder: other}}, map[cas.Digest]bool{h: true})
	require.Equal(t,
		map[cas.Digest][]byteRange{h: {{From: 1000, Length: 90}, {From: 1140, Length: 5}}}, has)
}

// Bytes that one file has and another takes count once, and the own bytes of a packed file are
// those that show prints.
func TestNoMoreOfAFileIsSharedThanItHas(t *testing.T) {
	d := func(n byte) cas.Digest { return cas.Digest{n} }
	l := Layout{Files: []FileLayout{
		{File: index.File{Digest: d(1), Size: 100}, Text: &wire.FileLayout{},
			Pieces: []Piece{{Length: 100, Holder: d(1)}}},
		{File: index.File{Digest: d(2), Size: 100}, Text: &wire.FileLayout{},
			Pieces: []Piece{{Length: 90, Holder: d(1)},
				{At: 90, Length: 10, Holder: d(2), From: 90}}},
		{File: index.File{Digest: d(3), Size: 100}, Text: &wire.FileLayout{},
			Pieces: []Piece{{Length: 95, Holder: d(2)},
				{At: 95, Length: 5, Holder: d(3), From: 95}}},
	}}
	l.countShared()
	require.Equal(t, []int64{90, 95, 95},
		[]int64{l.Files[0].Text.SharedBytes, l.Files[1].Text.SharedBytes,
			l.Files[2].Text.SharedBytes})
}
