package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/index/reserve"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// smallDisk mounts a small file system in a file; skipped, loudly, where that cannot be done.
func smallDisk(t *testing.T, size int64) string {
	image, at := filepath.Join(t.TempDir(), "image"), filepath.Join(t.TempDir(), "mounted")
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, size))
	require.NoError(t, os.Mkdir(at, 0o700))
	for _, command := range [][]string{{"mkfs.ext4", "-q", "-F", "-m", "0", image},
		{"mount", "-o", "loop", image, at}} {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Skipf("SKIPPED: no small file system to fill: %s: %v: %s", command[0], err, out)
		}
	}
	t.Cleanup(func() {
		out, err := exec.Command("umount", at).CombinedOutput()
		require.NoError(t, err, "%s", out)
	})
	return at
}

// While the disk is full clients still get their models, and when there is room again they are
// kept, without a restart.
func TestFullDiskStillServesModels(t *testing.T) {
	disk := smallDisk(t, 96<<20)
	o := cache.Options{Space: store.SpaceOptions{Floor: store.Amount{Bytes: 1 << 20}}}
	// Models that were just written would be copied, for which a full disk has no space.
	o.Now = func() time.Time { return time.Now().Add(time.Hour) }
	in := serveInside(t, filepath.Join(disk, "state"), o)
	c, err := in.dial(t)
	require.NoError(t, err)
	defer c.Close()
	name := func(seed uint64) string {
		return filepath.Join(disk,
			fmt.Sprintf("model%d.onnx", seed))
	}
	for seed := range uint64(5) {
		require.NoError(t, os.WriteFile(name(seed), compilertest.Dense(seed, 8, 1), 0o644))
	}
	take := func(seed uint64) *wire.AcquireReply {
		t.Helper()
		path := name(seed)
		f := openFile(t, path)
		request := forModel(path, &wire.ExecutionProvider{Name: standin.EP})
		request.HoldsView = true
		reply, view, err := c.Acquire(limited(t), request, []*os.File{f}, nil, nil)
		require.NoError(t, err)
		a := lease{reply, view}
		require.NoError(t, a.short())
		require.NoError(t, view.Close())
		return reply
	}
	unkept := func(r *wire.AcquireReply) bool {
		return strings.Contains(strings.Join(r.Warnings, " "), "not stored")
	}
	first := take(1)
	require.False(t, unkept(first), "%v", first.Warnings)

	filler := filepath.Join(disk, "filler")
	fillDisk(t, filler, 512<<10)
	require.True(t, unkept(take(2)))
	require.Equal(t, "compiled", take(3).Outcome)
	require.NoError(t, os.Remove(filler))
	require.Eventually(t, func() bool { return !unkept(take(4)) }, patience, 100*time.Millisecond)
	require.Equal(t, "hit", take(4).Outcome)
	requireNothingFound(t, c)
}

// While the disk is full to the last block builds are packed, unpacked, served and collected as far
// as that can be done, nothing is lost, and collecting makes room.
func TestAFullDiskIsCollected(t *testing.T) {
	disk := smallDisk(t, 96<<20)
	in := serveInside(t, filepath.Join(disk, "state"), cache.Options{})
	c, err := in.dial(t)
	require.NoError(t, err)
	defer c.Close()
	dir := t.TempDir()
	take := func(batch int, miss wire.OnMiss) (lease, error) {
		t.Helper()
		path := filepath.Join(dir, fmt.Sprintf("model%d.onnx", batch))
		// the same weights, for another batch each
		require.NoError(t, os.WriteFile(path, compilertest.Dense(7, 384, batch), 0o644))
		request := forModel(path, &wire.ExecutionProvider{Name: standin.EP})
		request.HoldsView, request.OnMiss = true, miss
		reply, view, err := c.Acquire(limited(t), request, []*os.File{openFile(t, path)}, nil, nil)
		a := lease{reply, view}
		if err == nil {
			err = errors.Join(a.wrong(), view.Close())
		}
		return a, err
	}
	var builds []string
	for batch := range 3 {
		a, err := take(batch+1, wire.OnMiss_WAIT)
		require.NoError(t, err)
		builds = append(builds, a.Build)
	}
	no := func(*wire.Progress) {}
	all := &wire.Pack{All: true}
	require.Eventually(t, func() bool { // what the daemon is just reading stays whole
		_, err := unixsock.Ask[wire.PackReply](limited(t), c, all, no)
		require.NoError(t, err)
		usage, err := unixsock.Ask[wire.UsageReply](limited(t), c, &wire.Usage{}, no)
		require.NoError(t, err)
		return slices.ContainsFunc(usage.Builds, func(b *wire.BuildUsage) bool {
			return b.Build.KeptAs == "packed"
		})
	}, patience, pollEvery)

	filler := filepath.Join(disk, "filler")
	fillDisk(t, filler, 0)
	refused := 0
	for batch := range 3 {
		a, err := take(batch+1, wire.OnMiss_WAIT)
		// it is packed, and there is room neither for its whole form nor for a compile: its
		// application compiles it elsewhere
		if err != nil {
			require.ErrorIs(t, err, unixsock.ErrNoSpace)
			refused++
			continue
		}
		require.Equal(t, "hit", a.Outcome)
	}
	require.Positive(t, refused, "else nothing was packed")
	require.Less(t, refused, 3, "what lies whole is served")
	_, err = unixsock.Ask[wire.PackReply](limited(t), c, all, no)
	require.NoError(t, err)
	_, err = unixsock.Ask[wire.PackReply](limited(t), c, &wire.Pack{All: true, Unpack: true}, no)
	require.ErrorIs(t, err, unixsock.ErrNoSpace)
	to := int64(0)
	require.Eventually(t, func() bool {
		_, err := unixsock.Ask[wire.CollectReply](limited(t), c, &wire.Collect{ToBytes: &to}, no)
		require.NoError(t, err)
		left, err := listAll(limited(t), c)
		require.NoError(t, err)
		return len(left) == 0
	}, patience, pollEvery)
	require.Positive(t, freeOn(t, disk), "there is room again")
	for _, build := range builds {
		why, err := unixsock.Ask[wire.Explanation](limited(t), c, &wire.Why{Entry: build}, nil)
		require.NoError(t, err)
		require.Contains(t, why.Reason, "evicted on ")
	}
	kept := filepath.Join(disk, "state", "reserve")
	info, err := os.Stat(kept)
	require.NoError(t, err)
	require.Less(t, info.Size(), int64(reserve.Bytes), "else the disk was not full")

	require.NoError(t, os.Remove(filler))
	a, err := take(1, wire.OnMiss_WAIT)
	require.NoError(t, err)
	require.Equal(t, "compiled", a.Outcome)
	a, err = take(1, wire.OnMiss_FAIL)
	require.NoError(t, err)
	require.Equal(t, "hit", a.Outcome)
	require.Eventually(t, func() bool {
		info, err := os.Stat(kept)
		return err == nil && info.Size() == reserve.Bytes
	}, patience, pollEvery)
	requireNothingFound(t, c)
}

