package cache

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// bucket is a remote in memory. Its client for each machine is itself.
type bucket struct {
	mu     sync.Mutex
	cards  map[portable.Hash][]byte // of all epochs that were not removed
	put    map[portable.Hash]int64  // the epoch of the card
	blobs  map[portable.Digest][]byte
	young  map[portable.Digest]time.Time // when the blob was put or touched
	leases map[portable.Hash]heldLease
	now    func() time.Time
	trust  []byte // its trust document; nil: it has none

	// helper reads and writes in engine, which has the objects in the place of the memory; nil: it
	// does not. built is the key of the one build there.
	helper *remote.Client
	engine remote.Config
	reads  remote.Config // of machines that do not publish
	env    []string      // of their helpers
	built  portable.Hash

	looks, fetches, puts, renews, takes atomic.Int64
	// lookFault is called before a call is answered, and fetchFault in its place; nil: no fault.
	lookFault  func(ctx context.Context) error
	fetchFault func(ctx context.Context, f remote.Fetch) error
	forge      func([]byte) []byte // of cards that are read
}

// heldLease is a lease as it lies in the bucket.
type heldLease struct {
	holder   string
	taken    time.Time
	estimate time.Duration
}

func newBucket() *bucket {
	return &bucket{cards: make(map[portable.Hash][]byte), blobs: make(map[portable.Digest][]byte),
		put: make(map[portable.Hash]int64), young: make(map[portable.Digest]time.Time),
		leases: make(map[portable.Hash]heldLease), now: time.Now}
}

// expire removes what the lifecycle rules remove.
func (b *bucket) expire() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, epoch := range b.put {
		if b.now().Sub(time.Unix(0, 0)) > time.Duration(epoch)*remote.EpochLength+75*24*time.Hour {
			delete(b.put, key)
			delete(b.cards, key)
		}
	}
	for d, at := range b.young {
		if b.now().Sub(at) > 120*24*time.Hour {
			delete(b.young, d)
			delete(b.blobs, d)
		}
	}
}

func remoteError(class, text string) error {
	return &remote.Error{Class: class, Remote: "fleet", Text: text}
}

func (b *bucket) Configure([]remote.Config) {}
func (b *bucket) Close() error              { return nil }
func (b *bucket) Status() []remote.Status {
	return []remote.Status{{Name: "fleet", Calls: b.looks.Load()}}
}
func (b *bucket) Trust(context.Context, string) ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.trust == nil {
		return nil, remoteError("missing", "it has no trust document")
	}
	return b.trust, nil
}

func (b *bucket) PutTrust(_ context.Context, _ string, document []byte,
	over portable.Digest) (remote.Put, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.trust != nil && portable.DigestOf(b.trust) != over {
		return remote.Exists, nil
	}
	b.trust = document
	return remote.Created, nil
}

func (b *bucket) Collect(context.Context, string, bool, func(remote.Progress)) ([]remote.Kind,
	error) {
	return nil, nil
}

func (b *bucket) Check(context.Context, string) ([]remote.Finding, error) {
	return []remote.Finding{{Name: "read", OK: true, Text: "fine"}}, nil
}

