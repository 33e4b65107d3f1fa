package cache

import (
	"context"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/index"
)

// worded asks for a model of n² weights, those of dense, and kib KiB of digits, which stand nowhere else, repeat nothing, and compress to little more than half.
func (b *bench) worded(n, kib, batch int) *Request {
	raw := make([]byte, kib<<9)
	_, _ = rand.NewChaCha8([32]byte{9}).Read(raw)
	model := tinymodel.DenseModel(7, n, batch)
	model.Initializers = append(model.Initializers, tinymodel.Tensor{Name: "words", Type: 2, Shape: []int64{int64(kib << 10)}, Raw: []byte(hex.EncodeToString(raw))})
	path := filepath.Join(b.TempDir(), "model.onnx")
	require.NoError(b, os.WriteFile(path, model.Encode(), 0o644))
	return b.request(b.openFile(path))
}

// compress does what is done by itself with a blob that is cold enough; where that is done already, nothing.
func (b *bench) compress(d cas.Digest) error {
	all, err := b.cache.forms.Compressibles(context.Background())
	for _, x := range all {
		if x.Blob == d {
			_, err2 := b.cache.forms.Compress(context.Background(), x, nil)
			err = errors.Join(err, err2)
		}
	}
	return err
}

func (b *bench) compressed(d cas.Digest) bool {
	p, ok := b.cache.forms.Packed(d)
	return ok && p.Compressed > 0
}

// knownDense tells whether it is noted that compressing a blob gains too little.
func (b *bench) knownDense(d cas.Digest) bool {
	raw, ok := b.cache.index.Share(d)
	return ok && raw[1]&2 != 0
}

// pass lets time go by, and does what is done by itself then, of which nothing goes on beside it.
func (b *bench) pass(d time.Duration) { b.Helper(); b.passWith(d, 0) }

func (b *bench) passWith(d, compressAfter time.Duration) {
	b.Helper()
	b.later.Add(int64(d))
	when, err := (&Options{CompressAfter: compressAfter}).packWhen()
	require.NoError(b, err)
	require.NoError(b, b.cache.sharing.pack(context.Background(), when))
}

