package watch

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestSetReturnsWithTheWatchInPlace(t *testing.T) {
	r := newRig(t)
	for i := range 50 {
		name := fmt.Sprintf("a%d/ep.so", i)
		r.write(name, "one")
		r.set("ep", name)
		r.write(name, "two")
		r.expect("ep", Changing)
		r.w.Set("ep", nil)
	}
}

func TestUnrelatedChangesAreNotReported(t *testing.T) {
	r := newRig(t)
	r.write("usr/lib/ep.so", "one")
	r.set("ep", "usr/lib/ep.so")
	for i := range 100 {
		r.write(fmt.Sprintf("usr/lib/other%d.so", i), "one")
		r.write("usr/lib/ep.so.new", "one")
		r.remove(fmt.Sprintf("usr/lib/other%d.so", i))
		r.mkdir(fmt.Sprintf("usr/local%d/lib", i))
	}
	r.calm()
}

func TestSubjectsOfOneDirectoryAreApart(t *testing.T) {
	r := newRig(t)
	r.write("lib/a.so", "one")
	r.write("lib/b.so", "one")
	r.set("a", "lib/a.so")
	r.set("b", "lib/b.so")
	r.set("all", "lib")
	r.write("lib/a.so", "two")
	r.both("a", "all")
	r.write("lib/b.so", "two")
	r.both("b", "all")
	r.w.Set("all", nil)
	r.notices("a", func() { r.write("lib/a.so", "three") })
}

func TestAForgottenSubjectIsSilent(t *testing.T) {
	r := newRig(t)
	r.write("ep.so", "one")
	r.set("ep", "ep.so")
	r.write("ep.so", "two")
	require.Eventually(t, func() bool { return r.changing("ep") }, patient, time.Millisecond)
	r.w.Set("ep", nil)
	require.Empty(t, r.how("ep"))
	r.write("ep.so", "three")
	r.calm()
}

func TestPathsAreReplaced(t *testing.T) {
	r := newRig(t)
	r.write("a.so", "one")
	r.write("b.so", "one")
	r.set("ep", "a.so")
	r.set("ep", "b.so")
	r.write("a.so", "two")
	r.calm()
	r.notices("ep", func() { r.write("b.so", "two") })
	r.set("ep", "a.so", "b.so") // no change: nothing became of what was known
	r.calm()
	r.notices("ep", func() { r.write("a.so", "three") })
}

// A changing subject stays so while its list is replaced, and is not reported as settled.
func TestPathsAreReplacedInTheMiddleOfAChange(t *testing.T) {
	r := newRig(t)
	r.write("a.so", "one")
	r.set("ep", "a.so")
	r.write("a.so", "two")
	r.expect("ep", Changing)
	r.set("ep", "a.so", "b.so")
	r.expect("ep", Settled)
	r.notices("ep", func() { r.write("b.so", "one") })
}

func TestSettingTheSameListAgainLooksAtNothing(t *testing.T) {
	r := newRig(t)
	r.write("a.so", "one")
	r.set("ep", "a.so", "b.so")
	before := r.looks("ep")
	r.set("ep", "b.so", "a.so", "a.so")
	require.Equal(t, before, r.looks("ep"))
}

// looks returns when a subject was last looked at.
func (r *rig) looks(subject string) time.Time {
	s := r.w.subject(subject, true)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

func TestTenThousandEventsAreAFewValues(t *testing.T) {
	r := newRig(t)
	for i := range 20 {
		r.write(fmt.Sprintf("sdk/lib%d.so", i), "x")
	}
	r.set("ep", "sdk")
	r.notices("ep", func() {
		for i := range 10000 { // by turns: equal events in a row are one to the kernel
			require.NoError(t, os.Truncate(r.path(fmt.Sprintf("sdk/lib%d.so", i%20)), int64(i)))
		}
	})
}

// A Settled that was not taken before the next change is not delivered.
func TestAnOutdatedSettledIsNotDelivered(t *testing.T) {
	r := newRig(t)
	r.write("ep.so", "0")
	r.write("last.so", "0")
	r.set("ep", "ep.so")
	r.set("last", "last.so")
	r.write("ep.so", "1")
	r.expect("ep", Changing)
	time.Sleep(3 * quiet) // a Settled waits to be taken
	r.write("ep.so", "2")
	time.Sleep(quiet / 5)
	r.write("ep.so", "3")
	written := time.Now()
	r.expect("ep", Settled)
	require.GreaterOrEqual(t, time.Since(written), quiet/2)
	r.notices("last", func() { r.write("last.so", "1") })
}

func (r *rig) changing(subject string) (is bool) {
	s := r.w.subject(subject, true)
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.changed.IsZero()
}

func TestAHundredSubjects(t *testing.T) {
	r := newRig(t)
	var names []string
	for i := range 100 {
		r.write(fmt.Sprintf("lib%d/subject%d.so", i%7, i), "one")
	}
	// created before watching, because a new directory is a sign for watched subjects
	for i := range 100 {
		name := fmt.Sprintf("subject%d", i)
		names = append(names, name)
		r.set(name, fmt.Sprintf("lib%d/%s.so", i%7, name), "common.so")
	}
	r.write("common.new", "two")
	r.rename("common.new", "common.so") // one event, because bytes may come after a quiet period
	r.both(names...)
	for range 20 {
		for i := range 100 {
			r.write(fmt.Sprintf("lib%d/subject%d.so", i%7, i), "again")
		}
	}
	seen := make(map[string]int)
	for settled := 0; settled < 100; {
		e := r.next()
		if seen[e.Subject]++; e.Kind == Settled {
			settled++
		}
	}
	require.Len(t, seen, 100)
	for name, n := range seen {
		require.Less(t, n, 20, "%s was reported again and again", name)
	}
}

func TestIdleMeansIdle(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Poll = 7 * time.Second })
	r.write("ep.so", "one")
	for i := range 10 {
		r.set(fmt.Sprint(i), "ep.so")
		require.Equal(t, r.w.began.Add(time.Hour), r.nextDue(fmt.Sprint(i)),
			"only the backstop, once for all")
	}
	r.set("driver", "/proc/version")
	require.Zero(t, r.nextDue("driver").Sub(r.w.began)%(7*time.Second), "the polled one's turn")
	for _, name := range []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "driver"} {
		r.w.Set(name, nil)
	}
	require.Eventually(t, func() bool {
		r.w.directories.mu.Lock()
		defer r.w.directories.mu.Unlock()
		return len(r.w.directories.users)+len(r.w.directories.system.WatchList()) == 0
	}, patient, time.Millisecond, "a directory is watched for nothing")
}