func (b *bucket) Look(ctx context.Context, _ string, key remote.Key,
	budget time.Duration) ([][]byte, error) {
	b.looks.Add(1)
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	if b.lookFault != nil {
		if err := b.lookFault(ctx); err != nil {
			return nil, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	var out [][]byte
	for build, raw := range b.cards {
		if remote.Epoch(b.now())-b.put[build] > 1 {
			continue
		}
		card, err := portable.ParseCard("card", raw)
		if err == nil && key.Request && portable.RequestOf(card.Config.Record).Key == key.Hash ||
			build == key.Hash {
			if b.forge != nil {
				raw = b.forge(raw)
			}
			out = append(out, raw)
		}
	}
	if len(out) == 0 {
		return nil, remoteError("missing", "it does not have the build")
	}
	return out, nil
}

func (b *bucket) Fetch(ctx context.Context, _ string, f remote.Fetch) (p remote.Progress,
	err error) {
	b.fetches.Add(1)
	if b.fetchFault != nil {
		return p, b.fetchFault(ctx, f)
	}
	var m portable.Manifest
	if err := json.Unmarshal(f.Manifest, &m); err != nil {
		return p, remoteError("damaged", err.Error())
	}
	dec, err := zstd.NewReader(nil)
	if err != nil {
		return p, err
	}
	defer dec.Close()
	for i, file := range f.Files {
		b.mu.Lock()
		blob, ok := b.blobs[m.Layers[i].Digest]
		b.mu.Unlock()
		if !ok {
			return p, remoteError("missing", "a blob is missing")
		}
		plain, err := dec.DecodeAll(blob, nil)
		if err != nil {
			return p, remoteError("damaged", err.Error())
		}
		if _, err := file.Write(plain); err != nil {
			return p, remoteError("local", err.Error())
		}
		p.Done += int64(len(plain))
		p.Wire += int64(len(blob))
	}
	p.Total = p.Done
	f.Progress(p)
	return p, nil
}

func (b *bucket) PutBlobs(_ context.Context, _ string, blobs []remote.Blob,
	_ func(remote.Progress)) (s remote.Sent, err error) {
	for _, one := range blobs {
		raw := make([]byte, one.Size)
		if _, err := one.File.ReadAt(raw, 0); err != nil {
			return s, err
		}
		b.puts.Add(1)
		b.mu.Lock()
		if int64(len(b.blobs[one.Digest])) == one.Size && !one.Again {
			s.Existed++
			b.mu.Unlock()
			continue
		}
		b.blobs[one.Digest], b.young[one.Digest] = raw, b.now()
		b.mu.Unlock()
		s.Sent++
		s.Bytes += one.Size
	}
	return s, nil
}

func (b *bucket) PutCard(_ context.Context, _ string, keys remote.CardKeys,
	card []byte) (remote.Put, error) {
	b.puts.Add(1)
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.putCard(keys, card), nil
}

func (b *bucket) putCard(keys remote.CardKeys, card []byte) remote.Put {
	epoch := remote.Epoch(b.now())
	if old := b.cards[keys.Build]; old != nil && b.put[keys.Build] == epoch &&
		portable.DigestOf(old) != keys.Over {
		return remote.Exists
	}
	b.cards[keys.Build], b.put[keys.Build] = card, epoch
	return remote.Created
}

func (b *bucket) Renew(_ context.Context, _ string, keys remote.CardKeys,
	card []byte) (remote.Put, error) {
	b.renews.Add(1)
	b.mu.Lock()
	defer b.mu.Unlock()
	c, err := portable.ParseCard("card", card)
	if err != nil {
		return "", remoteError("local", err.Error())
	}
	for _, d := range c.Manifest.Layers {
		if b.blobs[d.Digest] == nil {
			return "", remoteError("missing", "a blob is missing")
		}
		if b.now().Sub(b.young[d.Digest]) > 45*24*time.Hour {
			b.young[d.Digest] = b.now()
		}
	}
	return b.putCard(keys, card), nil
}

func (b *bucket) Lease(_ context.Context, _ string, l remote.LeaseRequest) (remote.Lease, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	have := b.leases[l.Key]
	switch {
	case have.holder == "" && l.Look:
		return remote.Lease{State: remote.NotOffered}, nil
	case l.Release && have.holder == l.Holder:
		delete(b.leases, l.Key)
	case have.holder == "" && !l.Release:
		b.takes.Add(1)
		b.leases[l.Key] = heldLease{l.Holder, time.Now(), l.Estimate}
	case have.holder != l.Holder:
		return remote.Lease{State: remote.Held, Estimate: have.estimate,
			Age: time.Since(have.taken)}, nil
	}
	return remote.Lease{State: remote.Granted}, nil
}

// fleetKeys are files with a key pair.
func fleetKeys(t testing.TB) (private, public string) {
	dir := t.TempDir()
	secret, open, _, err := portable.GenerateKey(false)
	require.NoError(t, err)
	private, public = filepath.Join(dir, "k"), filepath.Join(dir, "k.pub")
	require.NoError(t, os.WriteFile(private, secret, 0o600))
	require.NoError(t, os.WriteFile(public, open, 0o644))
	return private, public
}

// machine is a bench with its own store, whose daemon shares builds through the bucket.
func machine(t testing.TB, b *bucket, r remotes.Remote, change ...func(*Options)) *bench {
	r.Name, r.Ask = "fleet", true
	if r.LoseAtMost == 0 {
		r.LoseAtMost = 10 * time.Second
	}
	return newBenchWith(t, func(o *Options) {
		o.RemoteClient = b
		if b.helper != nil {
			if r.Config, o.RemoteClient = b.reads, newHelper(t, b.env...); r.Publish {
				r.Config = b.engine
			}
		}
		o.Remotes = []remotes.Remote{r}
		for _, do := range change {
			do(o)
		}
	})
}

func (b *bucket) waitForCards(t testing.TB, n int) {
	require.Eventually(t, func() bool { return len(b.allCards(t)) == n }, 20*time.Second,
		5*time.Millisecond)
}

// allCards returns the cards in the bucket, or the one of its engine.
func (b *bucket) allCards(t testing.TB) (cards [][]byte) {
	if b.helper != nil {
		cards, _ = b.helper.Look(t.Context(), "fleet", remote.BuildKey(b.built), time.Minute)
		return cards // none: it is not there yet
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Values(b.cards))
}

// A build that one machine published is a hit on another one, which compiles nothing.
func TestABuildIsFetchedInsteadOfCompiled(t *testing.T) {
	private, public := fleetKeys(t)
	store := newBucket()
	a := machine(t, store, remotes.Remote{Publish: true, SigningKey: private,
		Trust: []string{public}})
	made := a.acquire(a.request(a.model(1)))
	require.Equal(t, request.Compiled, made.Outcome)
	store.waitForCards(t, 1)

	b := machine(t, store, remotes.Remote{Trust: []string{public}})
	var phases []string
	got, err := b.cache.Acquire(t.Context(), b.request(b.model(1)), func(p request.Progress) {
		phases = append(phases, p.Phase)
	})
	require.NoError(t, err)
	t.Cleanup(func() { got.View.Close() })
	require.Equal(t, request.Hit, got.Outcome)
	require.Zero(t, b.compiler.Compiles.Load())
	require.Equal(t, a.read(made), b.read(got))
	require.Contains(t, phases, "fetching")
	require.Contains(t, got.Why, "fetched from remote fleet, signed by ")
	require.Equal(t, "fleet", b.list()[0].row.Imported.Remote)
	require.EqualValues(t, 1, b.cache.RemoteStatus()[0].Fetched)

	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, again.Outcome)
	require.EqualValues(t, 1, store.fetches.Load())
	_, err = b.cache.Push(t.Context(), b.self(),
		&wire.Push{Entries: []string{got.Build.BuildKey.String()}}, nil)
	require.ErrorContains(t, err, "no remote is configured to be written to")
}

// Without publish nothing is written, and of builds of one user the remote hears nothing at all.
func TestBuildsStayOnTheMachineUnlessPublishingIsConfigured(t *testing.T) {
	private, public := fleetKeys(t)
	store := newBucket()
	a := machine(t, store, remotes.Remote{SigningKey: private, Trust: []string{public},
		Lease: true})
	require.Equal(t, request.Compiled, a.acquire(a.request(a.model(1))).Outcome)
	require.Zero(t, store.puts.Load())
	require.NotZero(t, store.looks.Load())

	b := machine(t, store, remotes.Remote{Publish: true, SigningKey: private,
		Trust: []string{public}})
	before := store.looks.Load()
	r := b.request(b.model(2))
	r.Store = "user"
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
	require.Equal(t, before, store.looks.Load())
	require.Zero(t, store.puts.Load())
	_, err := b.cache.Push(t.Context(), b.self(),
		&wire.Push{Entries: []string{b.list()[0].row.Build}}, nil)
	require.NoError(t, err)
	require.Zero(t, store.puts.Load(), "a private build was pushed")
	for _, on := range []request.OnMiss{request.Refresh, request.Bypass} {
		r := b.request(b.model(3))
		r.OnMiss, r.Store = on, "user"
		b.acquire(r)
	}
	require.Equal(t, before, store.looks.Load())
}

// writeWrongBytes writes files of the right sizes with other contents.
func writeWrongBytes(_ context.Context, f remote.Fetch) error {
	var m portable.Manifest
	if err := json.Unmarshal(f.Manifest, &m); err != nil {
		return err
	}
	var c portable.Config
	if err := json.Unmarshal(m.Config.Data, &c); err != nil {
		return err
	}
	for i, file := range f.Files {
		if _, err := file.Write(make([]byte, c.Files[i].Size)); err != nil {
			return err
		}
	}
	return nil
}

// A transfer that stands still, or takes longer than the compile, is given up.
func TestASlowTransferIsGivenUp(t *testing.T) {
	store, _, public, _ := published(t)
	store.fetchFault = func(ctx context.Context, f remote.Fetch) error {
		<-ctx.Done()
		return ctx.Err()
	}
	b := machine(t, store, remotes.Remote{Trust: []string{public},
		LoseAtMost: 300 * time.Millisecond})
	began := time.Now()
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	require.Less(t, time.Since(began), 4*time.Second)
	e, err := b.cache.Acquire(t.Context(), explained(b.request(b.model(1))), nil)
	require.NoError(t, err)
	require.Contains(t, strings.Join(e.Explanation.Remotes, ""), "a request may lose 300ms")
}

func explained(r *request.Request) *request.Request {
	r.OnMiss = request.Explain
	return r
}

// A remote that does not have a build is not asked again for a minute, unless a request says so.
func TestRemotesAreNotAskedAgainForAMissingBuild(t *testing.T) {
	_, public := fleetKeys(t)
	empty := newBucket()
	b := machine(t, empty, remotes.Remote{Trust: []string{public}}, func(o *Options) {
		o.Policies = map[string]request.Policy{"": {MeasureGain: new(bool)}}
		o.Space.Budget = store.Amount{Bytes: 1} // so that no build is stored
	})
	for range 3 {
		b.acquire(b.request(b.model(1)))
	}
	require.EqualValues(t, 2, empty.looks.Load(), "by build key and by request key")
	r := b.request(b.model(1))
	r.OnMiss = request.Fetch
	require.Equal(t, apierr.NotFound, b.refused(r).Class)
}

// A pull waits longer for the answer to a look-up than a request that could compile.
func TestAPullWaitsForASlowAnswer(t *testing.T) {
	store, _, public, _ := published(t)
	store.lookFault = func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * remote.DefaultConnect):
			return nil
		}
	}
	b := machine(t, store, remotes.Remote{Trust: []string{public}})
	r := b.request(b.model(1))
	r.OnMiss = request.Fetch
	require.Equal(t, request.Hit, b.acquire(r).Outcome)
}

