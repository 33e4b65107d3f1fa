package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

const flooder, bystander = 65534, 65533

// turnstile is a compiler that lets each compile begin alone, and notes how large their models are.
type turnstile struct {
	compilers.Compiler
	pass chan struct{}

	mu    sync.Mutex
	begun []int64 // guarded by mu
}

func (g *turnstile) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	if filepath.Base(job.Model) != compilers.ProbeModel {
		if job.Ready != nil { // the worker starts before its model is there
			select {
			case <-job.Ready:
			case <-ctx.Done():
				return compilers.Result{}, ctx.Err()
			}
		}
		info, err := os.Stat(job.Model)
		if err != nil {
			return compilers.Result{}, err
		}
		g.mu.Lock()
		g.begun = append(g.begun, info.Size())
		g.mu.Unlock()
		select {
		case <-g.pass:
		case <-ctx.Done():
			return compilers.Result{}, ctx.Err()
		}
	}
	return g.Compiler.Compile(ctx, job, progress)
}

// sizes returns how large the models of the compiles that began are, in order.
func (g *turnstile) sizes() []int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.begun)
}

// A request that comes after 120 of another user's is compiled after one of them at most, besides
// those that run; and where there are several slots it does not wait for any.
func TestUsersTakeTurnsAtCompiling(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root can connect as another user")
	}
	const flood = 120
	for slots, before := range map[int]int{1: 1 + 1, 2: 2} {
		t.Run(fmt.Sprintf("%d slots", slots), func(t *testing.T) {
			g := &turnstile{Compiler: standin.New(), pass: make(chan struct{})}
			in := serveInside(t, filepath.Join(inMemory(t), "state"),
				cache.Options{Compiler: g, Jobs: slots})
			root, err := in.dial(t)
			require.NoError(t, err)
			defer root.Close()
			// A job is listed before it asks for a place; until then the queue does not know it.
			inQueue := func(n int) {
				t.Helper()
				require.Eventually(t, func() bool {
					reply, err := unixsock.Ask[wire.JobsReply](limited(t), root, &wire.Jobs{}, nil)
					in := 0
					for _, j := range reply.GetJobs() {
						if j.Phase == "queued" || j.State == "running" {
							in++
						}
					}
					return err == nil && in == n
				}, patience, time.Millisecond)
			}
			dir := t.TempDir()
			var asked sync.WaitGroup
			defer asked.Wait()
			ctx, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			acquireDense := func(c *unixsock.Client, seed uint64, width int) <-chan error {
				path := filepath.Join(dir, fmt.Sprintf("%d.onnx", seed))
				require.NoError(t, os.WriteFile(path, compilertest.Dense(seed, width, 1), 0o644))
				f, done := openFile(t, path), make(chan error, 1)
				asked.Go(func() {
					_, view, err := c.Acquire(ctx,
						forModel(path, &wire.ExecutionProvider{Name: standin.EP}), []*os.File{f},
						nil, nil)
					if err == nil {
						err = view.Close()
					}
					done <- err
				})
				return done
			}
			var c *unixsock.Client
			for seed := range uint64(flood) {
				if seed%30 == 0 {
					c = in.dialAs(t, flooder)
				}
				acquireDense(c, seed, 8)
			}
			inQueue(flood)
			served := acquireDense(in.dialAs(t, bystander), flood, 32)
			inQueue(flood + 1)
			large := func(size int64) bool { return size > 2<<10 }
			for {
				sizes := g.sizes()
				if slices.ContainsFunc(sizes, large) {
					break
				}
				began := len(sizes)
				require.LessOrEqual(t, began, before, "%d compiles of the other user's began first",
					began)
				if began == before && slots > 1 {
					require.Eventually(t, func() bool { return len(g.sizes()) > began }, patience,
						time.Millisecond,
						"the user waits though another one has all slots")
					continue
				}
				g.pass <- struct{}{}
				require.Eventually(t, func() bool { return len(g.sizes()) > began }, patience,
					time.Millisecond)
			}
			close(g.pass)
			require.NoError(t, <-served)
		})
	}
}
