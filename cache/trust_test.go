package cache

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
	"github.com/epcached/epcached/unixsock/wire"
)

// rootKey is a root key pair, and what it signs.
type rootKey struct {
	testing.TB
	*portable.Signer
	public string // file
}

func newRootKey(t testing.TB) *rootKey {
	secret, open, _, err := portable.GenerateKey(true)
	require.NoError(t, err)
	s, err := portable.ParseSigner("root", secret)
	require.NoError(t, err)
	public := filepath.Join(t.TempDir(), "root.pub")
	require.NoError(t, os.WriteFile(public, open, 0o644))
	return &rootKey{t, s, public}
}

// document is a trust document that counts for a week.
func (r *rootKey) document(sequence uint64, revoked ...portable.Revocation) []byte {
	now := time.Now()
	raw, err := r.SignDocument(portable.Document{Sequence: sequence, Issued: now,
		Expires: now.AddDate(0, 0, portable.DocumentDays), Revoked: revoked})
	require.NoError(r, err)
	return raw
}

func (b *bucket) setTrust(t testing.TB, raw []byte) {
	if b.helper != nil {
		over := portable.Digest{}
		if have, err := b.helper.Trust(t.Context(), "fleet"); err == nil {
			over = portable.DigestOf(have)
		}
		put, err := b.helper.PutTrust(t.Context(), "fleet", raw, over)
		require.NoError(t, err)
		require.NotEqual(t, remote.Exists, put)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.trust = raw
}

// trusts reloads the configuration with other trusted keys for the remote.
func (b *bench) trusts(files ...string) {
	o := b.cache.settings.Load().Options
	all := []remotes.Remote{o.Remotes[0]}
	all[0].Trust, o.Remotes = files, all
	require.NoError(b, b.cache.Reload(o))
}

// explainsRemotes returns what the last look-up for a model came to.
func (b *bench) explainsRemotes(r *request.Request) string {
	e, err := b.cache.Acquire(b.Context(), explained(r), nil)
	require.NoError(b, err)
	return strings.Join(e.Explanation.Remotes, "\n")
}

// toldOf returns the texts of the events of a kind.
func (b *bench) toldOf(kind string) string {
	var all []string
	for _, e := range b.events(b.self()) {
		if e.Kind == kind {
			all = append(all, e.Text)
		}
	}
	return strings.Join(all, "\n")
}

// published is a remote in memory with a build of model 1, which a machine has published.
func published(t testing.TB) (store *bucket, private, public string, made *request.Answer) {
	store = newBucket()
	private, public, made = publishedTo(t, store)
	return store, private, public, made
}

func publishedTo(t testing.TB, store *bucket) (private, public string, made *request.Answer) {
	private, public = fleetKeys(t)
	a := machine(t, store, remotes.Remote{Publish: true, SigningKey: private,
		Trust: []string{public}})
	made = a.acquire(a.request(a.model(1)))
	store.built = portable.Hash(made.Build.BuildKey)
	store.waitForCards(t, 1)
	return private, public, made
}

// Without a document of a trusted root key nothing is fetched, unless the configuration says so.
func TestRemotesNeedATrustDocument(t *testing.T) {
	store, _, public, _ := published(t)
	root := newRootKey(t)
	trusted := remotes.Remote{Trust: []string{public, root.public}}
	b := machine(t, store, trusted)
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	require.Contains(t, b.explainsRemotes(b.request(b.model(1))), "there is no trust document")
	require.Contains(t, b.cache.RemoteStatus()[0].TrustError, "there is no trust document")
	doctor, err := b.cache.Queries.Doctor().Examine(t.Context(), b.self())
	require.NoError(t, err)
	require.Contains(t, doctor.String(), "no build is fetched: there is no trust document")

	store.setTrust(t, root.document(1))
	c := machine(t, store, trusted)
	require.Equal(t, request.Hit, c.acquire(c.request(c.model(1))).Outcome)
	require.EqualValues(t, 1, c.cache.RemoteStatus()[0].TrustSequence)
	require.Contains(t, c.toldOf(event.Trust), "document 1 of root key ")

	store.setTrust(t, newRootKey(t).document(9))
	d := machine(t, store, trusted)
	require.Equal(t, request.Compiled, d.acquire(d.request(d.model(1))).Outcome)
	require.Contains(t, d.toldOf(event.Trust), "no trusted root key")
}

// An expired document stops new fetches, and builds that were fetched stay.
func TestAnExpiredTrustDocumentStopsFetches(t *testing.T) { onEachEngine(t, stopFetches) }

func stopFetches(t *testing.T, store *bucket) {
	_, public, _ := publishedTo(t, store)
	root := newRootKey(t)
	store.setTrust(t, root.document(1))
	b := machine(t, store, remotes.Remote{Trust: []string{public, root.public}})
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
	b.waits(8 * 24 * time.Hour)
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
	require.Zero(t, b.compiler.Compiles.Load())
	_, err := b.cache.Remove(t.Context(), b.self(), []string{b.list()[0].row.Build}, false, false)
	require.NoError(t, err)
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	require.Contains(t, b.explainsRemotes(b.request(b.model(1))), " expired on ")
}

// An earlier document than was seen is refused, also after a restart and by what a bundle brings,
// and what the later one revoked stays revoked.
func TestATrustDocumentIsNotRolledBack(t *testing.T) { onEachEngine(t, refuseRollback) }

func refuseRollback(t *testing.T, store *bucket) {
	_, public, made := publishedTo(t, store)
	root := newRootKey(t)
	store.setTrust(t, root.document(5, portable.Revocation{
		Build: portable.Hash(made.Build.BuildKey), Reason: "a bad driver"}))
	trusted := remotes.Remote{Trust: []string{public, root.public}}
	b := machine(t, store, trusted)
	compiles := func() { // a request may lose a quarter of the estimate to the remote
		b.expects(b.request(b.model(1)), time.Minute)
		require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	}
	compiles()
	require.Contains(t, b.explainsRemotes(b.request(b.model(1))), "is revoked: a bad driver")

	store.setTrust(t, root.document(4))
	b.reopen()
	b.waits(2 * time.Hour)
	_, err := b.cache.Remove(t.Context(), b.self(), []string{b.list()[0].row.Build}, false, false)
	require.NoError(t, err)
	compiles()
	require.Contains(t, b.toldOf(event.Trust), "sequence number 4, and 5 was seen")
	require.Contains(t, b.cache.RemoteStatus()[0].TrustError, "rolled back")
	require.Contains(t, b.explainsRemotes(b.request(b.model(1))), "is revoked: a bad driver")

	store.setTrust(t, root.document(5)) // another one of the same number
	b.waits(2 * time.Hour)
	require.NoError(t, b.cache.Reload(b.cache.settings.Load().Options))
	b.expects(b.request(b.model(2)), time.Minute)
	b.acquire(b.request(b.model(2)))
	require.Contains(t, b.toldOf(event.Trust), "two trust documents")
}

// Another root key takes over: while both are trusted both documents count, each with its own
// sequence numbers, and then the new one alone.
func TestAnotherRootKeyTakesOver(t *testing.T) { onEachEngine(t, replaceRootKey) }

func replaceRootKey(t *testing.T, store *bucket) {
	_, public, made := publishedTo(t, store)
	old, fresh := newRootKey(t), newRootKey(t)
	store.setTrust(t, old.document(7, portable.Revocation{
		Build: portable.Hash(made.Build.BuildKey), Reason: "a bad driver"}))
	b := machine(t, store, remotes.Remote{Trust: []string{public, old.public}})
	fetch := func() *request.Request {
		r := b.request(b.model(1))
		r.OnMiss = request.Fetch
		return r
	}
	require.Contains(t, b.refused(fetch()).Text, "is revoked: a bad driver")

	b.trusts(public, old.public, fresh.public)
	store.setTrust(t, fresh.document(1))
	b.waits(2 * time.Hour)
	require.Contains(t, b.refused(fetch()).Text, "is revoked: a bad driver")
	require.Contains(t, b.toldOf(event.Trust), "document 1 of root key "+fresh.ID[:8])

	b.trusts(public, fresh.public)
	require.Equal(t, request.Hit, b.acquire(fetch()).Outcome)
	require.Zero(t, b.compiler.Compiles.Load())

	store.setTrust(t, old.document(8))
	b.waits(2 * time.Hour)
	r := b.request(b.model(2))
	r.OnMiss = request.Fetch
	b.refused(r)
	require.Contains(t, b.toldOf(event.Trust), "no trusted root key")
}

// A build that was fetched is withheld when its key, its manifest or its build key is revoked.
func TestARevokedBuildIsWithheld(t *testing.T) {
	for name, revoke := range map[string]func(*request.Answer) portable.Revocation{
		"key": func(a *request.Answer) portable.Revocation {
			return portable.Revocation{Key: a.Build.Imported.Key, Reason: "leaked"}
		},
		"build": func(a *request.Answer) portable.Revocation {
			return portable.Revocation{Build: portable.Hash(a.Build.BuildKey), Reason: "leaked"}
		},
		"manifest": func(a *request.Answer) portable.Revocation {
			return portable.Revocation{Manifest: portable.Digest(a.Build.Imported.Manifest),
				Reason: "leaked"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			store, _, public, _ := published(t)
			root := newRootKey(t)
			store.setTrust(t, root.document(1))
			b := machine(t, store, remotes.Remote{Trust: []string{public, root.public}})
			got := b.acquire(b.request(b.model(1)))
			require.Equal(t, request.Hit, got.Outcome)

			store.setTrust(t, root.document(2, revoke(got)))
			b.waits(2 * time.Hour)
			b.acquire(b.request(b.model(2))) // any look-up reads the document
			require.Contains(t, b.toldOf("withheld"), "is revoked: leaked")
			require.Contains(t, b.why(b.self(), got.Build.BuildKey.String()).String(),
				"is revoked: leaked")
			require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
			require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
			require.EqualValues(t, 2, b.compiler.Compiles.Load())
		})
	}
}

// A machine with a revoked key takes no lease, says so before a publication fails, and does not
// take its own signature for a valid one.
func TestARevokedKeyPublishesNothing(t *testing.T) {
	private, public := fleetKeys(t)
	root, store := newRootKey(t), newBucket()
	store.setTrust(t, root.document(1))
	a := machine(t, store, remotes.Remote{Publish: true, SigningKey: private, Lease: true,
		Trust: []string{public, root.public}})
	made := a.acquire(a.request(a.model(1)))
	store.waitForCards(t, 1)
	leases := store.takes.Load()
	store.setTrust(t, root.document(2,
		portable.Revocation{Key: store.signers(t)[0], Reason: "leaked"}))
	a.reopen()
	require.Eventually(t, func() bool {
		return strings.Contains(a.cache.RemoteStatus()[0].PublishError, "leaked; make another key")
	}, 20*time.Second, 10*time.Millisecond)
	doctor, err := a.cache.Queries.Doctor().Examine(t.Context(), a.self())
	require.NoError(t, err)
	require.Contains(t, doctor.String(), "builds are not published: key ")

	reply, err := a.cache.Push(t.Context(), a.self(),
		&wire.Push{Entries: []string{made.Build.BuildKey.String()}}, nil)
	require.NoError(t, err)
	require.False(t, reply.Builds[0].Done, reply.Builds[0].Text)
	require.Contains(t, reply.Builds[0].Text, "is revoked: leaked")
	require.Equal(t, request.Compiled, a.acquire(a.request(a.model(2))).Outcome)
	require.Equal(t, leases, store.takes.Load())
}

// A pull reads the trust document, although it was read a moment ago.
func TestAPullReadsTheTrustDocument(t *testing.T) {
	store, _, public, _ := published(t)
	root := newRootKey(t)
	store.setTrust(t, root.document(1))
	b := machine(t, store, remotes.Remote{Trust: []string{public, root.public}})
	r := b.request(b.model(2))
	r.OnMiss = request.Fetch
	require.Contains(t, b.refused(r).Text,
		"not fetched: remote fleet: it does not have the build")
	require.EqualValues(t, 1, b.cache.RemoteStatus()[0].TrustSequence)
	store.setTrust(t, root.document(2,
		portable.Revocation{Key: store.signers(t)[0], Reason: "leaked"}))
	r = b.request(b.model(1))
	r.OnMiss = request.Fetch
	require.Contains(t, b.refused(r).Text, "is revoked: leaked")
}

// The daemon reads documents without any request.
func TestRevokedBuildsAreWithheldWithoutARequest(t *testing.T) {
	store, _, public, _ := published(t)
	root := newRootKey(t)
	store.setTrust(t, root.document(1))
	b := machine(t, store, remotes.Remote{Trust: []string{public, root.public}})
	got := b.acquire(b.request(b.model(1)))
	store.setTrust(t, root.document(2,
		portable.Revocation{Key: got.Build.Imported.Key, Reason: "leaked"}))
	b.reopen()
	require.Eventually(t, func() bool {
		return strings.Contains(b.toldOf("withheld"), "is revoked: leaked")
	}, 20*time.Second, 10*time.Millisecond)
}

// A root key that is trusted after a reload has its document withhold the builds that are stored.
func TestReloadedRootKeyWithholdsStoredBuilds(t *testing.T) {
	store, _, public, _ := published(t)
	b := machine(t, store, remotes.Remote{Trust: []string{public}})
	got := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, got.Outcome)
	root := newRootKey(t)
	store.setTrust(t, root.document(1,
		portable.Revocation{Key: got.Build.Imported.Key, Reason: "leaked"}))
	b.trusts(public, root.public)
	require.Eventually(t, func() bool {
		return strings.Contains(b.toldOf("withheld"), "is revoked: leaked")
	}, 20*time.Second, 10*time.Millisecond)
}

