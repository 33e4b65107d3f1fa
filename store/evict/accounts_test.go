package evict

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// Models come by what all of their builds take on the disk, whatever a single one takes; a model's
// builds by what each takes; what is equal by name, digest and id.
func TestRowsAreSortedByModel(t *testing.T) {
	inv := &Inventory{}
	var list []*index.Brief
	build := func(id byte, model cas.Digest, name string, disk ...int64) {
		b := &index.Brief{ID: index.BuildID{id}, ModelDigest: model, ModelName: name}
		for _, d := range disk {
			b.Blobs = append(b.Blobs, uint32(len(inv.blobs)))
			inv.blobs = append(inv.blobs, index.Blob{Size: d, Disk: d, Needs: 1})
		}
		list = append(list, b)
	}
	build(9, cas.Digest{1}, "small.onnx", 100)
	build(8, cas.Digest{3}, "many.onnx", 200, 100)
	build(7, cas.Digest{4}, "z.onnx", 500) // the largest build, and not the largest model
	build(6, cas.Digest{3}, "many.onnx", 400)
	build(5, cas.Digest{5}, "a.onnx", 500)
	build(4, cas.Digest{6}, "a.onnx", 500)
	build(3, cas.Digest{3}, "many.onnx", 400)
	// Of the smallest model one more, which shares its only blob with a large one: it counts for
	// both.
	list = append(list, &index.Brief{ID: index.BuildID{2}, ModelDigest: cas.Digest{1},
		ModelName: "small.onnx", Blobs: []uint32{3}})
	inv.blobs[3].Needs++
	var order []byte
	rows := inv.NewAccounts(list).ByModel(list)
	for _, r := range rows {
		order = append(order, r.ID[0])
	}
	require.Equal(t, []byte{3, 6, 8, 2, 9, 5, 4, 7}, order)
	require.Equal(t, Row{ID: index.BuildID{2}, Shared: 500, Once: 500}, rows[3])
	require.Equal(t, Row{ID: index.BuildID{8}, Own: 300}, rows[2])
}

// Bytes that builds share, of one model or of several, are in the row of each, and count for the
// model once.
func TestSharedBytesOfAModelCountOnce(t *testing.T) {
	inv := &Inventory{blobs: []index.Blob{{Size: 100, Disk: 100, Needs: 3},
		{Size: 30, Disk: 30, Needs: 2}, {Size: 500, Disk: 500, Needs: 1}}}
	list := []*index.Brief{
		{ID: index.BuildID{1}, ModelDigest: cas.Digest{1}, Blobs: []uint32{0, 1, 2}},
		{ID: index.BuildID{2}, ModelDigest: cas.Digest{1}, Blobs: []uint32{0, 1}},
		{ID: index.BuildID{3}, ModelDigest: cas.Digest{2}, Blobs: []uint32{0}},
	}
	require.Equal(t, []Row{
		{ID: index.BuildID{1}, Own: 500, Shared: 130, Once: 130},
		{ID: index.BuildID{2}, Shared: 130},
		{ID: index.BuildID{3}, Shared: 100, Once: 100},
	}, inv.NewAccounts(list).ByModel(list))
}
