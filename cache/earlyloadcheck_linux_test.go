package cache

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
)

// checksBegun counts load checks as they begin, while there is nothing to load yet.
type checksBegun struct {
	*standin.Compiler
	begun atomic.Int64
}

func (c *checksBegun) Check(ctx context.Context, job compilers.CheckJob) (compilers.CheckResult,
	error) {
	c.begun.Add(1)
	return c.Compiler.Check(ctx, job)
}

// The worker that will load the result is started beside a compile, and not for one that fails at
// once.
func TestLoadCheckBeginsBesideTheCompile(t *testing.T) {
	b := newBench(t)
	c := &checksBegun{Compiler: b.compiler}
	b.close()
	b.wrap = c
	b.open()
	b.compiler.Fault = standin.Refuse
	b.refused(b.request(b.model(1)))
	require.LessOrEqual(t, c.begun.Load(), int64(1), "that of the control alone")

	b.compiler.Fault, b.compiler.Delay = "", 10*time.Second
	before := c.begun.Load()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	r := b.request(b.model(2))
	go func() {
		_, err := b.cache.Acquire(ctx, r, nil)
		done <- err
	}()
	require.Eventually(t, func() bool { return c.begun.Load() == before+1 }, soon, time.Millisecond)
	cancel()
	require.Error(t, <-done)
}

// heavy is a compiler with workers that take memory: the one that loads waits beside the one that
// compiles.
type heavy struct {
	*standin.Compiler
	compile, ready, load int64 // bytes
}

func (h *heavy) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	result, err := h.Compiler.Compile(ctx, job, progress)
	result.MaxRSS = h.compile
	return result, err
}

func (h *heavy) Check(ctx context.Context, job compilers.CheckJob) (compilers.CheckResult, error) {
	result, err := h.Compiler.Check(ctx, job)
	result.ReadyRSS, result.MaxRSS = h.ready, h.load
	return result, err
}

func TestBothWorkersOfAJobCount(t *testing.T) {
	for name, c := range map[string]struct{ compile, ready, load, want int64 }{
		"beside each other":       {100 << 20, 40 << 20, 90 << 20, 140 << 20},
		"the load takes the most": {100 << 20, 40 << 20, 300 << 20, 300 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.close()
			b.wrap = &heavy{b.compiler, c.compile, c.ready, c.load}
			b.open()
			b.acquire(b.request(b.model(1)))
			memory, _ := b.cache.jobs.Costs.Estimate(b.factsOf(1).Kind())
			require.Equal(t, c.want, memory)
		})
	}
}
