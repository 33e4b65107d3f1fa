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

	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/unixsock/wire"
)

// eventTexts asks for a model of n² weights, those of dense, and kib KiB of digits, which stand
// nowhere else, repeat nothing, and compress to little more than half.
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

func (b *bench) compressed(d cas.Digest) bool {
	p, ok := b.cache.packing.Recipes.Has(d)
	return ok && p.Compressed > 0
}

// pass lets time go by, and does what is done by itself then, of which nothing goes on beside it.
func (b *bench) pass(d time.Duration) {
	b.Helper()
	b.later.Add(int64(d))
	when, err := (&Options{}).packWhen()
	require.NoError(b, err)
	require.NoError(b, b.cache.Store.Packer().Pack(context.Background(), when))
}

// A build's own bytes are compressed when it is packed, if that saves space, and it is served as
// any other packed build.
func TestLiteralsAreCompressedWhenABuildIsPacked(t *testing.T) {
	b := newBench(t)
	builds, files := b.stores([]*request.Request{b.dense(512, 1), b.eventTexts(512, 512, 2)})
	d := large(builds[1])
	before, err := b.cache.objectBytes(context.Background())
	require.NoError(t, err)
	promised := b.cache.Store.Packer().PackSaving(builds[1].ID)
	b.pass(3 * time.Hour)
	require.True(t, b.compressed(d))
	require.Len(t, b.objectsOf(d), 1, "its literals are in the recipe's file")
	after, err := b.cache.objectBytes(context.Background())
	require.NoError(t, err)
	_, recipe, _ := b.cache.packing.Bytes(d)
	require.InDelta(t, promised+256<<10, before-after-recipe, 16<<10,
		"hexadecimal digits have four bits of eight")
	b.exact()
	own, err := b.cache.Queries.RemovalBytes(b.self(), builds[1])
	require.NoError(t, err)
	require.Greater(t, own, recipe, "what its removal would free")
	b.requireSound()

	for range 2 {
		a, phases := b.phases(b.eventTexts(512, 512, 2))
		require.Equal(t, request.Hit, a.Outcome)
		require.Contains(t, phases, lookup.Unpacking)
		require.Equal(t, files[1], b.read(a))
		require.NoError(t, a.View.Close())
		b.exact()
		b.later.Add(int64(time.Hour))
		_, err = b.cache.Store.Packer().DropCopies(builds[1].ID)
		require.NoError(t, err)
		b.reopen()
	}
	disk, err := b.cache.objectBytes(context.Background())
	require.NoError(t, err)
	err = b.remove(builds[1])
	require.NoError(t, err)
	b.exact()
	left, err := filepath.Glob(filepath.Join(b.state, "recipes", "*", "*"))
	require.NoError(t, err)
	require.Empty(t, left)
	now, err := b.cache.objectBytes(context.Background())
	require.NoError(t, err)
	require.Less(t, now, disk)
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
}

// objectsOf lists what the recipe of a blob takes from.
func (b *bench) objectsOf(d cas.Digest) (all []cas.Digest) {
	p, _ := b.cache.packing.Recipes.Has(d)
	for _, one := range p.Bases {
		require.True(b, b.cache.cas.Has(one.Digest))
		all = append(all, one.Digest)
	}
	return all
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

// No byte of what is damaged is served; check finds it, with and without --deep, where the stamp
// tells.
func TestDamageOfCompressedLiteralsIsNeverServed(t *testing.T) {
	for name, harm := range map[string]func(t *testing.T, raw []byte) []byte{
		"a bit": func(_ *testing.T,
			raw []byte) []byte {
			raw[len(raw)-len(raw)/4] ^= 1
			return raw
		},
		"cut":    func(_ *testing.T, raw []byte) []byte { return raw[:len(raw)-5] },
		"longer": func(_ *testing.T, raw []byte) []byte { return append(raw, 1, 2, 3) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			builds, files := b.stores([]*request.Request{b.dense(320, 1),
				b.eventTexts(320, 512, 2)})
			b.pass(3 * time.Hour)
			d := large(builds[1])
			require.True(t, b.compressed(d))
			path := filepath.Join(b.state, "recipes", d.String()[:2], d.String())
			raw, err := os.ReadFile(path)
			require.NoError(t, err)
			require.NoError(t, os.Chmod(path, 0o644))
			require.NoError(t, os.WriteFile(path, harm(t, raw), 0o444))
			for _, deep := range []bool{false, true} {
				result, err := b.cache.Check(context.Background(), b.self(),
					&wire.Check{Deep: deep}, nil)
				require.NoError(t, err)
				require.Len(t, result.Findings, 1, "deep %v", deep)
				require.Equal(t, "damaged", result.Findings[0].Kind)
			}
			a := b.acquire(b.eventTexts(320, 512, 2))
			require.Equal(t, request.Compiled, a.Outcome)
			require.Contains(t, a.Why, "damaged")
			require.Equal(t, files[1], b.read(a))
			aside, err := filepath.Glob(filepath.Join(b.state, "quarantine", "*"))
			require.NoError(t, err)
			require.Len(t, aside, 2, "the recipe, and a note why")
			first := b.acquire(b.dense(320, 1))
			require.Equal(t, request.Hit, first.Outcome)
			require.Equal(t, files[0], b.read(first))
		})
	}
}