// A daemon that was killed while its disk was full starts on it as it is, and makes room.
func TestAFullDiskIsStartedOn(t *testing.T) {
	t.Parallel()
	disk := smallDisk(t, 64<<20)
	s := newSite(t, runtimeDir(t, openVINO))
	s.state = filepath.Join(disk, "state")
	d := s.start(t)
	e := entry{path: filepath.Join(t.TempDir(), "model.onnx")}
	require.NoError(t, os.WriteFile(e.path, compilertest.Dense(7, 384, 1), 0o644))
	require.NoError(t, e.get(t, d.dial()))
	e.letGo(0)

	filler := filepath.Join(disk, "filler")
	fillDisk(t, filler, 0)
	d.kill()
	c := s.start(t).dial()
	to := int64(0)
	require.Eventually(t, func() bool { // what was given out lately may still be open for a moment
		_, err := unixsock.Ask[wire.CollectReply](limited(t), c, &wire.Collect{ToBytes: &to},
			func(*wire.Progress) {})
		require.NoError(t, err)
		left, err := listAll(limited(t), c)
		require.NoError(t, err)
		return len(left) == 0
	}, patience, pollEvery)
	why, err := unixsock.Ask[wire.Explanation](limited(t), c, &wire.Why{Entry: e.build}, nil)
	require.NoError(t, err)
	require.Contains(t, why.Reason, "evicted on ")
	require.Positive(t, freeOn(t, disk))
	require.NoError(t, os.Remove(filler))
	requireNothingFound(t, c)
}

// fillDisk writes until so much is left.
func fillDisk(t *testing.T, path string, left int64) {
	t.Helper()
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	piece := make([]byte, 256<<10)
	for free := freeOn(t, filepath.Dir(path)); free > left; free = freeOn(t, filepath.Dir(path)) {
		if _, err := f.Write(piece[:min(int64(len(piece)), free-left)]); err != nil {
			break
		}
	}
	_ = f.Sync() // as much as there was room for
}

func freeOn(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(path, &st))
	return int64(st.Bavail) * st.Bsize
}

// A compile that fails while its artefact would not fit on the disk is no failure of the model's,
// whatever the EP calls it, and is not remembered.
func TestAFailureOnAFullDiskIsNotRemembered(t *testing.T) {
	disk := smallDisk(t, 192<<20)
	in := serveInside(t, filepath.Join(disk, "state"), cache.Options{})
	c, err := in.dial(t)
	require.NoError(t, err)
	defer c.Close()
	path, model := filepath.Join(disk, "model.onnx"), compilertest.Dense(1, 2048, 1)
	require.NoError(t, os.WriteFile(path, model, 0o644))
	refused := func() error {
		request := forModel(path, &wire.ExecutionProvider{Name: standin.EP,
			Options: map[string]string{"fault": string(standin.Refuse)}})
		_, _, err := c.Acquire(limited(t), request, []*os.File{openFile(t, path)}, nil, nil)
		return err
	}
	filler := filepath.Join(disk, "filler")
	fillDisk(t, filler, store.CopyReserve+int64(len(model))*5/2) // the worker has two copies
	err = refused()
	require.ErrorIs(t, err, unixsock.ErrNoSpace)
	require.ErrorContains(t, err, "are free in")
	require.ErrorContains(t, err, "told to refuse")
	require.NoError(t, os.Remove(filler))
	err = refused()
	require.ErrorIs(t, err, unixsock.ErrCompileFailed)
	require.NotContains(t, err.Error(), "failed once", "it was tried again")
}
