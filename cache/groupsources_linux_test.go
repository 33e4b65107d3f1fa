package cache

import (
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// countsBlobs counts the files that are written among the objects.
type countsBlobs struct {
	cas.OS
	written atomic.Int64
}

func (c *countsBlobs) Create(path string) (*os.File, error) {
	if strings.Contains(path, "/objects/incoming/") {
		c.written.Add(1)
	}
	return c.OS.Create(path)
}

// A file of weights that several models of a group share is written into the store once, because
// space is reserved for one copy.
func TestSharedFilesOfAGroupAreWrittenOnce(t *testing.T) {
	group := func(b *bench) *request.Request {
		r := b.layered("a", "a", "a")
		for i := range r.Group {
			r.Group[i].External = r.External // one descriptor, as clients send it
		}
		r.KeepsView = true
		return r
	}
	requireKept := func(b *index.Build) {
		require.Len(t, b.Members, 3)
		for _, m := range b.Members[1:] {
			require.Equal(t, b.Source.Files[1], m.Source.Files[1])
			require.NotEqual(t, b.Source.Files[0].Digest, m.Source.Files[0].Digest)
		}
	}
	blobs := &countsBlobs{}
	change := func(o *Options) { o.KeepSource, o.fs = build.KeepCopy, blobs }
	b := newBenchWith(t, change)
	before := blobs.written.Load()
	requireKept(b.acquire(group(b)).Build)
	require.EqualValues(t, 4, blobs.written.Load()-before, "three graphs and their weights")
}
