package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

const budget = 5 * time.Second

func TestABuildTravelsByEachKindOfRemote(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			f := newFixture(t, kind)
			e := export(t, randomBytes(1, 3<<20))
			_, err := f.Look(t.Context(), name, remote.BuildKey(buildKey), budget)
			require.ErrorIs(t, err, remote.ErrMissing)
			w := f.writer(t)
			sent, put := e.publish(t, w)
			require.Equal(t, e.uploads(kind), sent.Sent)
			require.Equal(t, remote.Created, put)
			sent, put = e.publish(t, w)
			require.Equal(t, remote.Sent{Existed: e.uploads(kind)}, sent)
			require.Equal(t, remote.Exists, put)

			cards, err := f.Look(t.Context(), name, remote.BuildKey(buildKey), budget)
			require.NoError(t, err)
			require.Equal(t, [][]byte{e.card.Raw}, cards)
			cards, err = f.Look(t.Context(), name, remote.RequestKey(otherKey), budget)
			if kind == "https" { // it cannot be listed
				require.ErrorIs(t, err, remote.ErrMissing)
			} else {
				require.NoError(t, err)
				require.Equal(t, [][]byte{e.card.Raw}, cards)
			}

			got, p, err := e.fetch(t, t.Context(), f.Client)
			require.NoError(t, err)
			e.requireEqual(t, got)
			require.Equal(t, p.Total, p.Done)
			require.Greater(t, p.Wire, int64(3<<20))

			// The other machine has an earlier build, from which some bytes differ.
			seed := append(randomBytes(7, 1000), e.files["m.bin"]...)
			copy(seed[2<<20:], "a change")
			got, p, err = e.fetch(t, t.Context(), f.Client, randomBytes(5, 1<<20), seed)
			require.NoError(t, err)
			e.requireEqual(t, got)
			require.Less(t, p.Wire, int64(1<<20))
			require.Greater(t, p.Seeds, int64(2<<20))
		})
	}
}

// A fetch that was given up leaves bytes from which the next one begins.
func TestAPartialFileIsASeed(t *testing.T) {
	f := newFixture(t, "file")
	e := export(t, randomBytes(1, 3<<20))
	e.publish(t, f.Client)
	partial := bytes.Clone(e.files["m.bin"])
	clear(partial[1<<20:])
	got, p, err := e.fetch(t, t.Context(), f.Client, partial)
	require.NoError(t, err)
	e.requireEqual(t, got)
	require.Greater(t, p.Seeds, int64(700<<10))
}

func TestReadersOfAnEpochSeeThePreviousOne(t *testing.T) {
	for _, kind := range []string{"file", "s3"} {
		t.Run(kind, func(t *testing.T) {
			f := newFixture(t, kind)
			e := export(t, randomBytes(1, 1<<20))
			e.publish(t, f.Client)
			now := remote.Epoch(time.Now())
			move := func(to int64) {
				var card []byte
				f.change(t, buildName(now, buildKey), func(b []byte) []byte {
					card = b
					return nil
				})
				f.put(t, buildName(to, buildKey), card, time.Now())
			}
			move(now - 1)
			cards, err := f.Look(t.Context(), name, remote.BuildKey(buildKey), budget)
			require.NoError(t, err)
			require.Equal(t, [][]byte{e.card.Raw}, cards)

			// A daemon that may publish takes it into the current epoch, with its blobs.
			old := blobName(e.layers[1].Blob.Digest)
			f.put(t, old, blobOf(t, e, e.layers[1].Blob.Digest), time.Now().Add(-50*24*time.Hour))
			keys := remote.CardKeys{Build: buildKey}
			put, err := f.Renew(t.Context(), name, keys, cards[0])
			require.NoError(t, err)
			require.Equal(t, remote.Created, put)
			require.WithinDuration(t, time.Now(), f.modified(t, old), time.Minute)
			put, err = f.Renew(t.Context(), name, keys, cards[0])
			require.NoError(t, err)
			require.Equal(t, remote.Exists, put)

			move(now - 2)
			f.change(t, buildName(now-1, buildKey), func([]byte) []byte { return nil })
			_, err = f.Look(t.Context(), name, remote.BuildKey(buildKey), budget)
			require.ErrorIs(t, err, remote.ErrMissing)
		})
	}
}

