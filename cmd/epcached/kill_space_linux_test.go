package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// roomKept is a store with builds that have most of their bytes in common, as the daemon that made
// them left it.
type roomKept struct {
	origin  *site
	entries []entry
}

// keepsRoom is the configuration: what is alike is found and packed at once.
const keepsRoom = unmeasured + "[space]\npack = \"always\"\n"

func newRoomKept(t *testing.T) *roomKept {
	k := &roomKept{origin: newSite(t, runtimeDir(t, openVINO))}
	k.origin.config = unmeasured + "[space]\npack = \"off\"\n"
	d := k.origin.start(t)
	c := d.dial()
	dir := t.TempDir()
	for i := range 3 {
		path := filepath.Join(dir, fmt.Sprintf("model%d.onnx", i))
		// the same weights, for another batch each
		require.NoError(t, os.WriteFile(path, compilertest.Dense(7, 384, i+1), 0o644))
		e := entry{path: path}
		require.NoError(t, e.get(t, c))
		e.letGo(0)
		k.entries = append(k.entries, e)
	}
	d.stop()
	k.origin.config = keepsRoom
	return k
}

// copy makes a store of its own with the same builds.
func (k *roomKept) copy(t *testing.T) (*site, []*entry) {
	s := newSite(t, k.origin.runtimes...)
	s.config = k.origin.config
	require.NoError(t, os.CopyFS(s.state, os.DirFS(k.origin.state)))
	require.NoError(t, os.Chmod(s.state, 0o700))
	var own []*entry
	for _, e := range k.entries {
		own = append(own, &e)
	}
	return s, own
}

// work packs, unpacks and collects. collecting is set before anything may be evicted. An error that
// is not the daemon's death is returned.
func (k *roomKept) work(t *testing.T, d *epcached, entries []*entry, collecting *bool) error {
	c, err := d.tryDial()
	if err != nil {
		return nil // it died before it could answer
	}
	defer c.Close()
	no := func(*wire.Progress) {}
	pack := func(unpack bool) error {
		_, err := unixsock.Ask[wire.PackReply](limited(t), c, &wire.Pack{All: true, Unpack: unpack},
			no)
		return err
	}
	collect := func(to int64) error {
		*collecting = true
		_, err := unixsock.Ask[wire.CollectReply](limited(t), c, &wire.Collect{ToBytes: &to}, no)
		return err
	}
	// everything collects until there is nothing: what is just being read, in order to pack it, is
	// left alone.
	everything := func() error {
		for end := time.Now().Add(patience); time.Now().Before(end); {
			if err := collect(0); err != nil {
				return err
			}
			left, err := unixsock.Ask[wire.ListReply](limited(t), c, &wire.List{}, nil)
			if err != nil || len(left.Builds) == 0 {
				return err
			}
			time.Sleep(10 * time.Millisecond)
		}
		return nil // callers that need it check
	}
	get := func(e *entry) error {
		a, err := e.acquire(t, c, onMissFail, func(a *wire.Acquire) { a.HoldsView = true })
		if err == nil {
			err = errors.Join(a.wrong(), a.view.Close())
		}
		if errors.Is(err, unixsock.ErrNotFound) && *collecting {
			return nil
		}
		return err
	}
	steps := []func() error{
		func() error { return pack(false) },
		func() error { return get(entries[1]) },
		func() error { return get(entries[2]) },
		func() error { return collect(900 << 10) },
		func() error { return pack(true) },
		func() error { return get(entries[0]) },
		everything,
	}
	for i, step := range steps {
		if err := step(); errors.Is(err, unixsock.ErrConnectionLost) {
			return nil
		} else if err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

// requireKept requires that only collected builds were removed, and that this was reported; and
// that no byte is left over.
func (k *roomKept) requireKept(t *testing.T, s *site, entries []*entry, collecting bool) {
	t.Helper()
	d := s.start(t)
	c := d.dial()
	for _, e := range entries {
		a, err := e.acquire(t, c, onMissFail, func(a *wire.Acquire) { a.HoldsView = true })
		if errors.Is(err, unixsock.ErrNotFound) {
			require.True(t, collecting, "%s is gone, and nothing was collected",
				filepath.Base(e.path))
			why, err := unixsock.Ask[wire.Explanation](limited(t), c, &wire.Why{Entry: e.build},
				nil)
			require.NoError(t, err)
			require.Contains(t, why.Reason, "evicted on ", filepath.Base(e.path))
			continue
		}
		require.NoError(t, err)
		require.Equal(t, "hit", a.Outcome)
		require.NoError(t, a.wrong())
		require.Equal(t, e.files, a.names())
		require.NoError(t, a.view.Close())
	}
	requireNothingFound(t, c)
}

// TestKilledWhileFreeingSpace kills the daemon as it begins its N-th fsync, link, rename and so on,
// while it looks for what builds share, packs them, unpacks one that is asked for, and collects.
// There are some hundreds: all of them are tried with EPCACHED_KILL_MOMENTS=0, else that many, by
// chance.
func TestKilledWhileFreeingSpace(t *testing.T) {
	t.Parallel()
	random := seeded(t)
	kept := newRoomKept(t)
	s, entries := kept.copy(t)
	all, collecting := 0, false
	d, st := s.launchStopped(t, func(n int, _ string) bool { all = n; return false })
	err := kept.work(t, d, entries, &collecting)
	left := d.list()
	d.stop()
	st.done.Wait()
	require.NoError(t, err)
	require.Empty(t, left, "all was collected")
	require.Greater(t, all, 100)
	wanted := int(number(t, "EPCACHED_KILL_MOMENTS", 6))
	moments := random.Perm(all)
	if 0 < wanted && wanted < all {
		moments = moments[:wanted]
	}
	t.Logf("%d of %d moments", len(moments), all)
	for _, n := range moments {
		t.Run(fmt.Sprint(n+1), func(t *testing.T) {
			t.Parallel()
			s, entries := kept.copy(t)
			collecting := false
			d, _ := s.launchStopped(t, func(i int, _ string) bool { return i > n })
			require.NoError(t, kept.work(t, d, entries, &collecting))
			if d.running() {
				_ = d.cmd.Process.Kill() // it did with fewer calls this time: at the end, then
			}
			d.wait()
			kept.requireKept(t, s, entries, collecting)
		})
	}
}

// TestKilledRepeatedlyWhileFreeingSpace does the same at moments that are no system calls, on one
// store that is filled again after each, for EPCACHED_KILL_SECONDS.
func TestKilledRepeatedlyWhileFreeingSpace(t *testing.T) {
	t.Parallel()
	random := seeded(t)
	kept := newRoomKept(t)
	end := time.Now().Add(time.Duration(number(t, "EPCACHED_KILL_SECONDS", 4)) * time.Second)
	kills := 0
	for ; time.Now().Before(end); kills++ {
		s, entries := kept.copy(t)
		collecting := false
		for range 3 { // a store that was left thrice
			d := s.launch(t)
			done := make(chan error, 1)
			go func() { done <- kept.work(t, d, entries, &collecting) }()
			time.Sleep(time.Duration(random.IntN(900)) * time.Millisecond)
			d.kill()
			require.NoError(t, <-done)
		}
		kept.requireKept(t, s, entries, collecting)
	}
	t.Logf("killed %d times", 3*kills)
}
