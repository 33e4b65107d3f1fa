package forms

import (
	"context"
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// digits are n bytes that compress to little more than half.
func digits(seed uint64, n int) []byte { return []byte(hex.EncodeToString(noise(seed, n/2))) }

// compressible gives what may be compressed of a blob.
func (b *bench) compressible(d cas.Digest) Compressible {
	b.Helper()
	all, err := b.Compressibles(context.Background())
	require.NoError(b, err)
	at := slices.IndexFunc(all, func(x Compressible) bool { return x.Blob == d })
	require.GreaterOrEqual(b, at, 0)
	return all[at]
}

// whileWritten compresses, and does something when the first bytes of the file are there.
func (b *bench) whileWritten(x Compressible, do func()) (freed int64, err error) {
	b.Helper()
	staged := func() (n int) {
		files, err := filepath.Glob(filepath.Join(b.Store.dir, "recipes", "incoming", "*"))
		require.NoError(b, err)
		for _, path := range files {
			if info, err := os.Stat(path); err == nil && info.Size() > 0 {
				n++
			}
		}
		return n
	}
	done := false
	freed, err = b.Compress(context.Background(), x, func(context.Context) error {
		if !done && staged() > 0 {
			done = true
			do()
		}
		return nil
	})
	require.True(b, done)
	require.Zero(b, staged(), "nothing half made stays")
	return freed, err
}

// bothKinds does something with a blob that shares nothing, and with one of which there are literals.
func bothKinds(t *testing.T, do func(b *bench, x Compressible, content []byte)) {
	t.Run("alone", func(t *testing.T) {
		b := newBench(t)
		content := digits(1, mib)
		d, _ := b.looked(content)
		do(b, b.compressible(d), content)
	})
	t.Run("literals", func(t *testing.T) {
		b := newBench(t)
		common := noise(2, mib/2)
		b.looked(common)
		content := slices.Concat(digits(1, mib), common)
		d, _ := b.looked(content)
		require.Positive(t, b.pack(d))
		do(b, b.compressible(d), content)
	})
}

// Who changes forms while something is compressed does not wait for it.
func TestCompressingKeepsNobodyWaiting(t *testing.T) {
	bothKinds(t, func(b *bench, x Compressible, content []byte) {
		all, contents := b.variants(2, mib/2)
		freed, err := b.whileWritten(x, func() {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute) // which is for who waits for what would never come
			defer cancel()
			freed, err := b.Pack(ctx, all[1], Worth, nil)
			require.NoError(b, err)
			require.Positive(b, freed)
		})
		require.NoError(b, err)
		require.Greater(b, freed, int64(mib*3/8))
		b.requireAll(map[cas.Digest][]byte{x.Blob: content, all[1]: contents[1]})
		p, _ := b.Packed(x.Blob)
		require.Positive(b, p.Compressed)
		require.False(b, b.whole.Has(x.Bytes))
		b.turnIsFree()
	})
}

// turnIsFree finds out that nobody has kept the turn.
func (b *bench) turnIsFree() {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	leave, err := b.TakeTurn(ctx)
	require.NoError(b, err)
	leave()
}

// What comes meanwhile wins, and what was compressed till then is dropped.
func TestWhatComesWhileSomethingIsCompressedWins(t *testing.T) {
	ctx := context.Background()
	for name, meanwhile := range map[string]func(b *bench, x *Compressible, content []byte) (gone bool){
		"somebody has it": func(b *bench, x *Compressible, content []byte) bool {
			if x.alone() {
				b.held[x.Blob] = true
				return false
			}
			require.NoError(b, b.MakeWhole(ctx, x.Blob))
			return false
		},
		"it is removed": func(b *bench, x *Compressible, content []byte) bool {
			delete(b.needed, x.Blob)
			_, err := b.Remove(x.Blob)
			require.NoError(b, err)
			return true
		},
		"another takes from it": func(b *bench, x *Compressible, content []byte) bool {
			d, found := b.looked(slices.Concat(noise(7, 4096), content[:mib/2]))
			require.Contains(b, found.From, x.Bytes)
			require.Positive(b, b.pack(d))
			return false
		},
	} {
		t.Run(name, func(t *testing.T) {
			bothKinds(t, func(b *bench, x Compressible, content []byte) {
				gone := false
				freed, err := b.whileWritten(x, func() { gone = meanwhile(b, &x, content) })
				require.ErrorIs(b, err, ErrInUse)
				require.Zero(b, freed)
				b.turnIsFree()
				p, packed := b.Packed(x.Blob)
				require.Zero(b, p.Compressed)
				if gone {
					require.False(b, packed || b.whole.Has(x.Blob))
					return
				}
				b.held[x.Blob] = false
				b.requireAll(map[cas.Digest][]byte{x.Blob: content})
			})
		})
	}
}

// What is compressed has its place while it is written, beside what goes for it; where there is none it stays as it is.
func TestWhatIsCompressedHasAPlace(t *testing.T) {
	bothKinds(t, func(b *bench, x Compressible, content []byte) {
		b.full, b.asked = true, nil
		freed, err := b.Compress(context.Background(), x, nil)
		require.ErrorIs(b, err, ErrNoRoom)
		require.Zero(b, freed)
		require.True(b, b.whole.Has(x.Bytes))
		require.Equal(b, []Urgency{AtOnce}, b.asked)
		b.full = false
		_, err = b.whileWritten(x, func() {
			b.user.mu.Lock()
			defer b.user.mu.Unlock()
			require.Equal(b, cas.OnDisk(x.Size-Worth.of(x.Size)), b.reserved)
		})
		require.NoError(b, err)
		require.Zero(b, b.reserved)
		require.False(b, b.whole.Has(x.Bytes))
		b.requireAll(map[cas.Digest][]byte{x.Blob: content})
	})
}
