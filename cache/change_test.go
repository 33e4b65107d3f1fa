package cache

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

func TestRemove(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	files := b.read(a)
	me := request.Peer{UID: b.cache.uid}
	would, err := b.cache.Remove(context.Background(), me, []string{"model.onnx"}, false, true)
	require.NoError(t, err)
	require.Len(t, would.Builds, 1)
	require.Len(t, b.list(), 1, "a dry run changes nothing")
	really, err := b.cache.Remove(context.Background(), me, []string{"model.onnx"}, false, false)
	require.NoError(t, err)
	require.Equal(t, would.FreedBytes, really.FreedBytes)
	require.Positive(t, really.FreedBytes)
	require.Empty(t, b.list())
	require.Equal(t, files, b.read(a), "who holds the view goes on with it")
	require.NoError(t, a.View.Close())
	b.cache.views.Sweep()
	require.NoDirExists(t, a.Path)
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	_, err = b.cache.Remove(context.Background(), me, []string{"nothing-like-that"}, false, false)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
}

func TestInvalidate(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	_, err := b.cache.Invalidate(context.Background(), request.Peer{UID: b.cache.uid},
		[]string{a.RequestKey.String()[:12]}, "looks wrong", false)
	require.NoError(t, err)
	b.reopen()
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Compiled, again.Outcome)
	require.Contains(t, again.Why, "looks wrong")
}

// journalless is a file system on which nothing more is written to the journal.
type journalless struct {
	cas.OS
	on atomic.Bool
}

func (f *journalless) Sync(file *os.File) error {
	if f.on.Load() && strings.HasPrefix(filepath.Base(file.Name()), "journal") {
		return syscall.EROFS
	}
	return f.OS.Sync(file)
}

// A build that the disk does not note as withheld is served again after a restart: the caller hears
// that.
func TestAnInvalidationThatIsNotDurableFails(t *testing.T) {
	f := &journalless{}
	b := newBenchWith(t, func(o *Options) { o.fs = f })
	a := b.acquire(b.held(1))
	require.NoError(t, a.View.Close())
	name := []string{a.Build.BuildKey.String()}
	f.on.Store(true)
	_, err := b.cache.Invalidate(context.Background(), b.self(), name, "", false)
	require.ErrorIs(t, err, syscall.EROFS)
	require.Equal(t, index.Withheld, b.cache.index.Journal.StateOf(a.Build.ID).Name,
		"as long as the daemon runs")
	f.on.Store(false)
	_, err = b.cache.Invalidate(context.Background(), b.self(), name, "", false)
	require.NoError(t, err)
	b.reopen()
	require.Equal(t, index.Withheld, b.cache.index.Journal.StateOf(a.Build.ID).Name)
}