func TestColdLiteralsAreCompressed(t *testing.T) {
	const setting = 10 * 24 * time.Hour
	b := newBench(t)
	builds, files := b.stores([]*Request{b.dense(512, 1), b.worded(512, 512, 2)})
	d := large(builds[1])
	b.passWith(3*time.Hour, setting)
	require.True(t, b.cache.forms.OnlyPacked(d))
	b.passWith(9*24*time.Hour, setting)
	require.False(t, b.compressed(d), "not yet cold enough")
	p, _ := b.cache.forms.Packed(d)
	literals := p.Containers[p.Literals].Digest
	before, err := b.cache.forms.Space(true)
	require.NoError(t, err)
	own, err := b.cache.ownBytes(b.self(), builds[1])
	require.NoError(t, err)
	b.passWith(24*time.Hour, setting)
	require.True(t, b.compressed(d))
	require.False(t, b.cache.cas.Has(literals), "its literals are in the recipe's file")
	require.Empty(t, b.cache.forms.Users(literals))
	after, err := b.cache.forms.Space(true)
	require.NoError(t, err)
	require.InDelta(t, 256<<10, before.Sum()-after.Sum(), 16<<10, "hexadecimal digits have four bits of eight")
	b.exact()
	less, err := b.cache.ownBytes(b.self(), builds[1])
	require.NoError(t, err)
	require.Equal(t, before.Sum()-after.Sum(), own[0]-less[0], "what its removal would free")
	b.requireSound()

	for range 2 {
		a, phases := b.phases(b.worded(512, 512, 2))
		require.Equal(t, Hit, a.Outcome)
		require.Contains(t, phases, phaseUnpacking)
		require.Equal(t, files[1], b.read(a))
		require.NoError(t, a.View.Close())
		b.exact()
		b.later.Add(int64(time.Hour))
		_, err = b.cache.dropUnpacked(builds[1].ID)
		require.NoError(t, err)
		b.reopen()
	}
	disk, err := b.cache.objectBytes(context.Background())
	require.NoError(t, err)
	err = b.cache.retract(context.Background(), builds[1], "a test", 0)
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

// A blob that shares with nothing is kept compressed when it is cold, whole again when it is used, and by hand.
func TestAColdBlobThatSharesNothingIsCompressed(t *testing.T) {
	b := newBench(t)
	builds, files := b.stores([]*Request{b.worded(32, 512, 1)})
	d := large(builds[0])
	ask := func() {
		a := b.acquire(b.worded(32, 512, 1))
		require.Equal(t, Hit, a.Outcome)
		require.Equal(t, files[0], b.read(a))
		require.NoError(t, a.View.Close())
	}
	whole, _, _ := b.cache.forms.Bytes(d)
	b.pass(8 * 24 * time.Hour)
	require.True(t, b.compressed(d))
	now, recipe, _ := b.cache.forms.Bytes(d)
	require.Zero(t, now)
	require.Less(t, recipe, whole*6/10)
	b.exact()
	b.requireSound()
	laid, err := b.cache.Layout(context.Background(), b.self(), nil, 1, true)
	require.NoError(t, err)
	require.Equal(t, laid.Files[0].Size, laid.Files[0].Compressed)
	require.Equal(t, []Piece{{Length: laid.Files[0].Size, Holder: d}}, laid.Files[0].Pieces)
	ask()
	require.True(t, b.cache.forms.OnlyPacked(d))
	b.pass(time.Hour)
	require.False(t, b.cache.forms.OnlyPacked(d), "it is used again")
	require.False(t, b.compressed(d))
	b.exact()
	ask()
	_, err = b.cache.forms.LookAt(context.Background(), d, nil) // as what has become whole is by itself
	require.NoError(t, err)
	b.pass(8 * 24 * time.Hour)
	require.True(t, b.compressed(d))
	_, err = b.cache.Unpack(context.Background(), b.self(), nil, true, false, nil)
	require.NoError(t, err)
	require.False(t, b.compressed(d))
	ask()
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

// What a later blob has in common with one that is compressed is not stored a second time.
func TestACompressedBlobBecomesAContainerAgain(t *testing.T) {
	b := newBench(t)
	builds, files := b.stores([]*Request{b.worded(512, 900, 1)})
	b.pass(8 * 24 * time.Hour)
	require.True(t, b.compressed(large(builds[0])))
	more, others := b.stores([]*Request{b.worded(512, 900, 2)})
	require.False(t, b.cache.forms.OnlyPacked(large(builds[0])))
	require.Greater(t, b.cache.packSaving(more[0].ID), int64(1<<20))
	b.pass(8 * 24 * time.Hour)
	require.True(t, b.cache.forms.OnlyPacked(large(more[0])))
	require.False(t, b.compressed(large(builds[0])), "another one takes from it")
	for i, r := range []*Request{b.worded(512, 900, 1), b.worded(512, 900, 2)} {
		a := b.acquire(r)
		require.Equal(t, Hit, a.Outcome)
		require.Equal(t, append(files, others...)[i], b.read(a))
		require.NoError(t, a.View.Close())
	}
}

// What cannot be made whole, since it is damaged, keeps nobody from looking at what is like it.
func TestADamagedCompressedBlobIsNoContainer(t *testing.T) {
	b := newBench(t)
	builds, files := b.stores([]*Request{b.worded(512, 900, 1)})
	b.pass(8 * 24 * time.Hour)
	d := large(builds[0])
	require.True(t, b.compressed(d))
	path := filepath.Join(b.state, "recipes", d.String()[:2], d.String())
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	raw[len(raw)/2] ^= 1
	require.NoError(t, os.Chmod(path, 0o600))
	require.NoError(t, os.WriteFile(path, raw, 0o400))
	more, _ := b.stores([]*Request{b.worded(512, 900, 2)})
	require.True(t, b.cache.forms.LookedAt(large(more[0])))
	require.True(t, b.cache.forms.OnlyPacked(d))
	a := b.acquire(b.worded(512, 900, 1))
	require.Equal(t, Compiled, a.Outcome)
	require.Equal(t, files[0], b.read(a))
}

// Literals that another recipe takes from stay a container.
func TestLiteralsThatOthersTakeFromAreNotCompressed(t *testing.T) {
	b := newBench(t)
	builds, _ := b.stores([]*Request{b.dense(512, 1), b.worded(512, 512, 2)})
	require.Positive(t, b.pack(builds[1]))
	d := large(builds[1])
	p, _ := b.cache.forms.Packed(d)
	literals := p.Containers[p.Literals].Digest
	third, files := b.stores([]*Request{b.worded(500, 512, 3)})
	require.Positive(t, b.pack(third[0]))
	require.Len(t, b.cache.forms.Users(literals), 2)
	b.pass(8 * 24 * time.Hour)
	require.False(t, b.compressed(d))
	require.True(t, b.cache.cas.Has(literals))
	a := b.acquire(b.worded(500, 512, 3))
	require.Equal(t, files[0], b.read(a))
	require.NoError(t, a.View.Close())
	b.later.Add(int64(time.Hour))
	err := b.cache.retract(context.Background(), third[0], "a test", 0)
	require.NoError(t, err)
	b.pass(time.Hour)
	require.True(t, b.compressed(d), "nobody takes from them any more")
}

// What gains too little is tried once, and what must not be compressed is not.
func TestWhatIsNotCompressed(t *testing.T) {
	cases := map[string]struct {
		after   time.Duration
		prepare func(b *bench, build *index.Build)
		ask     func(b *bench) *Request
		dense   bool
	}{
		"weights":      {0, nil, func(b *bench) *Request { return b.dense(512, 1) }, true},
		"switched off": {-1, nil, func(b *bench) *Request { return b.worded(32, 512, 1) }, false},
		"pinned": {0, func(b *bench, build *index.Build) {
			require.NoError(b, b.cache.index.Pin(build.ID, index.Pin{}))
		}, func(b *bench) *Request { return b.worded(32, 512, 1) }, false},
		"less than 64 KiB to gain": {0, nil, func(b *bench) *Request { return b.worded(2, 100, 1) }, true},
		"too small":                {0, nil, func(b *bench) *Request { return b.worded(2, 40, 1) }, false},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			builds, _ := b.stores([]*Request{c.ask(b)})
			if c.prepare != nil {
				c.prepare(b, builds[0])
			}
			b.passWith(8*24*time.Hour, c.after)
			require.True(t, b.cache.cas.Has(large(builds[0])))
			require.Equal(t, c.dense, b.knownDense(large(builds[0])))
			if c.dense {
				all, err := b.cache.forms.Compressibles(context.Background())
				require.NoError(t, err)
				require.Empty(t, all, "it would be read again and again")
			}
		})
	}
}

