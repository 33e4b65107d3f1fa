package packing

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// atLink stops the goroutine that links a blob, until it is let go on.
type atLink struct {
	cas.OS
	mu          sync.Mutex
	blob        string // guarded by mu
	there, goOn chan struct{}
}

func (l *atLink) Link(from, to string) error {
	l.mu.Lock()
	stops := l.blob != "" && strings.HasSuffix(to, l.blob)
	l.mu.Unlock()
	if stops {
		close(l.there)
		<-l.goOn
	}
	return l.OS.Link(from, to)
}

// A blob that is held from right before its last build is removed is accounted for at once, though
// the account was read in between.
func TestLateHoldIsAccountedAtOnce(t *testing.T) {
	at := &atLink{there: make(chan struct{}), goOn: make(chan struct{})}
	b := newBenchOn(t, inMemory(t), at)
	content := noise(1, mib)
	d := b.put(content)
	at.mu.Lock()
	at.blob = d.String()
	at.mu.Unlock()
	hold, done := b.holdAccounted()
	stored := make(chan error, 1)
	go func() {
		_, _, err := hold.Put(context.Background(), bytes.NewReader(content))
		stored <- err
	}()
	<-at.there // it holds the lock of the blob
	b.user.mu.Lock()
	delete(b.needed, d)
	b.user.mu.Unlock()
	_, err := b.Space(false)
	require.NoError(t, err)
	removed := make(chan error, 1)
	go func() {
		_, err := b.Remove(d)
		removed <- err
	}()
	require.Eventually(t, func() bool {
		b.account.mu.Lock()
		defer b.account.mu.Unlock()
		return b.account.at.IsZero()
	}, time.Minute, time.Millisecond, "it is being removed")
	_, err = b.Space(false)
	require.NoError(t, err)
	close(at.goOn)
	require.NoError(t, <-stored)
	require.NoError(t, <-removed)
	require.True(t, b.whole.Has(d))
	space, err := b.Space(false)
	require.NoError(t, err)
	require.EqualValues(t, mib, space.Bases)
	done()
	require.False(t, b.whole.Has(d))
}

// A missing blob that is stored again by a put that gives up stays for the builds that need it, and
// is accounted for before the reservation of that put ends.
func TestRestoredBlobIsAccounted(t *testing.T) {
	b := newBenchIn(t, inMemory(t))
	all, contents := b.variants(2, mib)
	require.Positive(t, b.pack(all[1]))
	lose := func(d cas.Digest) {
		require.NoError(t, b.whole.Quarantine(d, "test"))
		require.NoError(t, b.memory.Remeasure(d))
	}
	again := func(content []byte) {
		hold := b.whole.Hold()
		_, _, err := hold.Put(context.Background(), bytes.NewReader(content))
		require.NoError(t, err)
		b.Release(hold)
	}
	lose(all[0])
	again(contents[0])
	disk, needed, err := b.memory.DiskBytes(all[0])
	require.NoError(t, err)
	require.True(t, needed)
	require.EqualValues(t, mib+4096, disk)

	b.user.mu.Lock()
	delete(b.needed, all[0]) // from now on it is a base, and nothing else
	b.user.mu.Unlock()
	b.account.changed()
	before, err := b.Space(false)
	require.NoError(t, err)
	lose(all[0])
	b.account.changed()
	without, err := b.Space(false)
	require.NoError(t, err)
	require.EqualValues(t, mib+4096, before.Bases-without.Bases)
	again(contents[0])
	after, err := b.Space(false)
	require.NoError(t, err)
	require.Equal(t, before, after)
}

// A blob that only a quarantined recipe took from is removed with it.
func TestBasesOfAQuarantinedRecipeAreRemoved(t *testing.T) {
	b := newBenchIn(t, inMemory(t))
	all, _ := b.variants(3, mib)
	require.Positive(t, b.pack(all[1]))
	require.Positive(t, b.pack(all[2]))
	packed, _ := b.Recipes.Has(all[1])
	require.NotEqual(t, -1, packed.Literals)
	literals := packed.Bases[packed.Literals].Digest
	require.True(t, b.whole.Has(literals))
	require.NoError(t, b.QuarantineRecipe(all[1], "test"))
	require.False(t, b.whole.Has(literals))
	require.True(t, b.whole.Has(all[0]), "it is needed")
	require.Equal(t, b.onDisk(), b.warnings())
	require.ErrorIs(t, b.QuarantineRecipe(all[1], "test"), cas.ErrNotFound)
}