// A request that may not compile has the build fetched for the next one.
func TestAFailingRequestFetchesInTheBackground(t *testing.T) {
	store, _, public, _ := published(t)
	b := machine(t, store, remotes.Remote{Trust: []string{public}})
	ask := func() error {
		r := b.request(b.model(1))
		r.OnMiss = request.Fail
		got, err := b.cache.Acquire(t.Context(), r, nil)
		if err == nil {
			got.View.Close()
		}
		return err
	}
	require.ErrorContains(t, ask(), "no build")
	require.Eventually(t, func() bool { return ask() == nil }, 20*time.Second, 10*time.Millisecond)
	require.Zero(t, b.compiler.Compiles.Load())
}

// Of machines that need one model at the same time, one compiles.
func TestAFleetCompilesOnce(t *testing.T) {
	private, public := fleetKeys(t)
	store := newBucket()
	var all []*bench
	for range 8 {
		b := machine(t, store, remotes.Remote{Publish: true, SigningKey: private,
			Trust: []string{public}, Lease: true})
		b.compiler.Delay = 500 * time.Millisecond
		all = append(all, b)
	}
	var g errgroup.Group
	models := make([]*os.File, len(all))
	for i, b := range all {
		models[i] = b.model(7)
	}
	for i, b := range all {
		g.Go(func() error {
			a, err := b.cache.Acquire(t.Context(), b.request(models[i]), nil)
			if err == nil {
				err = a.View.Close()
			}
			return err
		})
	}
	require.NoError(t, g.Wait())
	compiles := int64(0)
	for _, b := range all {
		compiles += b.compiler.Compiles.Load()
	}
	require.EqualValues(t, 1, compiles)
}