// An expired root key vouches for nothing, and what it revoked stays revoked.
func TestExpiredRootKeyStillRevokes(t *testing.T) {
	store, _, public, made := published(t)
	root := newRootKey(t)
	store.setTrust(t, root.document(1, portable.Revocation{
		Build: portable.Hash(made.Build.BuildKey), Reason: "a bad driver"}))
	b := machine(t, store, remotes.Remote{Trust: []string{public, root.public}})
	fetch := func() string {
		r := b.request(b.model(1))
		r.OnMiss = request.Fetch
		return b.refused(r).Text
	}
	require.Contains(t, fetch(), "is revoked: a bad driver")
	text, err := os.ReadFile(root.public)
	require.NoError(t, err)
	expired := filepath.Join(t.TempDir(), "expired.pub")
	require.NoError(t, os.WriteFile(expired, []byte(strings.Replace(string(text), "-----\n",
		"-----\nNot-After: 2020-02-01\n", 1)), 0o644))
	b.trusts(public, expired)
	require.Contains(t, fetch(), "is revoked: a bad driver")
	require.Contains(t, b.cache.RemoteStatus()[0].TrustError, "was trusted until 2020-02-0")
}

// signers returns how many keys signed the one card of a remote.
func (b *bucket) signers(t testing.TB) (ids []string) {
	for _, raw := range b.allCards(t) {
		c, err := portable.ParseCard("card", raw)
		require.NoError(t, err)
		ids = append(ids, c.Signers()...)
	}
	return ids
}

