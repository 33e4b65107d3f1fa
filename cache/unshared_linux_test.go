package cache

import (
	"context"
	"encoding/hex"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
)

// eventTexts asks for a model of n² weights, those of dense, and kib KiB of digits, which stand
// nowhere else and repeat nothing.
func (b *bench) eventTexts(n, kib, batch int) *request.Request {
	raw := make([]byte, kib<<9)
	_, _ = rand.NewChaCha8([32]byte{9}).Read(raw)
	model := compilertest.DenseModel(7, n, batch)
	model.Initializers = append(model.Initializers,
		tinymodel.Tensor{Name: "words", Type: 2, Shape: []int64{int64(kib << 10)},
			Raw: []byte(hex.EncodeToString(raw))})
	path := filepath.Join(b.TempDir(), "model.onnx")
	require.NoError(b, os.WriteFile(path, model.Encode(), 0o644))
	return b.request(b.openFile(path))
}

// pass lets time go by, and does what is done by itself then, of which nothing goes on beside it.
func (b *bench) pass(d time.Duration) {
	b.Helper()
	b.later.Add(int64(d))
	when, err := (&Options{}).packWhen()
	require.NoError(b, err)
	require.NoError(b, b.cache.Store.Packer().Pack(context.Background(), when))
}

// A blob that shares nothing stays whole, however long it is unused, because it is the base of
// later ones.
func TestABlobThatSharesNothingStaysWhole(t *testing.T) {
	b := newBench(t)
	builds, _ := b.stores([]*request.Request{b.eventTexts(512, 900, 1)})
	b.pass(90 * 24 * time.Hour)
	require.True(t, b.cache.cas.Has(large(builds[0])))
	more, _ := b.stores([]*request.Request{b.eventTexts(512, 900, 2)})
	require.Greater(t, b.cache.Store.Packer().PackSaving(more[0].ID), int64(1<<20))
	b.pass(3 * time.Hour)
	require.True(t, b.cache.packing.OnlyPacked(large(more[0])))
}
