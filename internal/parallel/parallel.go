// Package parallel spreads work over all cores.
package parallel

import (
	"context"
	"runtime"
	"sync"
)

// processors is what Go found at the start: the processors that the machine, the affinity mask and
// the container's limit leave to this process.
var processors = runtime.GOMAXPROCS(0)

// Processors returns the number of processors of this process. It is not runtime.GOMAXPROCS, which
// the daemon sets to a multiple, and must be used wherever work is divided among processors.
func Processors() int { return processors }

// Do calls do for each of 0 to n-1, in that order, on all cores. Each core has its own worker, made
// by begin. It stops at the first error, or when the context ends. end, which may be nil, is called
// with each worker at the end, one at a time.
func Do[W any](ctx context.Context, n int, begin func() W, do func(W, int) error,
	end func(W)) error {
	var (
		mu    sync.Mutex // guards next and first; held during end
		next  int
		first error
		wg    sync.WaitGroup
	)
	for range min(processors, n) {
		wg.Go(func() {
			w := begin()
			mu.Lock()
			defer mu.Unlock()
			for first == nil && next < n {
				i := next
				next++
				mu.Unlock()
				err := ctx.Err()
				if err == nil {
					err = do(w, i)
				}
				mu.Lock()
				if first == nil {
					first = err
				}
			}
			if end != nil {
				end(w)
			}
		})
	}
	wg.Wait()
	return first
}