// A lease that is never given back costs half of a compile, or as much more as its holder was
// expected to need when it took it.
func TestALeaseThatIsHeldForEverIsWaitedForABoundedTime(t *testing.T) {
	private, public := fleetKeys(t)
	const length = 400 * time.Millisecond
	for age, most := range map[time.Duration]time.Duration{time.Hour: length, 0: 2 * length} {
		for _, publish := range []bool{false, true} {
			t.Run(fmt.Sprint(age, publish), func(t *testing.T) {
				t.Parallel()
				store := newBucket()
				b := machine(t, store, remotes.Remote{Publish: publish, SigningKey: private,
					Trust: []string{public}, Lease: true})
				b.compiler.Delay = length
				b.acquire(b.request(b.model(1))) // so that there is an estimate
				model := b.model(2)
				before := store.takes.Load()
				key := portable.Hash(b.planned(b.request(model)).Plan.BuildKey)
				store.leases[key] = heldLease{"somebody", time.Now().Add(-age), length}
				began := time.Now()
				require.Equal(t, request.Compiled, b.acquire(b.request(model)).Outcome)
				require.Greater(t, time.Since(began), length*3/2, "it did not wait")
				require.Less(t, time.Since(began), most+8*time.Second)
				require.EqualValues(t, 2, b.compiler.Compiles.Load())
				require.Equal(t, before, store.takes.Load())
				require.EqualValues(t, 1, b.cache.RemoteStatus()[0].LeasesWaited)
			})
		}
	}
}

