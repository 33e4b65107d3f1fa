package cache

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	goruntime "runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/internal/filestamp"
)

// BenchmarkHit is the cache's own part of a warm hit, without a socket: the model's stamp, the
// request's plan, the stamps of a runtime of 18 libraries and of the view's files, and the lease.
// The request is remembered, or its plan is made.
func BenchmarkHit(b *testing.B) {
	s := newBenchStore(b)
	r := s.request(s.model(1))
	s.later.Store(int64(time.Hour))
	s.acquire(r).View.Close()
	s.acquire(r).View.Close() // a hit, so that it is remembered
	again := func(b *testing.B, hit func() (*request.Answer, error)) {
		b.ReportAllocs()
		for b.Loop() {
			a, err := hit()
			if err != nil {
				b.Fatal(err)
			}
			a.View.Close()
		}
	}
	b.Run("remembered", func(b *testing.B) {
		fd, body := []int{int(r.Graph.Fd())}, fmt.Sprintf("%+v", *r)
		again(b, func() (*request.Answer, error) {
			return s.cache.Repeats.Answer(context.Background(), r.Peer,
				s.cache.Repeats.Key(r.Peer, body, fd), nil), nil
		})
	})
	b.Run("planned", func(b *testing.B) {
		again(b, func() (*request.Answer, error) {
			return s.cache.Acquire(context.Background(), r, nil)
		})
	})
}

func newBenchStore(b *testing.B) *bench {
	s := newBench(b)
	for i := range 17 {
		path := filepath.Join(s.runtime, fmt.Sprintf("libsdk%d.so", i))
		require.NoError(b, os.WriteFile(path, []byte("not a library"), 0o644))
	}
	return s
}

// BenchmarkDigest identifies a model of 512 MiB without the memo, from the page cache, and beside
// it hashes the same file with one plain BLAKE3 stream for each core, which is the most that the
// machine's cores give.
func BenchmarkDigest(b *testing.B) {
	s := newBench(b)
	m := compilertest.DenseModel(1, 8, 1)
	m.Initializers[0].Raw = make([]byte, 512<<20)
	noise := rand.NewChaCha8([32]byte{1})
	_, err := noise.Read(m.Initializers[0].Raw)
	require.NoError(b, err)
	path := filepath.Join(b.TempDir(), "large.onnx")
	require.NoError(b, os.WriteFile(path, m.Encode(), 0o644))
	r := s.request(s.openFile(path))
	// what is being measured is hashing, not writing back
	require.NoError(b, filestamp.WriteBack(r.Graph))
	info, err := r.Graph.Stat()
	require.NoError(b, err)
	var ours, raw time.Duration
	for b.Loop() {
		ours += timed(b, func() error {
			_, err := identity.NewModels(forgets{}, time.Now).Identify(context.Background(),
				&identity.IdentifyRequest{Models: r.AllModels(), Phase: func(string) {}})
			return err
		})
		raw += timed(b, func() error { return hashEverywhere(r.Graph, info.Size()) })
	}
	speed := func(d time.Duration) float64 {
		return float64(info.Size()) * float64(b.N) / d.Seconds() / 1e9
	}
	b.ReportMetric(speed(ours), "digest-GB/s")
	b.ReportMetric(speed(raw), "blake3-all-cores-GB/s")
	b.ReportMetric(speed(ours)/speed(raw), "digest/raw")
}

func timed(b *testing.B, f func() error) time.Duration {
	start := time.Now()
	if err := f(); err != nil {
		b.Fatal(err)
	}
	return time.Since(start)
}

// hashEverywhere gives each core a part of the file and a hash of its own.
func hashEverywhere(f *os.File, size int64) error {
	cores := int64(goruntime.NumCPU())
	var wg sync.WaitGroup
	errs := make([]error, cores)
	for i := range cores {
		wg.Go(func() {
			part := io.NewSectionReader(f, size*i/cores, size*(i+1)/cores-size*i/cores)
			_, errs[i] = io.CopyBuffer(struct{ io.Writer }{blake3.New(32, nil)}, part,
				make([]byte, 256<<10))
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// forgets is a memo.Book that keeps nothing.
type forgets struct{}

func (forgets) Get([]byte) ([]byte, bool) { return nil, false }
func (forgets) Save([]byte, []byte) error { return nil }