func TestBlobsThatAreMissingOrDamagedAreUploadedAgain(t *testing.T) {
	for _, kind := range []string{"file", "s3", "oci"} {
		t.Run(kind, func(t *testing.T) {
			f := newFixture(t, kind)
			e := export(t, randomBytes(1, 1<<20))
			e.publish(t, f.Client)
			keys := remote.CardKeys{Build: buildKey, Requests: []portable.Hash{otherKey}}
			large := blobName(e.layers[1].Blob.Digest)
			for damage, to := range map[string]func([]byte) []byte{
				"removed": func([]byte) []byte { return nil },
				"shorter": func(b []byte) []byte { return b[:len(b)-1] },
				"flipped": func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
			} {
				f.change(t, large, to)
				_, err := f.Renew(t.Context(), name, keys, e.card.Raw)
				blobs := slices.Clone(e.blobs)
				want := 1
				if damage == "flipped" { // only readers notice that
					require.NoError(t, err)
					want = e.uploads(kind)
					for i := range blobs {
						blobs[i].Again = true
					}
				} else {
					require.ErrorIs(t, err, remote.ErrMissing, damage)
				}
				sent, err := f.PutBlobs(t.Context(), name, blobs, nil)
				require.NoError(t, err)
				require.Equal(t, want, sent.Sent, damage)
				_, err = f.Renew(t.Context(), name, keys, e.card.Raw)
				require.NoError(t, err)
				got, _, err := e.fetch(t, t.Context(), f.Client)
				require.NoError(t, err, damage)
				e.requireEqual(t, got)
			}
		})
	}
}

func TestADamagedCardIsReplaced(t *testing.T) {
	for _, kind := range []string{"file", "s3", "oci"} {
		t.Run(kind, func(t *testing.T) {
			f := newFixture(t, kind)
			e := export(t, randomBytes(1, 1000))
			e.publish(t, f.Client)
			keys := remote.CardKeys{Build: buildKey, Requests: []portable.Hash{otherKey}}
			epoch := remote.Epoch(time.Now())
			objects := []string{buildName(epoch, buildKey)}
			if kind != "oci" { // it has an index instead
				objects = append(objects, requestName(epoch, otherKey)+buildKey.String())
			}
			damages := map[string]func(object string){"fifo": func(object string) {
				require.NoError(t, os.Remove(filepath.Join(f.dir, object)))
				require.NoError(t, syscall.Mkfifo(filepath.Join(f.dir, object), 0o600))
			}}
			if kind != "file" {
				clear(damages)
			}
			for damage, to := range map[string]func([]byte) []byte{
				"empty":     func([]byte) []byte { return []byte{} },
				"truncated": func(b []byte) []byte { return b[:100] },
				"too large": func([]byte) []byte { return make([]byte, remote.MaxCard+1) },
			} {
				damages[damage] = func(object string) { f.change(t, object, to) }
			}
			for damage, do := range damages {
				for _, object := range objects {
					do(object)
				}
				_, err := f.Look(t.Context(), name, remote.BuildKey(buildKey), budget)
				require.ErrorIs(t, err, remote.ErrDamaged, damage)
				_, err = f.PutCard(t.Context(), name, keys, e.card.Raw)
				require.NoError(t, err, damage)
				for _, key := range []remote.Key{remote.BuildKey(buildKey),
					remote.RequestKey(otherKey)} {
					cards, err := f.Look(t.Context(), name, key, budget)
					require.NoError(t, err, damage)
					require.Equal(t, [][]byte{e.card.Raw}, cards, damage)
				}
				put, err := f.PutCard(t.Context(), name, keys, e.card.Raw)
				require.NoError(t, err)
				require.Equal(t, remote.Exists, put, damage)
			}
		})
	}
}

func blobOf(t *testing.T, e *exported, d portable.Digest) []byte {
	for _, b := range e.blobs {
		if b.Digest == d {
			raw, err := os.ReadFile(b.File.Name())
			require.NoError(t, err)
			return raw
		}
	}
	t.Fatal("no such blob")
	return nil
}

func TestOneOfManyMachinesGetsTheLease(t *testing.T) {
	for _, kind := range []string{"file", "s3"} {
		t.Run(kind, func(t *testing.T) {
			f := newFixture(t, kind)
			ask := func(holder string, release bool) remote.Lease {
				l, err := f.Lease(t.Context(), name,
					remote.LeaseRequest{Key: buildKey, Holder: holder,
						Estimate: time.Minute, TTL: time.Second, Release: release})
				require.NoError(t, err)
				return l
			}
			var all sync.WaitGroup
			states := make([]remote.Lease, 20)
			for i := range states {
				all.Go(func() { states[i] = ask(string(rune('a'+i)), false) })
			}
			all.Wait()
			granted, holder := 0, ""
			for i, l := range states {
				if l.State == remote.Granted {
					granted, holder = granted+1, string(rune('a'+i))
				} else {
					require.Equal(t, remote.Held, l.State)
					require.Equal(t, time.Minute, l.Estimate)
				}
			}
			require.Equal(t, 1, granted)
			require.Equal(t, remote.Granted, ask(holder, false).State, "it is renewed")
			require.Equal(t, remote.Held, ask("z", true).State, "only its holder releases it")
			require.Equal(t, remote.Granted, ask(holder, true).State)
			l := ask("z", false)
			require.Equal(t, remote.Lease{State: remote.Granted}, l)
			require.Equal(t, remote.Held, ask("y", false).State)
			f.put(t, "v1/leases/"+buildKey.String(), encode(leaseObject{"z", 0, 1, 1}),
				time.Now().Add(-10*time.Second)) // z was killed
			l = ask("y", false)
			require.Equal(t, remote.Lease{State: remote.Granted, TakenOver: true}, l)
		})
	}
}

