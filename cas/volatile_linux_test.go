package cas

import (
	"bytes"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"
)

func fill(t *testing.T, s *Store, b []byte) Digest {
	t.Helper()
	d := Digest(blake3.Sum256(b))
	require.NoError(t, s.Fill(ctx, d, func(f *os.File) error { _, err := f.Write(b); return err }))
	return d
}

// countingSyncs counts what should not happen.
type countingSyncs struct {
	OS
	syncs atomic.Int64
}

func (c *countingSyncs) Sync(f *os.File) error     { c.syncs.Add(1); return c.OS.Sync(f) }
func (c *countingSyncs) SyncDir(path string) error { c.syncs.Add(1); return c.OS.SyncDir(path) }

func TestAVolatileStoreSyncsNothing(t *testing.T) {
	fs := &countingSyncs{}
	s := openStore(t, Options{Volatile: true, FS: fs})
	before := fs.syncs.Load()
	d := fill(t, s, []byte("made from others"))
	require.Equal(t, []byte("made from others"), contents(t, s, d))
	require.Equal(t, before, fs.syncs.Load())
	stamp, ok := s.Stamp(d)
	require.True(t, ok)
	require.Equal(t, Boot(), stamp.Boot, "a power cut may bring its times back without its bytes")
}

func TestFillWritesOnceForAll(t *testing.T) {
	s := openStore(t, Options{Volatile: true})
	b := bytes.Repeat([]byte("x"), 1<<20)
	d := Digest(blake3.Sum256(b))
	var writes atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			require.NoError(t,
				s.Fill(ctx, d,
					func(f *os.File) error { writes.Add(1); _, err := f.Write(b); return err }))
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, writes.Load())
	broken := errors.New("no more")
	require.ErrorIs(t, s.Fill(ctx, Digest{1}, func(*os.File) error { return broken }), broken)
	require.False(t, s.Has(Digest{1}))
	require.Error(t, openStore(t, Options{}).Fill(ctx, d, nil),
		"nothing is believed that a durable store should hold")
}

// A volatile blob that differs from its stamp is removed, because filling it again is faster than
// hashing it.
func TestAVolatileBlobThatWasChangedIsGone(t *testing.T) {
	s := openStore(t, Options{Volatile: true})
	d := fill(t, s, []byte("as it was"))
	require.NoError(t, os.Chmod(s.path(d), 0o644))
	_, err := s.Open(ctx, d)
	require.ErrorIs(t, err, ErrNotFound)
	require.False(t, s.Has(d))
	fill(t, s, []byte("as it was"))
	require.NoError(t, os.RemoveAll(s.dir))
	fill(t, s, []byte("as it was"))
	require.Equal(t, []byte("as it was"), contents(t, s, d))
}

// Over a restart only what the book still has a stamp of stays, and nothing over a boot.
func TestAVolatileStoreOpenedAgain(t *testing.T) {
	dir, book := t.TempDir(), &bookInMemory{stamps: make(map[Digest]Stamp)}
	s, err := Open(dir, Options{Volatile: true, Stamps: book})
	require.NoError(t, err)
	kept, unknown, earlier := fill(t, s, []byte("kept")), fill(t, s, []byte("unknown")),
		fill(t, s, []byte("earlier boot"))
	require.NoError(t, book.ForgetStamp(unknown))
	stamp, _ := book.LoadStamp(earlier)
	stamp.Boot = "another"
	require.NoError(t, book.SaveStamp(earlier, stamp))
	require.NoError(t, os.WriteFile(s.objects+"/stray", nil, 0o600))
	s, err = Open(dir, Options{Volatile: true, Stamps: book})
	require.NoError(t, err)
	require.Equal(t, []byte("kept"), contents(t, s, kept))
	require.False(t, s.Has(unknown))
	require.False(t, s.Has(earlier))
}

type bookInMemory struct {
	mu     sync.Mutex
	stamps map[Digest]Stamp
}

func (b *bookInMemory) LoadStamp(d Digest) (Stamp, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, ok := b.stamps[d]
	return s, ok
}
func (b *bookInMemory) SaveStamp(d Digest, s Stamp) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stamps[d] = s
	return nil
}
func (b *bookInMemory) ForgetStamp(d Digest) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.stamps, d)
	return nil
}
