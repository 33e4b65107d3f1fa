package cache

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/internal/apierr"
)

// patience bounds what large models take, on a busy machine and under the race detector.
const patience = 2 * time.Minute

// largeModel writes a model of that many bytes.
func largeModel(t testing.TB, bytes int) string {
	m := compilertest.DenseModel(1, 8, 1)
	m.Initializers[0].Raw = make([]byte, bytes)
	noise := rand.NewChaCha8([32]byte{1})
	_, err := noise.Read(m.Initializers[0].Raw)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "large.onnx")
	require.NoError(t, os.WriteFile(path, m.Encode(), 0o644))
	return path
}

// crowd are requests for one model, each with files and a context of its own.
type crowd struct {
	*bench
	answers []<-chan got
	leave   []context.CancelFunc
	gone    map[int]bool
}

// gather has so many requests wait for one compile, the first of which began it.
func (b *bench) gather(g *gate, path string, n int) *crowd {
	c := &crowd{bench: b, gone: make(map[int]bool)}
	begun := len(g.begun())
	for i := range n {
		ctx, cancel := context.WithCancel(context.Background())
		b.Cleanup(cancel)
		c.answers = append(c.answers, b.ask(ctx, b.request(b.openFile(path))))
		c.leave = append(c.leave, cancel)
		if i == 0 {
			require.Eventually(b, func() bool { return len(g.begun()) == begun+1 }, patience,
				time.Millisecond)
		}
	}
	require.Eventually(b, func() bool { return b.waiters() == n }, patience, time.Millisecond)
	return c
}

// goes makes one caller leave.
func (c *crowd) goes(i int) {
	c.leave[i]()
	c.gone[i] = true
	require.Equal(c, apierr.Cancelled, apierr.ClassOf((<-c.answers[i]).err))
}

// served requires that all callers that stayed got the same.
func (c *crowd) served() (outcomes map[string]int) {
	c.Helper()
	outcomes = make(map[string]int)
	var first *request.Answer
	for i, one := range c.answers {
		if c.gone[i] {
			continue
		}
		a := c.bench.served(one)
		outcomes[a.Outcome]++
		if first == nil {
			first = a
		}
		require.Equal(c, first.Graph, a.Graph, "the same files, not only equal ones")
		require.Equal(c, first.Build.Files, a.Build.Files)
	}
	return outcomes
}

func TestSixtyFourRequestsOneCompile(t *testing.T) {
	b, g := jobbing(t, 1)
	large, small := largeModel(t, 128<<20), largeModel(t, 64)
	b.later.Store(int64(time.Hour)) // the model has not been touched for long
	random := rand.New(rand.NewPCG(rand.Uint64(), 0))
	for name, test := range map[string]struct {
		model string
		leave []int
		want  map[string]int
	}{
		"all stay":         {large, nil, map[string]int{request.Compiled: 1, request.Waited: 63}},
		"the first leaves": {small, []int{0}, map[string]int{request.Waited: 63}},
		"twenty leave":     {small, random.Perm(63)[:20], nil},
		"all but one leaves": {small,
			slices.DeleteFunc(random.Perm(64), func(i int) bool { return i == 63 }),
			map[string]int{request.Waited: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			begun := len(g.begun())
			c := b.gather(g, test.model, 64)
			require.Equal(t, 64, b.jobs(0)[0].Waiting)
			for _, i := range test.leave {
				c.goes(i)
			}
			require.Equal(t, 64-len(test.leave), b.jobs(0)[0].Waiting)
			for i, one := range c.answers {
				require.True(t, c.gone[i] || len(one) == 0, "before the compile has ended")
			}
			g.pass <- struct{}{} // one event lets them all go
			outcomes := c.served()
			if test.want != nil {
				require.Equal(t, test.want, outcomes)
			}
			require.Len(t, g.begun(), begun+1)
			_, err := b.cache.Remove(context.Background(), request.Peer{}, nil, true, false)
			require.NoError(t, err)
		})
	}
}

// reckoned is a file system that counts what is done to the store's files.
type reckoned struct {
	cas.OS
	read                            atomic.Int64 // bytes
	opened, created, linked, synced atomic.Int64
}

func (r *reckoned) ReadAt(f *os.File, p []byte, off int64) (int, error) {
	n, err := r.OS.ReadAt(f, p, off)
	r.read.Add(int64(n))
	return n, err
}

func (r *reckoned) Open(path string) (*os.File, error) {
	r.opened.Add(1)
	return r.OS.Open(path)
}

func (r *reckoned) Create(path string) (*os.File, error) {
	r.created.Add(1)
	return r.OS.Create(path)
}

func (r *reckoned) Link(from, to string) error {
	r.linked.Add(1)
	return r.OS.Link(from, to)
}

func (r *reckoned) LinkAt(from string, dir *os.File, name string) error {
	r.linked.Add(1)
	return r.OS.LinkAt(from, dir, name)
}

func (r *reckoned) Sync(f *os.File) error {
	r.synced.Add(1)
	return r.OS.Sync(f)
}

// Waiters do nothing to the store that the first caller alone would not do, so their additional
// wait does not depend on the model's size.
func TestWaitersAddNoWorkToTheStore(t *testing.T) {
	done := func(requests int) []int64 {
		fs := &reckoned{}
		g := &gate{pass: make(chan struct{}), hold: true}
		b := newBenchWith(t, func(o *Options) {
			g.Compiler, o.Compiler, o.Jobs, o.fs = o.Compiler, g, 1, fs
		})
		b.later.Store(int64(time.Hour)) // the model has not been touched for long
		c := b.gather(g, largeModel(t, 2<<20), requests)
		g.pass <- struct{}{}
		c.served()
		return []int64{fs.read.Load(), fs.opened.Load(), fs.created.Load(), fs.linked.Load(),
			fs.synced.Load()}
	}
	alone := done(1)
	require.Greater(t, alone[0], int64(2<<20), "the artefact is hashed")
	require.Equal(t, alone, done(32), "bytes read, files opened, created, linked, synced")
}