// No byte of what is damaged is served; check finds it, with and without --deep, where the stamp tells.
func TestDamageOfCompressedLiteralsIsNeverServed(t *testing.T) {
	for name, harm := range map[string]func(t *testing.T, raw []byte) []byte{
		"a bit":  func(_ *testing.T, raw []byte) []byte { raw[len(raw)-len(raw)/4] ^= 1; return raw },
		"cut":    func(_ *testing.T, raw []byte) []byte { return raw[:len(raw)-5] },
		"longer": func(_ *testing.T, raw []byte) []byte { return append(raw, 1, 2, 3) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			builds, files := b.stores([]*Request{b.dense(320, 1), b.worded(320, 512, 2)})
			b.pass(8 * 24 * time.Hour)
			d := large(builds[1])
			require.True(t, b.compressed(d))
			path := filepath.Join(b.state, "recipes", d.String()[:2], d.String())
			raw, err := os.ReadFile(path)
			require.NoError(t, err)
			require.NoError(t, os.Chmod(path, 0o644))
			require.NoError(t, os.WriteFile(path, harm(t, raw), 0o444))
			for _, deep := range []bool{false, true} {
				result, err := b.cache.Check(context.Background(), b.self(), deep, false, nil)
				require.NoError(t, err)
				require.Len(t, result.Findings, 1, "deep %v", deep)
				require.Equal(t, "damaged", result.Findings[0].Kind)
			}
			a := b.acquire(b.worded(320, 512, 2))
			require.Equal(t, Compiled, a.Outcome)
			require.Contains(t, a.Why, "damaged")
			require.Equal(t, files[1], b.read(a))
			aside, err := filepath.Glob(filepath.Join(b.state, "quarantine", "*"))
			require.NoError(t, err)
			require.Len(t, aside, 2, "the recipe, and a note why")
			first := b.acquire(b.dense(320, 1))
			require.Equal(t, Hit, first.Outcome)
			require.Equal(t, files[0], b.read(first))
		})
	}
}
