package packing

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// While blobs are stored, evicted and packed at the same time, no call fails but for documented
// reasons, and in the end each blob that is needed is there, byte for byte, and no other.
//
// EPCACHED_FORMS_SEED has each goroutine do the same again, though not at the same time;
// EPCACHED_FORMS_ROUNDS has them do it for longer.
func TestConcurrentChangesLeaveNothing(t *testing.T) {
	seed, rounds := fromEnvironment("EPCACHED_FORMS_SEED", rand.Uint64()),
		fromEnvironment("EPCACHED_FORMS_ROUNDS", 6)
	t.Logf("EPCACHED_FORMS_SEED=%d", seed)
	c := newCrowd(t)
	for round := range rounds {
		var all sync.WaitGroup
		for i := range uint64(4) {
			m := &member{crowd: c, random: rand.New(rand.NewPCG(seed, round<<8|i))}
			all.Go(func() {
				for range 12 {
					m.doSomething()
				}
			})
		}
		all.Wait()
		c.requireNothingElse(fmt.Sprintf("after round %d", round))
		if round%4 == 3 || round == rounds-1 {
			c.evictAll(slices.Collect(maps.Keys(c.needed)))
			c.requireNothingElse(fmt.Sprintf("when all is evicted after round %d", round))
		}
		if t.Failed() {
			return
		}
	}
}

func fromEnvironment(name string, otherwise uint64) uint64 {
	if n, err := strconv.ParseUint(os.Getenv(name), 10, 64); err == nil {
		return n
	}
	return otherwise
}

// crowd are goroutines that use one store.
type crowd struct {
	*bench
	*trail
	digests []cas.Digest // of the blobs that come and go
	content map[cas.Digest][]byte

	evicted map[cas.Digest]int // how often; guarded by user.mu
}

func newCrowd(t *testing.T) *crowd {
	c := &crowd{trail: &trail{}, content: make(map[cas.Digest][]byte),
		evicted: make(map[cas.Digest]int)}
	var names []string
	for i, content := range similarContents() {
		d, err := cas.Sum(context.Background(), bytes.NewReader(content), 0, int64(len(content)))
		require.NoError(t, err)
		c.digests, c.content[d] = append(c.digests, d), content
		names = append(names, d.String(), fmt.Sprintf("[%d]", i))
	}
	c.names = strings.NewReplacer(names...)
	c.bench = newBenchOn(t, inMemory(t), restless{cas.OS{}, c.trail})
	c.owner, c.log = fickle{c.user}, slog.New(c)
	return c
}

// similarContents returns contents that share most of their bytes, with each other or with
// themselves.
func similarContents() [][]byte {
	one, other, again, own := noise(1, 256<<10), noise(2, 256<<10), noise(3, 112<<10),
		noise(4, 96<<10)
	text, short := []byte(hex.EncodeToString(noise(5, 96<<10))), func(seed uint64) []byte {
		return noise(seed, 4096)
	}
	return [][]byte{
		one, slices.Concat(short(10), one), slices.Concat(short(11), one),
		slices.Concat(short(12), one, short(13)),
		slices.Concat(own, one), slices.Concat(own, short(14), other), other,
		slices.Concat(short(15), other),
		slices.Concat(one[:128<<10], short(16), other[:128<<10]),
		slices.Concat(again, again, again), slices.Concat(short(17), again, again, again),
		slices.Concat(short(18), again, again, again, again),
		slices.Concat(text, text[:64<<10]), slices.Concat(text, one),
		slices.Concat(text, short(19), other),
	}
}

// evictAll removes blobs that are not needed any more, at once.
func (c *crowd) evictAll(all []cas.Digest) {
	c.user.mu.Lock()
	for _, d := range all {
		delete(c.needed, d)
		c.evicted[d]++
	}
	c.user.mu.Unlock()
	r := c.Removal()
	for _, d := range all {
		_, err := r.Remove(d)
		c.expect(err)
	}
	_, err := r.End()
	c.expect(err)
}

// expect reports an error that is not expected.
func (c *crowd) expect(err error, expected ...error) {
	if err != nil && !slices.ContainsFunc(expected, func(one error) bool {
		return errors.Is(err, one)
	}) {
		c.add("NOT EXPECTED: %v", err)
		c.Errorf("%s\n%s", c.names.Replace(err.Error()), debug.Stack())
	}
}