// A machine that publishes nothing waits for one that compiles, and takes no lease itself.
func TestAReaderWaitsForTheHolderOfALease(t *testing.T) {
	private, public := fleetKeys(t)
	store := newBucket()
	writer := machine(t, store, remotes.Remote{Publish: true, SigningKey: private,
		Trust: []string{public}, Lease: true})
	reader := machine(t, store, remotes.Remote{Trust: []string{public}, Lease: true})
	writer.compiler.Delay = time.Second
	model, other := writer.model(7), reader.model(7)
	var g errgroup.Group
	g.Go(func() error {
		a, err := writer.cache.Acquire(t.Context(), writer.request(model), nil)
		if err == nil {
			err = a.View.Close()
		}
		return err
	})
	require.Eventually(t, func() bool { return store.takes.Load() == 1 }, 10*time.Second,
		time.Millisecond)
	require.Equal(t, request.Hit, reader.acquire(reader.request(other)).Outcome)
	require.Zero(t, reader.compiler.Compiles.Load())
	require.NoError(t, g.Wait())
	// Without a holder it compiles at once.
	require.Equal(t, request.Compiled, reader.acquire(reader.request(reader.model(8))).Outcome)
	require.EqualValues(t, 1, store.takes.Load())
}

// A daemon that ends gives its leases back, although what it compiled was not published yet.
func TestLeasesAreGivenBackWhenTheDaemonEnds(t *testing.T) {
	private, public := fleetKeys(t)
	store := newBucket()
	store.lookFault = func(context.Context) error { // so that nothing can be published
		if store.takes.Load() > 0 {
			_ = os.Remove(private)
		}
		return nil
	}
	b := machine(t, store, remotes.Remote{Publish: true, SigningKey: private,
		Trust: []string{public}, Lease: true})
	b.acquire(b.request(b.model(1)))
	require.Len(t, store.leases, 1)
	b.close()
	require.Empty(t, store.leases)
}

