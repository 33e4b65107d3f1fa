package cache

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
)

// Builds of two ONNX Runtimes with equal libraries have one build key, and are for all requests but
// strict ones.
func TestStrictORTSkipsJobsOfAnotherORT(t *testing.T) {
	other := filepath.Join(t.TempDir(), "other")
	_, err := standin.Library(other, "1.30.0", standin.SDK{Version: "1.0", Hardware: "sim-1"})
	require.NoError(t, err)
	g := &gate{pass: make(chan struct{}), hold: true}
	b := newBenchWith(t, func(o *Options) {
		g.Compiler, o.Compiler = o.Compiler, g
		o.Runtimes = append(o.Runtimes, compilers.Runtime{Directory: other})
	})
	first := b.ask(context.Background(), b.request(b.model(1)))
	b.begins(g, 1)
	waits := make(map[bool]<-chan got)
	for _, strict := range []bool{false, true} {
		r := b.request(b.model(1))
		r.StrictORT, r.Runtime = strict, runtimes.Ref{Directory: other}
		before := b.waiters()
		waits[strict] = b.ask(context.Background(), r)
		require.Eventually(t, func() bool { return b.waiters() > before }, soon, soon/1000)
	}
	close(g.pass)
	require.Equal(t, "1.31.1", b.served(first).Build.ORTVersion)
	require.Equal(t, "1.31.1", b.served(waits[false]).Build.ORTVersion)
	require.Equal(t, "1.30.0", b.served(waits[true]).Build.ORTVersion)
}