// member is one of the goroutines.
type member struct {
	*crowd
	random *rand.Rand
}

var errStopped = errors.New("stopped")

func (m *member) doSomething() {
	ctx, d, gate := context.Background(), m.anyOne(), m.gate()
	switch n := m.random.IntN(100); {
	case n < 30:
		m.store(ctx, d, n > 5)
	case n < 45:
		var all []cas.Digest
		for range 1 + m.random.IntN(4) {
			all = append(all, m.anyOne())
		}
		m.do("evict", all, func(func() []error) { m.evictAll(all) })
	case n < 55:
		m.do("look at", []cas.Digest{d}, func(func() []error) {
			_, err := m.Sharing.Examine(ctx, d, gate)
			m.expect(err, cas.ErrNotFound, errStopped) // it need not be whole
		})
	case n < 72:
		m.do("pack", []cas.Digest{d}, func(lost func() []error) {
			_, err := m.Pack(ctx, d, []Gain{Worth, Little}[m.random.IntN(2)], gate)
			m.expect(err, append(lost(), ErrInUse, ErrNoSpace, errStopped)...)
		})
	case n < 77:
		m.do("make whole", []cas.Digest{d}, func(lost func() []error) {
			m.expect(m.MakeWhole(ctx, d), append(lost(), ErrNoSpace)...)
		})
	case n < 94:
		m.compact(ctx, gate)
	default:
		m.serve(ctx, d)
	}
}

func (m *member) anyOne() cas.Digest { return m.digests[m.random.IntN(len(m.digests))] }

// gate mostly stays open.
func (m *member) gate() Gate {
	if m.random.IntN(4) > 0 {
		return nil
	}
	var mu sync.Mutex // several readers are at it
	steps := m.random.IntN(12)
	return func(context.Context) error {
		mu.Lock()
		defer mu.Unlock()
		if steps--; steps < 0 {
			return errStopped
		}
		return nil
	}
}

// do does something about blobs. lost gives what may come of one that was not needed all the time.
func (m *member) do(what string, about []cas.Digest, fn func(lost func() []error)) {
	state := func() (evicted int, needed bool) {
		m.user.mu.Lock()
		defer m.user.mu.Unlock()
		needed = true
		for _, d := range about {
			_, one := m.needed[d]
			evicted, needed = evicted+m.evicted[d], needed && one
		}
		return evicted, needed
	}
	before, needed := state()
	m.add("%s %v", what, about)
	fn(func() []error {
		if after, _ := state(); needed && after == before {
			return nil
		}
		return []error{cas.ErrNotFound}
	})
	m.add("%s %v ends", what, about)
}

// store stores a blob, or finds it stored, and needs it or gives it up.
func (m *member) store(ctx context.Context, d cas.Digest, needs bool) {
	m.do(fmt.Sprintf("store, needed: %v,", needs), []cas.Digest{d}, func(func() []error) {
		hold := m.whole.Hold()
		defer m.Release(hold)
		if m.random.IntN(3) == 0 {
			there, err := hold.Keep(ctx, d)
			m.expect(err)
			needs = needs && there
		} else {
			_, _, err := hold.Put(ctx, bytes.NewReader(m.content[d]))
			m.expect(err)
		}
		pause()
		if needs {
			m.measure(d)
			m.need(d, int64(len(m.content[d])))
		}
		pause()
	})
}

// compact compacts a family, as if all were used and all were idle.
func (m *member) compact(ctx context.Context, gate Gate) {
	always := func(cas.Digest) bool { return true }
	all, err := m.CompactableFamilies(ctx, always, always)
	m.expect(err)
	if len(all) == 0 {
		return
	}
	f := all[m.random.IntN(len(all))]
	about := []cas.Digest{f.Hot, f.Base}
	if !f.Base.IsZero() {
		about = append(about, m.Recipes.Users(f.Base)...)
	}
	m.do("compact", about, func(func() []error) { // a zero digest is never needed: any may be gone
		m.expect(m.Compact(ctx, f, gate), cas.ErrNotFound, ErrInUse, errSavesTooLittle, errStopped)
	})
}