// For 200 days a machine that publishes uses two builds, and new machines fetch them. They never
// compile; builds that are not used leave the bucket.
func TestBuildsInUseNeverLeaveARemote(t *testing.T) {
	private, public := fleetKeys(t)
	r := remotes.Remote{Publish: true, SigningKey: private, Trust: []string{public}}
	store := newBucket()
	a := machine(t, store, r)
	store.now = func() time.Time { return time.Now().Add(time.Duration(a.later.Load())) }
	const unused = 20
	for i := range uint64(2 + unused) {
		a.acquire(a.request(a.model(i)))
	}
	store.waitForCards(t, 2+unused)
	blobs := len(store.blobs)
	for day := 0; day <= 200; day += 5 {
		for i := range uint64(2) {
			require.Equal(t, request.Hit, a.acquire(a.request(a.model(i))).Outcome)
		}
		if day%20 == 0 {
			a.reopen() // otherwise it looks once an hour
			b := machine(t, store, remotes.Remote{Trust: []string{public}})
			b.later.Store(a.later.Load())
			for i := range uint64(2) {
				require.Equal(t, request.Hit, b.acquire(b.request(b.model(i))).Outcome, "day %d",
					day)
			}
			b.close()
		}
		a.waits(5 * 24 * time.Hour)
		store.expire()
	}
	require.Len(t, store.cards, 2)
	require.Less(t, len(store.blobs), blobs/5)
	require.LessOrEqual(t, store.renews.Load(), int64(2*8), "once in an epoch")
}

// A push finds a blob that the remote has lost, and the compile after a fetch of wrong bytes
// replaces these.
func TestLostAndDamagedBlobsAreReplaced(t *testing.T) {
	private, public := fleetKeys(t)
	for _, damage := range []string{"removed", "flipped", "card"} {
		t.Run(damage, func(t *testing.T) {
			store := newBucket()
			r := remotes.Remote{Publish: true, SigningKey: private, Trust: []string{public}}
			a := machine(t, store, r)
			made := a.acquire(a.request(a.model(1)))
			store.waitForCards(t, 1)
			a.waitPublished()
			store.mu.Lock()
			if damage == "card" {
				clear(store.cards)
				store.lookFault = func(context.Context) error {
					store.mu.Lock()
					defer store.mu.Unlock()
					if len(store.cards) == 0 {
						return remoteError("damaged", "card: EOF")
					}
					return nil
				}
			}
			for d, raw := range store.blobs {
				if len(raw) < 100 || damage == "card" {
					continue
				}
				if damage == "removed" {
					delete(store.blobs, d)
					continue
				}
				store.blobs[d] = slices.Clone(raw)
				store.blobs[d][len(raw)/2] ^= 1
			}
			store.mu.Unlock()
			if damage != "flipped" {
				push := func() string {
					reply, err := a.cache.Push(t.Context(), a.self(),
						&wire.Push{Entries: []string{made.Build.BuildKey.String()}}, nil)
					require.NoError(t, err)
					require.True(t, reply.Builds[0].Done, reply.Builds[0].Text)
					return reply.Builds[0].Text
				}
				require.Equal(t, string(remotes.Created), push())
				require.Equal(t, string(remotes.Exists), push())
			} else {
				b := machine(t, store, r)
				require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
				b.waitPublished()
			}
			c := machine(t, store, remotes.Remote{Trust: []string{public}})
			require.Equal(t, request.Hit, c.acquire(c.request(c.model(1))).Outcome)
			require.Zero(t, c.compiler.Compiles.Load())
		})
	}
}

func (b *bench) waitPublished() {
	require.Eventually(b, func() bool { return b.cache.RemoteStatus()[0].Queued == 0 },
		20*time.Second, 5*time.Millisecond)
}

// A machine that fetches may keep what it uses, and vouches for nothing that another key signed.
func TestAFetchedBuildIsRenewed(t *testing.T) {
	private, public := fleetKeys(t)
	other, otherPublic := fleetKeys(t)
	for _, signing := range []string{private, other} {
		store := newBucket()
		a := machine(t, store, remotes.Remote{Publish: true, SigningKey: private,
			Trust: []string{public}})
		a.acquire(a.request(a.model(1)))
		store.waitForCards(t, 1)
		made := store.onlyCard(t)
		b := machine(t, store, remotes.Remote{Publish: true, SigningKey: signing,
			Trust: []string{public, otherPublic}})
		store.now = func() time.Time { return time.Now().Add(remote.EpochLength) }
		b.waits(remote.EpochLength)
		require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
		require.Eventually(t, func() bool {
			store.mu.Lock()
			defer store.mu.Unlock()
			for _, epoch := range store.put {
				return epoch == remote.Epoch(store.now())
			}
			return false
		}, 20*time.Second, 5*time.Millisecond)
		require.Equal(t, signing == other, slices.Equal(made, store.onlyCard(t)))
	}
}

