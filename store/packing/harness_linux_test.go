package packing

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// bench is a store of which a test is the owner.
type bench struct {
	testing.TB
	*Store
	*memory
	*user
}

func newBench(t testing.TB) *bench { return newBenchIn(t, t.TempDir()) }

func newBenchIn(t testing.TB, at string) *bench { return newBenchOn(t, at, nil) }

// newBenchOn is one with files that are changed through fs; nil: the operating system's.
func newBenchOn(t testing.TB, at string, fs cas.FS) *bench {
	dir := filepath.Join(at, "state")
	require.NoError(t, os.Mkdir(dir, 0o700))
	b := &bench{TB: t, memory: newMemory(dir), user: &user{needed: make(map[cas.Digest]int64),
		held: make(map[cas.Digest]bool), scopeOf: make(map[cas.Digest]string)}}
	b.memory.user = b.user
	whole, err := cas.Open(dir, cas.Options{Stamps: newStamps(), FS: fs})
	require.NoError(t, err)
	b.Store, err = Open(Options{Dir: dir, Whole: whole, FS: fs, Memory: b.memory,
		Sketches: b.sketches, Shares: b.shares, Owner: b.user,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	require.NoError(t, err)
	return b
}

// reopen opens the recipes again.
func (b *bench) reopen() {
	var err error
	b.Store, err = Open(Options{Dir: b.Store.dir, Whole: b.whole, Memory: b.memory,
		Sketches: b.sketches, Shares: b.shares, Owner: b.user, Log: b.log})
	require.NoError(b, err)
}

// put stores bytes that the owner needs.
func (b *bench) put(content []byte) cas.Digest {
	b.Helper()
	hold := b.whole.Hold()
	defer hold.Release()
	d, size, err := hold.Put(context.Background(), bytes.NewReader(content))
	require.NoError(b, err)
	b.measure(d)
	b.need(d, size)
	return d
}

// variants are so many blobs of a size that have all but some bytes at their beginnings in common;
// of each it has been looked at what it shares.
func (b *bench) variants(n, size int) (all []cas.Digest, contents [][]byte) {
	b.Helper()
	common := noise(0, size)
	for i := range n {
		content := append(noise(uint64(i+1), 4096), common...)
		d := b.put(content)
		_, err := b.Sharing.Examine(context.Background(), d, nil)
		require.NoError(b, err)
		all, contents = append(all, d), append(contents, content)
	}
	return all, contents
}

func noise(seed uint64, n int) []byte {
	out := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), 1}).Read(out) // never fails
	return out
}

func (b *bench) pack(d cas.Digest) (freed int64) {
	b.Helper()
	freed, err := b.Pack(context.Background(), d, Worth, nil)
	require.NoError(b, err)
	return freed
}

// read returns a blob's bytes as the client gets them.
func (b *bench) read(d cas.Digest) []byte {
	b.Helper()
	f, err := b.Open(context.Background(), d)
	require.NoError(b, err)
	defer f.Close() // only read from
	content, err := io.ReadAll(f)
	require.NoError(b, err)
	return content
}

// objects lists what stands whole.
func (b *bench) objects() (all []cas.Digest) {
	b.Helper()
	require.NoError(b, b.whole.Walk(context.Background(), func(d cas.Digest, _, _ int64) error {
		all = append(all, d)
		return nil
	}))
	return all
}

// user is an Owner. Tests set its fields while nothing goes on, or call need.
type user struct {
	needed  map[cas.Digest]int64  // with sizes; guarded by mu
	held    map[cas.Digest]bool   // it is in use
	scopeOf map[cas.Digest]string // its user; "": shared

	mu             sync.Mutex
	diskFull       bool          // Reserve fails; guarded by mu
	failOnce       bool          // the next Reserve fails; guarded by mu
	reserved       int64         // guarded by mu
	transientBytes int64         // of what is being removed; guarded by mu
	reserveCalls   int           // calls of Reserve; guarded by mu
	reservations   []reservation // guarded by mu
	fitsError      error         // of everything
	replacedBytes  []int64       // bytes that Fits was told are replaced; guarded by mu
	evictingBytes  int64         // bytes on disk of what is being evicted; guarded by mu

	onDropViews func() // DropViews calls it; may be nil
	onReserve   func() // Reserve calls it; may be nil
	// is called when it is asked whether something is needed, before that is answered; may be nil
	onNeeded    func(cas.Digest)
	beingServed map[cas.Digest]bool // a request is being given it
}

func (u *user) need(d cas.Digest, size int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.needed[d] = size
}

// all lists what is needed.
func (u *user) all() []cas.Digest {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Collect(maps.Keys(u.needed))
}

// reservedBytes is what is accounted for besides blobs and their forms.
func (u *user) reservedBytes() int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.reserved + u.evictingBytes
}