// Two builders compile the same bytes. The signature that the remote has stays while a key that the
// second builder trusts made it, and is replaced otherwise.
func TestABuilderReplacesADistrustedSignature(t *testing.T) {
	onEachEngine(t, replaceDistrusted)
}

func replaceDistrusted(t *testing.T, store *bucket) {
	_, first, _ := publishedTo(t, store)
	private, second := fleetKeys(t)
	before := store.signers(t)
	require.Len(t, before, 1)
	b := machine(t, store, remotes.Remote{Trust: []string{first, second}, Publish: true,
		SigningKey: private})
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
	require.Equal(t, before, store.signers(t))

	c := machine(t, store, remotes.Remote{Trust: []string{second}, Publish: true,
		SigningKey: private})
	require.Equal(t, request.Compiled, c.acquire(c.request(c.model(1))).Outcome)
	require.Eventually(t, func() bool {
		ids := store.signers(t)
		return len(ids) == 1 && ids[0] != before[0]
	}, 20*time.Second, 5*time.Millisecond)
	d := machine(t, store, remotes.Remote{Trust: []string{second}})
	require.Equal(t, request.Hit, d.acquire(d.request(d.model(1))).Outcome)
}

// A new key takes over from one that is revoked: its builder signs what is there.
func TestARevokedKeyIsReplaced(t *testing.T) { onEachEngine(t, replaceRevokedKey) }

