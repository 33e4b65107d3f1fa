package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// A collection keeps all that a look-up of the current and the previous epoch needs, and all that
// is young.
func TestACollectionKeepsWhatLookUpsFind(t *testing.T) {
	for _, kind := range []string{"file", "s3"} {
		t.Run(kind, func(t *testing.T) {
			f := newFixture(t, kind)
			e := export(t, randomBytes(1, 1<<20))
			e.publish(t, f.Client)
			long := time.Now().Add(-48 * time.Hour)
			epoch := remote.Epoch(time.Now())
			for _, b := range e.blobs { // all of the build's are old
				var data []byte
				f.change(t, blobName(b.Digest), func(raw []byte) []byte {
					data = raw
					return raw
				})
				f.put(t, blobName(b.Digest), data, long)
			}
			orphan, young := portable.DigestOf([]byte("orphan")), portable.DigestOf([]byte("young"))
			f.put(t, blobName(orphan), []byte("orphan"), long)
			f.put(t, blobName(young), []byte("young"), time.Now())
			f.put(t, buildName(epoch-2, portable.Hash{5}), []byte("card"), long)
			f.put(t, requestName(epoch-2, portable.Hash{6})+"x", []byte("card"), long)
			f.put(t, "v1/leases/old", []byte("lease"), long)
			f.put(t, "v1/leases/new", []byte("lease"), time.Now())
			f.put(t, checkName+"old", []byte("check"), long)
			f.put(t, trustName, []byte("trust"), long)
			for _, dryRun := range []bool{true, false} {
				kinds, err := f.Collect(t.Context(), name, dryRun, nil)
				require.NoError(t, err)
				got := make(map[string]remote.Kind)
				for _, k := range kinds {
					got[k.Name] = k
				}
				require.Equal(t, 2, got["cards"].Removed)
				require.Equal(t, 1, got["blobs"].Removed)
				require.EqualValues(t, 6, got["blobs"].Bytes)
				require.Equal(t, 1, got["blobs"].Young)
				require.Equal(t, len(e.blobs)+1, got["blobs"].Kept)
				require.Equal(t, 1, got["leases"].Removed)
				require.Equal(t, 1, got["checks"].Removed)
			}
			kinds, err := f.Collect(t.Context(), name, false, nil)
			require.NoError(t, err)
			for _, k := range kinds {
				require.Zero(t, k.Removed, k.Name)
			}
			got, _, err := e.fetch(t, t.Context(), f.Client)
			require.NoError(t, err)
			e.requireEqual(t, got)
			raw, err := f.Trust(t.Context(), name)
			require.NoError(t, err)
			require.Equal(t, "trust", string(raw))
		})
	}
}

// A card that cannot be read may need any blob.
func TestACollectionEndsAtACardThatIsDamaged(t *testing.T) {
	f := newFixture(t, "file")
	e := export(t, randomBytes(1, 1<<10))
	e.publish(t, f.Client)
	epoch := remote.Epoch(time.Now())
	f.put(t, blobName(portable.Digest{1}), []byte("orphan"), time.Now().Add(-48*time.Hour))
	f.change(t, buildName(epoch, buildKey), func(raw []byte) []byte { return raw[1:] })
	_, err := f.Collect(t.Context(), name, false, nil)
	require.ErrorIs(t, err, remote.ErrDamaged)
	require.ErrorContains(t, err, fmt.Sprint(buildKey))
	require.NotZero(t, f.modified(t, blobName(portable.Digest{1})))
}

// A card or a document is replaced only if it is the one that its writer has seen.
func TestOnlyTheSeenObjectIsReplaced(t *testing.T) {
	for _, kind := range []string{"file", "s3"} {
		f := newFixture(t, kind)
		zero := portable.Digest{}
		for _, one := range []struct {
			text string
			over portable.Digest
			want remote.Put
		}{{"1", zero, remote.Created}, {"2", zero, remote.Exists},
			{"2", portable.DigestOf([]byte("0")), remote.Exists},
			{"2", portable.DigestOf([]byte("1")), remote.Replaced}} {
			put, err := f.PutTrust(t.Context(), name, []byte(one.text), one.over)
			require.NoError(t, err)
			require.Equal(t, one.want, put, kind)
		}
		raw, err := f.Trust(t.Context(), name)
		require.NoError(t, err)
		require.Equal(t, "2", string(raw))

		e := export(t, randomBytes(1, 1<<10))
		e.publish(t, f.Client)
		keys := remote.CardKeys{Build: buildKey, Over: portable.DigestOf(e.card.Raw)}
		other := export(t, randomBytes(2, 1<<10)).card
		put, err := f.PutCard(t.Context(), name, keys, other.Raw)
		require.NoError(t, err)
		require.Equal(t, remote.Replaced, put)
		put, err = f.PutCard(t.Context(), name, keys, e.card.Raw)
		require.NoError(t, err)
		require.Equal(t, remote.Exists, put)
		cards, err := f.Look(t.Context(), name, remote.BuildKey(buildKey), time.Minute)
		require.NoError(t, err)
		require.Equal(t, other.Raw, cards[0])
	}
}
