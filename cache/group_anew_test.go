package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/memo"
)

// Who asks for one model of a group has not brought the others: what is compiled of it would be in the group's place.
func TestAGroupIsNotMadeAnewOfOneOfItsModels(t *testing.T) {
	b := rebuilding(t, func(o *Options) {
		o.KeepSource = KeepNone
		o.Policies = map[string]Policy{"": {MaxAge: time.Hour, MeasureGain: new(bool)}}
	})
	group := b.acquire(b.group(1, 2))
	b.age()
	require.Equal(t, group.Build.ID, b.acquire(b.request(b.model(1))).Build.ID)
	b.settles()
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
	require.Len(t, b.acquire(b.group(1, 2)).Members, 2)
}

func TestOneModelIsNotTheSameAsItsGroup(t *testing.T) {
	b := newBench(t)
	group := b.acquire(b.group(1, 2))
	_, err := b.cache.askedWith(context.Background(), b.request(b.model(1)), group.Build)
	require.ErrorIs(t, err, upkeep.ErrNoSource)
	whole, err := b.cache.askedWith(context.Background(), b.group(1, 2), group.Build)
	require.NoError(t, err)
	whole.close()
}

// What the memo has of a model is for all who ask for it, at the same time too.
func TestAGroupLeavesAloneWhatIsRememberedOfItsModels(t *testing.T) {
	b := newBench(t)
	r := b.group(1, 2)
	names := [2]string{"batch", "untouched"}
	for i := range 2 {
		key, ok := memo.FileKey(r.Peer.UID, r.model(i).Graph)
		if !ok {
			t.Skip("SKIPPED: the temporary folder's file system promises nothing of stamps")
		}
		b.cache.memo.known.Save(memoEntry{key, "graph"}, modelIdentity{Digest: cas.Digest{byte(i + 1)}, FreeDims: names[:1]}, memoEntries)
	}
	id, err := b.cache.identifyAll(context.Background(), r, false, func(string) {})
	require.NoError(t, err)
	require.Equal(t, []string{"batch", "batch"}, id.FreeDims)
	require.Equal(t, "untouched", names[1])
}
