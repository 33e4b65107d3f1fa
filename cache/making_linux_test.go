package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/refusal"
)

// heldUp is a file system on which a new index gets its name when that is let.
type heldUp struct {
	cas.OS
	begun, end chan struct{}
}

func (f *heldUp) Rename(from, to string) error {
	if filepath.Base(from) == "index.db.new" {
		close(f.begun)
		<-f.end
	}
	return f.OS.Rename(from, to)
}

// While the index is made anew because it broke in use, requests are not kept waiting: they hear at once that there is nothing to be had, and
// afterwards what there was is found again.
func TestNobodyWaitsForABrokenIndex(t *testing.T) {
	b := newBench(t)
	b.use(1)
	b.close()
	f := &heldUp{begun: make(chan struct{}), end: make(chan struct{})}
	b.change = func(o *Options) { o.fs = f }
	b.open()
	require.NoError(t, os.Truncate(filepath.Join(b.state, "index.db"), 0))
	first := make(chan error, 1)
	go func() { // which finds out
		_, _, err := b.cache.List(context.Background(), b.self(), ListFilter{})
		first <- err
	}()
	<-f.begun
	refused := b.refused(b.held(1))
	require.Equal(t, refusal.Unavailable, refused.Class)
	require.Contains(t, refused.Text, "made anew")
	close(f.end)
	require.NoError(t, <-first)
	require.Equal(t, Hit, b.acquire(b.held(1)).Outcome)
}