func replaceRevokedKey(t *testing.T, store *bucket) {
	_, old, _ := publishedTo(t, store)
	private, fresh := fleetKeys(t)
	root := newRootKey(t)
	store.setTrust(t, root.document(1,
		portable.Revocation{Key: store.signers(t)[0], Reason: "leaked"}))
	trusted := remotes.Remote{Trust: []string{old, fresh, root.public}, Publish: true,
		SigningKey: private}
	b := machine(t, store, trusted)
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	key, err := os.ReadFile(private)
	require.NoError(t, err)
	signer, err := portable.ParseSigner(private, key)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		ids := store.signers(t)
		return len(ids) == 1 && ids[0] == signer.ID
	}, 20*time.Second, 5*time.Millisecond)
	c := machine(t, store, trusted)
	require.Equal(t, request.Hit, c.acquire(c.request(c.model(1))).Outcome)
}

// Another trusted key counts at once when the configuration is read again.
func TestTrustIsReloaded(t *testing.T) {
	store, _, public, _ := published(t)
	_, other := fleetKeys(t)
	b := machine(t, store, remotes.Remote{Trust: []string{other}})
	r := func() *request.Request {
		r := b.request(b.model(1))
		r.OnMiss = request.Fetch
		return r
	}
	b.refused(r())
	require.Contains(t, b.explainsRemotes(b.request(b.model(1))), "not trusted here")
	require.Contains(t, b.cache.RemoteStatus()[0].LastError, "not trusted here")
	b.trusts(public)
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
	require.Zero(t, b.compiler.Compiles.Load())
}

