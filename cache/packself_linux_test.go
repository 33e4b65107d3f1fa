package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/tinymodel"
)

// repeated asks for a model that has the weights of variants again and again, as a weight-sharing group has them whose execution provider puts each member's beside those of the others.
func (b *bench) repeated(times int) *Request {
	model := tinymodel.DenseModel(7, 512, 1)
	for i := 1; i < times; i++ {
		again := model.Initializers[0]
		again.Name = string(rune('a' + i))
		model.Initializers = append(model.Initializers, again)
	}
	path := filepath.Join(b.TempDir(), "model.onnx")
	require.NoError(b, os.WriteFile(path, model.Encode(), 0o644))
	return b.request(b.openFile(path))
}

// What stands in a blob several times is stored once when it is packed, whether there is another blob like it or not.
func TestABuildThatRepeatsItselfIsPacked(t *testing.T) {
	b := newBench(t)
	builds, files := b.stores([]*Request{b.repeated(3)})
	saving := b.cache.packSaving(builds[0].ID)
	require.Greater(t, saving, int64(19<<20/10), "two of the three")
	require.Equal(t, saving, b.packable())
	require.InDelta(t, saving, b.pack(builds[0]), 16<<10)
	require.Zero(t, b.packable())
	require.True(t, b.cache.forms.OnlyPacked(large(builds[0])))
	a, phases := b.phases(b.repeated(3))
	require.Contains(t, phases, phaseUnpacking)
	require.Equal(t, files[0], b.read(a))

	// One that has the same takes from what is left of it.
	later, _ := b.stores([]*Request{b.variant(1)})
	require.Greater(t, b.pack(later[0]), int64(900<<10))
}

func (b *bench) packable() int64 {
	u, _, err := b.cache.Usage(context.Background(), b.self(), nil, "", nil)
	require.NoError(b, err)
	return u.Packable
}

// As long as it is whole it is a container as any other, and what is packed with it keeps it so.
func TestABuildThatRepeatsItselfIsAContainer(t *testing.T) {
	b := newBench(t)
	builds, files := b.stores([]*Request{b.repeated(3), b.variant(1)})
	require.Greater(t, b.pack(builds[1]), int64(900<<10))
	require.Zero(t, b.pack(builds[0]))
	a, _ := b.phases(b.variant(1))
	require.Equal(t, files[1], b.read(a))
}
