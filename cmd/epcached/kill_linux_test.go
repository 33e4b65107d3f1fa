package main

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/epcached/epcached/unixsock"
)

// number reads a number from the environment: tests of crashes take longer and go on from a known seed if asked.
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

// seeded gives the random numbers of a test, whose seed it prints.
func seeded(t testing.TB) *rand.Rand {
	seed := number(t, "EPCACHED_TEST_SEED", time.Now().UnixNano())
	t.Logf("EPCACHED_TEST_SEED=%d", seed)
	return rand.New(rand.NewPCG(uint64(seed), 0))
}

// TestKilledAtAnyMoment has five applications at work while the daemon is killed and started, again and again, for
// EPCACHED_KILL_SECONDS. What was acknowledged is there, with the right bytes; what was not is gone or whole; and
// who holds a view goes on with it.
func TestKilledAtAnyMoment(t *testing.T) {
	random := seeded(t)
	s := newSite(t, runtimeFolder(t, openVINO))
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
	end := time.Now().Add(time.Duration(number(t, "EPCACHED_KILL_SECONDS", 15)) * time.Second)
	kills := 0
	for ; time.Now().Before(end); kills++ {
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

// The system calls by which the daemon changes what is on disk, or acknowledges it.
const decisive = "fsync,fdatasync,linkat,renameat,renameat2,unlinkat,mkdirat,fchmodat,ftruncate,pwrite64,sendmsg"

// script is the same work in each run: every kind of change once.
var script = []struct {
	entry int
	do    change
}{
	{0, (*entry).get}, {0, (*entry).get}, {1, (*entry).get}, {0, (*entry).refresh}, {1, (*entry).remove},
	{0, (*entry).invalidate}, {0, (*entry).get}, {1, (*entry).get}, {0, (*entry).remove},
}

// runScript does the script until the daemon dies, and says whether it came to the end.
func runScript(t *testing.T, d *epcached, entries []*entry) bool {
	t.Helper()
	c, err := d.tryDial()
	if err != nil {
		return false
	}
	defer c.Close()
	for _, step := range script {
		err := step.do(entries[step.entry], t, c)
		switch {
		case errors.Is(err, unixsock.ErrCompileFailed): // it was a worker's call
		case err != nil:
			require.ErrorIs(t, err, unixsock.ErrConnectionLost)
			return false
		}
	}
	return true
}

// TestKilledAtEachSystemCall runs a script of work on a fresh store and kills the daemon as it begins its N-th
// fsync, link, rename and so on; N counts in each thread. There are some hundred such moments: all of them are
// tried with EPCACHED_KILL_MOMENTS=0, else a choice.
func TestKilledAtEachSystemCall(t *testing.T) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip("SKIPPED: no strace to kill the daemon at a certain system call with")
	}
	if out, err := exec.Command(strace, "-D", "-f", "--seccomp-bpf", "-e", "trace=fsync", "-o", "/dev/null", "true").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: strace does not work here: %v: %s", err, out)
	}
	runtime := runtimeFolder(t, openVINO)
	random := seeded(t)
	dir := t.TempDir()
	paths := []string{writeModel(t, dir, 1), writeModel(t, dir, 2)}

	s := newSite(t, runtime)
	trace := filepath.Join(dir, "trace")
	s.under = []string{strace, "-D", "-f", "--seccomp-bpf", "-e", "signal=none", "-e", "trace=" + decisive, "-o", trace}
	d := s.start(t)
	require.True(t, runScript(t, d, entriesFor(t, paths)))
	d.stop()
	moments := momentsOf(t, trace)
	random.Shuffle(len(moments), func(i, j int) { moments[i], moments[j] = moments[j], moments[i] })
	all := len(moments)
	if n := number(t, "EPCACHED_KILL_MOMENTS", 10); n > 0 && int(n) < len(moments) {
		moments = moments[:n]
	}
	t.Logf("%d of %d moments", len(moments), all)
	for _, m := range moments {
		t.Run(fmt.Sprintf("%s %d", m.call, m.n), func(t *testing.T) {
			t.Parallel()
			killedAt(t, newSite(t, runtime), strace, m, paths)
		})
	}
}

// moment is the beginning of a thread's n-th call.
type moment struct {
	call string
	n    int
}

// momentsOf lists every moment of a run that strace wrote down: "PID call(...".
func momentsOf(t *testing.T, trace string) []moment {
	t.Helper()
	text, err := os.ReadFile(trace)
	require.NoError(t, err)
	type at struct{ thread, call string }
	counts, most := make(map[at]int), make(map[string]int)
	for _, line := range strings.Split(string(text), "\n") {
		thread, rest, _ := strings.Cut(line, " ")
		call, _, ok := strings.Cut(strings.TrimSpace(rest), "(")
		if !ok || strings.ContainsAny(call, " <+-") {
			continue
		}
		counts[at{thread, call}]++
		most[call] = max(most[call], counts[at{thread, call}])
	}
	var out []moment
	for call, n := range most {
		for i := range n {
			// The store's 256 folders are much of the same.
			if call != "mkdirat" || i%32 < 2 {
				out = append(out, moment{call, i + 1})
			}
		}
	}
	slices.SortFunc(out, func(a, b moment) int { return cmp.Or(strings.Compare(a.call, b.call), a.n-b.n) })
	require.NotEmpty(t, out)
	return out
}

func entriesFor(t *testing.T, paths []string) []*entry {
	entries := make([]*entry, len(paths))
	for i, path := range paths {
		entries[i] = &entry{path: path}
		t.Cleanup(func() { entries[i].letGo(0) })
	}
	return entries
}

func killedAt(t *testing.T, s *site, strace string, m moment, paths []string) {
	entries := entriesFor(t, paths)
	traced := *s
	traced.under = []string{strace, "-D", "-f", "--seccomp-bpf", "-e", "signal=none", "-e", "trace=" + m.call, "-o", "/dev/null",
		"-e", fmt.Sprintf("inject=%s:signal=KILL:when=%d", m.call, m.n)}
	d := traced.launch(t)
	if runScript(t, d, entries) {
		d.kill() // the call fell to other threads this time: at the end, then
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