// serve reads a blob as a request gets it.
func (m *member) serve(ctx context.Context, d cas.Digest) {
	m.do("serve", []cas.Digest{d}, func(lost func() []error) {
		f, err := m.Open(ctx, d)
		m.expect(err, append(lost(), ErrNoSpace)...)
		if err != nil {
			return
		}
		got, err := io.ReadAll(f)
		m.expect(errors.Join(err, f.Close()))
		if !bytes.Equal(got, m.content[d]) {
			m.expect(fmt.Errorf("blob %s has other bytes", d))
		}
		if m.random.IntN(2) == 0 {
			m.expect(m.DropCopy(d), ErrInUse)
		}
	})
}

// requireNothingElse requires, while nothing goes on, that all is there which is needed, and
// nothing else.
func (c *crowd) requireNothingElse(when string) {
	c.Helper()
	ctx := context.Background()
	var wrong []string
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	used := make(map[cas.Digest]bool)
	var use func(d cas.Digest)
	use = func(d cas.Digest) {
		if used[d] {
			return
		}
		used[d] = true
		p, _ := c.Recipes.Has(d) // nothing, of one that has no recipe
		for _, from := range p.Bases {
			use(from.Digest)
		}
	}
	for d := range c.needed {
		use(d)
		if err := c.Check(ctx, d); err != nil {
			say("%s is needed: %v", d, err)
		}
	}
	for _, d := range c.objects() {
		if !used[d] {
			say("%s is there for nobody", d)
		}
	}
	if disk, told := c.onDisk(), c.warnings(); disk != told {
		say("%d bytes are on the disk, and %d accounted for", disk, told)
	}
	require.NoError(c, c.Recipes.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		if !used[d] {
			say("%s has a recipe for nobody, which takes from %v", d, p.Bases)
		}
		return nil
	}))
	for _, d := range c.recipeStore.Bases() {
		if !used[d] || !c.whole.Has(d) {
			say("%s is recorded as a base of %v", d, c.Recipes.Users(d))
		}
	}
	require.NoError(c, c.Copies.Each(ctx, func(d cas.Digest, _ int64) error {
		if !used[d] {
			say("%s has a copy for nobody", d)
		}
		return nil
	}))
	for _, dir := range []string{"objects", "recipes", "unpacked/objects"} {
		// there may be no copies
		names, _ := os.ReadDir(filepath.Join(c.Store.dir, dir, "incoming"))
		for _, name := range names {
			say("%s/incoming/%s is there", dir, name.Name())
		}
	}
	if c.reserved != 0 || c.user.transientBytes != 0 {
		say("%d bytes are set aside, %d are about to go", c.reserved, c.user.transientBytes)
	}
	space, err := c.Space(true)
	require.NoError(c, err)
	if len(c.needed) == 0 && space != (Space{}) {
		say("%+v is accounted for", space)
	}
	if len(c.needed) == 0 && len(c.sketches.rows)+len(c.shares.rows) > 0 {
		say("it is known of %x and %x what they share", slices.Collect(maps.Keys(c.sketches.rows)),
			slices.Collect(maps.Keys(c.shares.rows)))
	}
	what := c.take()
	for line := range strings.Lines(what) {
		_, text, told := strings.Cut(line, " WARN ")
		no := func(why error) bool { return strings.Contains(text, why.Error()) }
		if told && !no(ErrNoSpace) && !no(errStopped) || strings.Contains(line, " ERROR ") {
			say("in the log: %s", line)
		}
	}
	if len(wrong) > 0 {
		c.Errorf("%s:\n%s\nwhat was done:\n%s", when,
			c.names.Replace(strings.Join(wrong, "\n")), what)
	}
}

// fickle is an owner that reports "in use" or "no space" now and then.
type fickle struct{ *user }

func (fickle) DropViews(cas.Digest) error {
	if rand.IntN(16) == 0 {
		return ErrInUse
	}
	return nil
}

func (fickle) BeingServed(cas.Digest) bool { return rand.IntN(16) == 0 }

func (o fickle) Reserve(ctx context.Context, disk, instead int64) (func(), error) {
	if rand.IntN(16) == 0 {
		return func() {}, ErrNoSpace
	}
	return o.user.Reserve(ctx, disk, instead)
}

func (o fickle) Needed(d cas.Digest) (bool, error) {
	defer pause()
	return o.user.Needed(d)
}
