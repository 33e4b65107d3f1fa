package cache

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkHit is the cache's own part of a warm hit, without a socket: the model's stamp, the request's plan, the
// stamps of a runtime of 18 libraries and of the view's files, and the lease.
func BenchmarkHit(b *testing.B) {
	s := newBenchStore(b)
	r := s.request(s.model(1))
	s.later.Store(int64(time.Hour))
	s.acquire(r).View.Close()
	b.ReportAllocs()
	for b.Loop() {
		a, err := s.cache.Acquire(context.Background(), r, nil)
		if err != nil {
			b.Fatal(err)
		}
		a.View.Close()
	}
}

func newBenchStore(b *testing.B) *bench {
	s := newBench(b)
	for i := range 17 {
		path := filepath.Join(s.runtime, fmt.Sprintf("libsdk%d.so", i))
		require.NoError(b, os.WriteFile(path, []byte("not a library"), 0o644))
	}
	return s
}