// A bundle brings the document that its builds need, and an old one is no way around a later one.
func TestABundleBringsItsTrustDocument(t *testing.T) {
	store, _, public, made := published(t)
	root := newRootKey(t)
	b := newBenchWith(t, func(o *Options) { o.Claims.Trust = []string{public, root.public} })
	_, err := store.Look(t.Context(), "fleet", remote.BuildKey(portable.Hash(made.Build.BuildKey)),
		time.Minute)
	require.NoError(t, err)
	raw := store.cards[portable.Hash(made.Build.BuildKey)]
	importsAt := func(b *bench, documents ...[]byte) *claims.Imported {
		out, err := b.cache.Claims.Import(t.Context(), b.self(),
			&claims.Import{Card: raw, Documents: documents}, nil)
		require.NoError(t, err)
		return out
	}
	imports := func(documents ...[]byte) *claims.Imported { return importsAt(b, documents...) }
	require.Contains(t, imports().Text, "there is no trust document")
	require.Equal(t, claims.Refused, imports(newRootKey(t).document(3)).Outcome)
	first := root.document(1)
	require.True(t, imports(first).Wanted)
	require.Contains(t, imports(root.document(2, portable.Revocation{Key: store.signers(t)[0],
		Reason: "leaked"})).Text, "is revoked: leaked")
	require.Contains(t, imports(first).Text, "is revoked: leaked")
	b.reopen()
	require.Contains(t, imports(first).Text, "is revoked: leaked")

	c := newBenchWith(t, func(o *Options) { o.Claims.Trust = b.cache.options.Claims.Trust })
	require.True(t, importsAt(c, first).Wanted)
	c.waits(8 * 24 * time.Hour)
	expired := importsAt(c, first)
	require.Contains(t, expired.Text, "document of root key "+portable.ShortID(root.ID)+
		" expired on ")
	require.Contains(t, expired.Hint, "get a new document: ")
	require.Contains(t, importsAt(c).Text, " expired on ")
}