func (b *bucket) onlyCard(t testing.TB) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	require.Len(t, b.cards, 1)
	for _, card := range b.cards {
		return card
	}
	return nil
}

// A queue that was not worked off is taken up by the next daemon, and --refresh looks again.
func TestPublishingContinuesAfterARestart(t *testing.T) {
	private, public := fleetKeys(t)
	store := newBucket()
	r := remotes.Remote{Publish: true, SigningKey: private + "not there yet",
		Trust: []string{public}}
	b := machine(t, store, r)
	b.acquire(b.request(b.model(1)))
	require.NoError(t, os.Rename(private, r.SigningKey))
	b.reopen()
	store.waitForCards(t, 1)
	require.Eventually(t, func() bool { return b.cache.RemoteStatus()[0].Queued == 0 },
		20*time.Second, 5*time.Millisecond)
	require.Empty(t, store.leases)
}

// A remote that does not answer is not asked again and again: its client refuses the calls.
func TestABlackHoledRemoteCostsItsBudgetOnce(t *testing.T) {
	_, public := fleetKeys(t)
	client := remote.New(remote.Options{Socket: filepath.Join(t.TempDir(), "no socket")})
	b := newBenchWith(t, func(o *Options) {
		o.RemoteClient = client
		o.Remotes = []remotes.Remote{
			{Config: remote.Config{Name: "fleet", URL: "https://x"}, Ask: true,
				Publish: true, Lease: true, Trust: []string{public}, LoseAtMost: time.Second}}
	})
	for i := range 6 {
		require.Equal(t, request.Compiled, b.acquire(b.request(b.model(uint64(i+1)))).Outcome)
	}
	s := b.cache.RemoteStatus()[0]
	require.Positive(t, s.BreakerSeconds)
	require.LessOrEqual(t, s.Calls, uint64(3))
	require.NotZero(t, s.Skipped)
	advice := b.cache.Queries.Doctor()
	reply, err := advice.Examine(t.Context(), b.self())
	require.NoError(t, err)
	require.Contains(t, reply.String(), "it fails, and models are compiled without it")
}

// The doctor reports a remote that one call did not reach, before the client stops asking.
func TestTheDoctorReportsARemoteThatWasNotReached(t *testing.T) {
	_, public := fleetKeys(t)
	b := newBenchWith(t, func(o *Options) {
		o.RemoteClient = remote.New(remote.Options{Socket: filepath.Join(t.TempDir(), "no socket")})
		o.Remotes = []remotes.Remote{{Config: remote.Config{Name: "fleet", URL: "https://x"},
			Ask: true, Trust: []string{public}, LoseAtMost: time.Second}}
	})
	b.acquire(b.request(b.model(1)))
	s := b.cache.RemoteStatus()[0]
	require.True(t, s.Failing)
	require.Zero(t, s.BreakerSeconds)
	reply, err := b.cache.Queries.Doctor().Examine(t.Context(), b.self())
	require.NoError(t, err)
	require.Contains(t, reply.String(), "it fails, and models are compiled without it")
}

// A build that cannot be published harms no request; the reason is reported.
func TestPublishingFailsWithoutHarm(t *testing.T) {
	_, public := fleetKeys(t)
	store := newBucket()
	b := machine(t, store, remotes.Remote{Publish: true, Trust: []string{public}})
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	reply, err := b.cache.Push(t.Context(), b.self(),
		&wire.Push{Entries: []string{b.list()[0].row.Build}}, nil)
	require.NoError(t, err)
	require.False(t, reply.Builds[0].Done)
	require.Contains(t, reply.Builds[0].Text, "signing_key")
	require.Empty(t, store.cards)
	require.EqualValues(t, 1, b.cache.RemoteStatus()[0].Queued)
}