// evicting is what is being evicted.
func (u *user) evicting() int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.evictingBytes
}

func (u *user) startEviction(disk int64) (done func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.evictingBytes += disk
	return func() { u.startEviction(-disk) }
}

func (u *user) sizeOf(d cas.Digest) (size int64, needed bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	size, needed = u.needed[d]
	return size, needed
}

func (u *user) Needed(d cas.Digest) (bool, error) {
	if u.onNeeded != nil {
		u.onNeeded(d)
	}
	_, needed := u.sizeOf(d)
	return needed, nil
}

func (u *user) DropViews(d cas.Digest) error {
	if u.held[d] {
		return ErrInUse
	}
	if u.onDropViews != nil {
		u.onDropViews()
	}
	return nil
}

func (u *user) MayTake(d cas.Digest) (func(from cas.Digest) (bool, error), error) {
	return func(from cas.Digest) (bool, error) {
		return u.scopeOf[from] == "" || u.scopeOf[from] == u.scopeOf[d], nil
	}, nil
}

func (u *user) BeingServed(d cas.Digest) bool { return u.held[d] || u.beingServed[d] }

// reservation has the arguments of a call of Reserve.
type reservation struct{ disk, instead int64 }

func (u *user) Reserve(_ context.Context, disk, instead int64) (func(), error) {
	if u.onReserve != nil {
		u.onReserve()
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.reserveCalls++
	u.reservations = append(u.reservations, reservation{disk, instead})
	if once := u.failOnce; u.diskFull || once {
		u.failOnce = false
		return func() {}, ErrNoSpace
	}
	u.reserved += disk
	return sync.OnceFunc(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.reserved -= disk
	}), nil
}

func (u *user) CountTransient(disk int64) func() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.transientBytes += disk
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.transientBytes -= disk
	}
}

func (u *user) Fits(_, _ string, _, instead int64) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.replacedBytes = append(u.replacedBytes, instead)
	return u.fitsError
}

// stamps are a book that lasts as long as the test.
type stamps struct {
	mu  sync.Mutex
	all map[cas.Digest]cas.Stamp // guarded by mu
}

func newStamps() *stamps { return &stamps{all: make(map[cas.Digest]cas.Stamp)} }

func (s *stamps) LoadStamp(d cas.Digest) (cas.Stamp, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	one, ok := s.all[d]
	return one, ok
}

func (s *stamps) SaveStamp(d cas.Digest, one cas.Stamp) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[d] = one
	return nil
}

func (s *stamps) ForgetStamp(d cas.Digest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, d)
	return nil
}

// memory is a Memory. Tests set its fields while nothing goes on.
type memory struct {
	dir             string
	user            *user
	unpacked, proof *stamps
	remeasured      func(cas.Digest) // is called when the owner is to measure something; may be nil

	mu       sync.Mutex
	measured map[cas.Digest]int64 // bytes on disk; guarded by mu

	sketches, shares *table
}

// table is a Table.
type table struct {
	mu   sync.Mutex
	rows map[string][]byte // guarded by mu
}

func newMemory(dir string) *memory {
	return &memory{dir: dir, measured: make(map[cas.Digest]int64), unpacked: newStamps(),
		proof: newStamps(), sketches: &table{rows: make(map[string][]byte)},
		shares: &table{rows: make(map[string][]byte)}}
}

func (m *memory) BlobBytes(d cas.Digest) (int64, bool, error) {
	size, ok := m.user.sizeOf(d)
	return size, ok, nil
}

func (m *memory) DiskBytes(d cas.Digest) (int64, bool, error) {
	_, ok := m.user.sizeOf(d)
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.measured[d], ok, nil
}

func (m *memory) UnpackedStamps() cas.StampBook { return m.unpacked }
func (m *memory) RecipeStamps() cas.StampBook   { return m.proof }

func (t *table) Get(key []byte) ([]byte, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	one, ok := t.rows[string(key)]
	return one, ok
}

func (t *table) Save(key, value []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rows[string(key)] = value
	return nil
}

// Each calls fn with what there was when it began: fn may ask for more.
func (t *table) Each(_ context.Context, fn func(key, value []byte) error) error {
	t.mu.Lock()
	all := maps.Clone(t.rows)
	t.mu.Unlock()
	for key, value := range all {
		if err := fn([]byte(key), value); err != nil {
			return err
		}
	}
	return nil
}

func (t *table) Drop(key []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.rows, string(key))
}

func (m *memory) Remeasure(d cas.Digest) error {
	if m.remeasured != nil {
		m.remeasured(d)
	}
	m.measure(d)
	return nil
}

func (m *memory) measure(d cas.Digest) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.measured[d], _ = cas.DiskBytesIn(m.dir, d) // of one that is not there, none
}