// limitedKey returns the text of the public key of a private one, limited to a request.
func limitedKey(t testing.TB, public string, key portable.Hash) []byte {
	text, err := os.ReadFile(public)
	require.NoError(t, err)
	return []byte(strings.Replace(string(text), "-----\n",
		"-----\nRequests: "+key.String()+"\n\n", 1))
}

// A key that is limited to one request signs nothing for another, also in one statement with it.
func TestALimitedKeySignsForItsRequestsAlone(t *testing.T) {
	store, private, public, made := published(t)
	signer, err := portable.ReadSigner(private)
	require.NoError(t, err)
	card, err := portable.ParseCard("card", store.cards[portable.Hash(made.Build.BuildKey)])
	require.NoError(t, err)
	says, err := signer.Verify(card, time.Now())
	require.NoError(t, err)
	asked := says.Requests[0]
	b := newBench(t)
	other := portable.RequestOf(b.acquire(b.request(b.model(2))).Build.Record)
	for _, all := range [][]portable.Request{{asked, other}, {asked}} {
		says.Requests = all
		im := &claims.Import{Card: signer.Sign(card, *says)}
		for name, row := range map[string]struct {
			key, request portable.Hash
			outcome      string
		}{
			"its request":           {asked.Key, portable.Hash{}, claims.HitHere},
			"its request, asked":    {asked.Key, asked.Key, claims.HitHere},
			"another, not asked":    {asked.Key, other.Key, claims.Refused},
			"another model's":       {other.Key, portable.Hash{}, claims.Refused},
			"another model's asked": {other.Key, asked.Key, claims.Refused},
		} {
			im.Keys = []string{string(limitedKey(t, public, row.key))}
			im.Request = index.RequestKey(row.request)
			out, err := b.cache.Claims.Import(t.Context(), b.self(), im, nil)
			require.NoError(t, err, name)
			require.Equal(t, row.outcome, out.Outcome, "%s: %s", name, out.Text)
			require.Equal(t, row.outcome == claims.HitHere, out.Wanted, name)
		}
	}
}

// A key of the caller is no way around the trust documents of the configuration.
func TestImportTrustNeedsAFreshDocument(t *testing.T) {
	store, _, public, made := published(t)
	root, raw := newRootKey(t), store.cards[portable.Hash(made.Build.BuildKey)]
	text, err := os.ReadFile(public)
	require.NoError(t, err)
	for _, configured := range [][]string{{root.public}, {root.public, public}} {
		b := newBenchWith(t, func(o *Options) { o.Claims.Trust = configured })
		imports := func(documents ...[]byte) *claims.Imported {
			out, err := b.cache.Claims.Import(t.Context(), b.self(), &claims.Import{Card: raw,
				Keys: []string{string(text)}, Documents: documents}, nil)
			require.NoError(t, err)
			return out
		}
		out := imports()
		require.Contains(t, out.Text, "there is no trust document")
		require.Empty(t, out.Key)
		require.True(t, imports(root.document(1)).Wanted)
		b.waits(8 * 24 * time.Hour)
		require.Contains(t, imports().Text, " expired on ")
		require.Equal(t, claims.Refused, imports().Outcome)
	}
}