func TestAReaderSeesThatALeaseIsHeld(t *testing.T) {
	f := newFixture(t, "https")
	ask := func(c *remote.Client, holder string) remote.LeaseState {
		l, err := c.Lease(t.Context(), name, remote.LeaseRequest{Key: buildKey, Holder: holder,
			Estimate: time.Minute, TTL: time.Minute})
		require.NoError(t, err)
		return l.State
	}
	require.Equal(t, remote.NotOffered, ask(f.Client, "reader"))
	require.Equal(t, remote.Granted, ask(f.writer(t), "writer"))
	require.Equal(t, remote.Held, ask(f.Client, "reader"))
}

// A look at a lease writes nothing, also where the reader may write.
func TestALookAtALeaseTakesNone(t *testing.T) {
	for _, kind := range []string{"file", "https", "s3"} {
		f := newFixture(t, kind)
		look := func() remote.LeaseState {
			l, err := f.Lease(t.Context(), name, remote.LeaseRequest{Key: buildKey,
				Holder: "reader", TTL: time.Second, Look: true})
			require.NoError(t, err)
			return l.State
		}
		require.Equal(t, remote.NotOffered, look(), kind)
		require.Equal(t, remote.NotOffered, look(), kind)
		object := "v1/leases/" + buildKey.String()
		f.put(t, object, encode(leaseObject{"writer", 0, 1, 60_000}), time.Now())
		require.Equal(t, remote.Held, look(), kind)
		f.put(t, object, encode(leaseObject{"writer", 0, 1, 1}), time.Now().Add(-time.Minute))
		require.Equal(t, remote.NotOffered, look(), kind+": its holder has died")
	}
}

// A check gives the same answer on an empty remote and on one that is in use.
func TestCheckSaysWhatARemoteLacks(t *testing.T) {
	names := func(kind string, found []remote.Finding) (out []string) {
		for _, one := range found {
			require.True(t, one.OK || kind == "oci" && one.Name == "create-only", "%s: %+v", kind,
				one)
			out = append(out, one.Name)
		}
		return out
	}
	for kind, want := range map[string][]string{
		"file": {"read", "look-up", "list", "write", "create-only", "if-match", "range", "clock"},
		"s3": {"read", "look-up", "versions", "list", "write", "create-only", "if-match", "range",
			"clock"},
		"https": {"read", "look-up"},
		"oci":   {"read", "write", "create-only", "range", "referrers", "clock", "look-up"},
	} {
		f := newFixture(t, kind)
		for _, use := range []string{"empty", "published", "checked"} {
			if use == "published" {
				export(t, randomBytes(1, 1<<20)).publish(t, f.writer(t))
			}
			found, err := f.Check(t.Context(), name)
			require.NoError(t, err, "%s, %s", kind, use)
			require.Equal(t, want, names(kind, found), "%s, %s", kind, use)
		}
	}
	f := newFixture(t, "s3")
	f.s3.ignore = true
	found, err := f.Check(t.Context(), name)
	require.NoError(t, err)
	lacks := map[string]bool{}
	for _, one := range found {
		if !one.OK {
			lacks[one.Name] = true
		}
	}
	require.Equal(t, map[string]bool{"create-only": true, "if-match": true}, lacks)
}

func TestTheTrustDocumentIsReadAsItIs(t *testing.T) {
	for _, kind := range kinds {
		f := newFixture(t, kind)
		_, err := f.Trust(t.Context(), name)
		require.ErrorIs(t, err, remote.ErrMissing)
		f.put(t, trustName, []byte("signed"), time.Now())
		raw, err := f.Trust(t.Context(), name)
		require.NoError(t, err)
		require.Equal(t, "signed", string(raw))
		f.put(t, trustName, make([]byte, remote.MaxTrust+1), time.Now())
		_, err = f.Trust(t.Context(), name)
		require.ErrorIs(t, err, remote.ErrDamaged)
	}
}

func TestARateBoundsUploads(t *testing.T) {
	f := newFixture(t, "file")
	f.config.Rate = 1 << 20
	f.Configure([]remote.Config{f.config})
	e := export(t, randomBytes(1, 600<<10))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	began := time.Now()
	_, err := f.PutBlobs(ctx, name, e.blobs, nil)
	require.NoError(t, err)
	require.Greater(t, time.Since(began), 400*time.Millisecond)
}
