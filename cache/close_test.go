package cache

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
)

// stuck is a compiler with fingerprints that end with their context.
type stuck struct {
	*standin.Compiler
	begun chan struct{}
	ended atomic.Bool
}

func (s *stuck) Fingerprint(ctx context.Context, r compilers.Runtime, eps []compilers.EP,
	own *compilers.Job) ([]compilers.Fingerprint, error) {
	if eps[0].Options["hardware"] != "sim-2" {
		return s.Compiler.Fingerprint(ctx, r, eps, own)
	}
	close(s.begun)
	<-ctx.Done()
	s.ended.Store(true)
	return nil, ctx.Err()
}

// The caller has left, and the worker would run until its limit.
func TestCloseEndsProbes(t *testing.T) {
	b := newBench(t)
	b.close()
	s := &stuck{Compiler: b.compiler, begun: make(chan struct{})}
	b.wrap = s
	b.open()
	r := b.request(b.model(1))
	r.EPs[0].Options = map[string]string{"hardware": "sim-2"}
	ctx, leave := context.WithCancel(context.Background())
	go func() {
		<-s.begun
		leave()
	}()
	_, err := b.cache.Acquire(ctx, r, nil)
	require.ErrorIs(t, err, context.Canceled)
	require.False(t, s.ended.Load(), "others may wait for it")
	b.close()
	require.True(t, s.ended.Load())
}