func (r *rig) nextDue(subject string) time.Time {
	s := r.w.subject(subject, true)
	s.mu.Lock()
	defer s.mu.Unlock()
	return r.w.due(s)
}

func TestAClosedWatcher(t *testing.T) {
	w := New(Options{})
	w.Set("ep", []string{t.TempDir()})
	require.NoError(t, w.Close())
	require.NoError(t, w.Close())
	w.Set("ep", []string{"x"})
	_, open := <-w.Events()
	require.False(t, open)
}

func TestClosedInTheMiddleOfAChange(t *testing.T) {
	for range 5 {
		w := New(Options{Quiet: 4 * time.Millisecond})
		dir := t.TempDir()
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := range 200 {
				assert.NoError(t,
					os.WriteFile(filepath.Join(dir, fmt.Sprint(i%3)), []byte{byte(i)}, 0o644))
			}
		})
		w.Set("a", []string{dir})
		w.Set("b", []string{dir, filepath.Join(dir, "1")})
		require.NoError(t, w.Close())
		wg.Wait()
	}
}

// After any change of directories and links has settled, everything on the present way is watched.
func TestAnythingMayHappenToTheTree(t *testing.T) {
	for range 20 {
		seed := rand.Uint64()
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.set("one", "x/y/ep.so")
			r.set("two", "y/x/ep.so", "x")
			chaos(r, rand.New(rand.NewPCG(seed, 0)))
			r.rest("one", "two")

			for _, name := range []string{"x/y/ep.so", "y/x/ep.so"} {
				r.remove(filepath.Dir(filepath.Dir(name)))
				r.write(name, "at last")
				r.rest("one", "two")
				r.write(name, "in place")
				e := r.next()
				require.Equal(t, Changing, e.Kind)
				r.rest("one", "two")
			}
		})
	}
}

// chaos does things to a few names; much of it fails, which is as good.
func chaos(r *rig, random *rand.Rand) {
	names := []string{"x", "y", "z", "x/y", "y/x", "x/x", "y/y", "z/y", "z/x", "x/y/ep.so",
		"y/x/ep.so", "z/y/ep.so"}
	name := func() string { return r.path(names[random.IntN(len(names))]) }
	for range 300 {
		switch random.IntN(6) {
		case 0:
			_ = os.MkdirAll(name(), 0o755)
		case 1:
			_ = os.Rename(name(), name())
		case 2:
			_ = os.RemoveAll(name())
		case 3:
			_ = os.Symlink(name(), name())
		case 4:
			_ = os.WriteFile(name(), []byte{byte(random.IntN(256))}, 0o644)
		case 5:
			time.Sleep(time.Duration(random.IntN(2000)) * time.Microsecond)
		}
	}
}

// rest takes events until none of the subjects is changing any more.
func (r *rig) rest(subjects ...string) {
	r.t.Helper()
	deadline := time.Now().Add(patient)
	r.calmly(func() bool {
		require.True(r.t, time.Now().Before(deadline), "it never comes to rest")
		still := false
		for _, name := range subjects {
			still = still || r.changing(name)
		}
		return !still
	})
}

// calmly drains events until done holds and nothing that was written before is still on its way.
func (r *rig) calmly(done func() bool) {
	r.t.Helper()
	for {
		r.set("sync", "sync-of-the-rig")
		r.write("sync-of-the-rig", "x")
		for {
			if e := r.next(); e.Subject == "sync" && e.Kind == Settled {
				break
			}
		}
		r.w.Set("sync", nil)
		if done() {
			return
		}
	}
}

// A file system that does not answer does not delay the question how it is watched.
func TestModeIsKnownDuringASnapshot(t *testing.T) {
	r := newRig(t)
	r.write("ep.so", "one")
	r.set("ep", "ep.so")
	s := r.w.subject("ep", true)
	s.mu.Lock() // a snapshot
	mode := make(chan string, 1)
	go func() { mode <- r.w.Mode("ep") }()
	select {
	case how := <-mode:
		require.Equal(t, "inotify", how)
	case <-time.After(5 * time.Second):
		t.Error("Mode waits for the snapshot")
	}
	s.mu.Unlock()
}
