package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/epcached/epcached/unixsock"
)

// number reads a number from the environment: tests of crashes take longer and go on from a known
// seed if asked.
func number(t testing.TB, name string, otherwise int64) int64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseInt(text, 10, 64)
	require.NoError(t, err, name)
	return n
}

// seeded returns the random numbers of a test, and prints their seed.
func seeded(t testing.TB) *rand.Rand {
	seed := number(t, "EPCACHED_TEST_SEED", time.Now().UnixNano())
	t.Logf("EPCACHED_TEST_SEED=%d", seed)
	return rand.New(rand.NewPCG(uint64(seed), 0))
}

// TestKilledAtAnyMoment has five applications at work while the daemon is killed and started, again
// and again, for EPCACHED_KILL_SECONDS, but 12 times at least. Acknowledged builds are there, with
// the right bytes; others are absent or complete; and an application that holds a view goes on with
// it.
func TestKilledAtAnyMoment(t *testing.T) {
	t.Parallel() // it takes its time, whatever else goes on
	random := seeded(t)
	s := newSite(t, runtimeDir(t, openVINO))
	dir := t.TempDir()
	entries := make([]*entry, 5)
	for i := range entries {
		entries[i] = &entry{path: writeModel(t, dir, uint64(i))}
	}
	t.Cleanup(func() {
		for _, e := range entries {
			e.letGo(0)
		}
	})
	end := time.Now().Add(time.Duration(number(t, "EPCACHED_KILL_SECONDS", 5)) * time.Second)
	kills := 0
	for ; time.Now().Before(end) || kills < 12; kills++ {
		d := s.launch(t)
		if random.IntN(5) == 0 { // in the middle of its start
			time.Sleep(time.Duration(random.IntN(120)) * time.Millisecond)
			d.kill()
			continue
		}
		c := d.dial()
		for _, e := range entries {
			e.requireKept(t, c)
		}
		if random.IntN(6) == 0 {
			for _, e := range entries {
				e.letGo(0)
			}
			d.kill() // views that were let go are swept by the next one
			d = s.start(t)
			d.requireClean(t)
		}
		var group errgroup.Group
		for _, e := range entries {
			own := rand.New(rand.NewPCG(random.Uint64(), 0))
			group.Go(func() error { return e.work(t, d, own) })
		}
		time.Sleep(time.Duration(random.IntN(700)) * time.Millisecond)
		d.kill()
		require.NoError(t, group.Wait())
	}
	t.Logf("killed %d times", kills)
	d := s.start(t)
	c := d.dial()
	for _, e := range entries {
		e.requireKept(t, c)
		e.letGo(0)
	}
	d.stop()
	d = s.start(t)
	d.requireClean(t)
	d.requireSound()
}

// script is the same work in each run: every kind of change.
var script = []struct {
	entry int
	do    change
}{
	{0, (*entry).get}, {0, (*entry).get}, {1, (*entry).get}, {0, (*entry).refresh},
	{1, (*entry).remove},
	{0, (*entry).invalidate}, {0, (*entry).get}, {1, (*entry).get}, {0, (*entry).remove},
}

// runScript does the script until the daemon dies.
func runScript(t *testing.T, d *epcached, entries []*entry) {
	t.Helper()
	c, err := d.tryDial()
	if err != nil {
		return
	}
	defer c.Close()
	for _, step := range script {
		if err := step.do(entries[step.entry], t, c); err != nil {
			require.ErrorIs(t, err, unixsock.ErrConnectionLost)
			return
		}
	}
}

func entriesFor(t *testing.T, paths []string) []*entry {
	entries := make([]*entry, len(paths))
	for i, path := range paths {
		entries[i] = &entry{path: path}
		t.Cleanup(func() { entries[i].letGo(0) })
	}
	return entries
}

// TestKilledAtEachSystemCall runs a script of work on a fresh store and kills the daemon as it
// begins its N-th fsync, link, rename and so on. There are some hundreds: all of them are tried
// with EPCACHED_KILL_MOMENTS=0, else that many, by chance.
func TestKilledAtEachSystemCall(t *testing.T) {
	t.Parallel()
	runtime := runtimeDir(t, openVINO)
	random := seeded(t)
	dir := t.TempDir()
	paths := []string{writeModel(t, dir, 1), writeModel(t, dir, 2)}

	wanted := int(number(t, "EPCACHED_KILL_MOMENTS", 12))
	var moments []int
	names, counts := make(map[int]string), make(map[string]int)
	d, st := newSite(t, runtime).launchStopped(t, func(n int, call string) bool {
		counts[call]++
		switch seen := counts[call]; {
		case call == "mkdirat" && 8 < seen && seen < 520 && seen%32 != 0:
			// the store's own 256 are much of the same
		case call == "pwrite64" && wanted > 0 && seen%8 != 0:
			// and so are the pages of the database
		default:
			moments = append(moments, n)
			names[n] = call
		}
		return false
	})
	runScript(t, d, entriesFor(t, paths))
	d.stop()
	st.done.Wait()
	all := len(moments)
	require.Greater(t, all, 100, "%v", counts)
	random.Shuffle(all, func(i, j int) { moments[i], moments[j] = moments[j], moments[i] })
	if 0 < wanted && wanted < all {
		moments = moments[:wanted]
	}
	t.Logf("%d of %d moments: %v", len(moments), all, counts)
	for _, n := range moments {
		t.Run(fmt.Sprintf("%d %s", n, names[n]), func(t *testing.T) {
			t.Parallel()
			killedAt(t, newSite(t, runtime), n, paths)
		})
	}
}

func killedAt(t *testing.T, s *site, at int, paths []string) {
	entries := entriesFor(t, paths)
	d, _ := s.launchStopped(t, func(n int, _ string) bool { return n >= at })
	runScript(t, d, entries)
	if d.running() {
		_ = d.cmd.Process.Kill() // it did with fewer calls this time: at the end, then
	}
	d.wait()
	d = s.start(t)
	c := d.dial()
	for _, e := range entries {
		e.requireKept(t, c)
		e.letGo(0)
	}
	d.stop()
	d = s.start(t)
	d.requireClean(t)
}
