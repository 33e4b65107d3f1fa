package cache

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
)

// own gives a compiled model that is whole by itself, as an application would bring it.
func (b *bench) own() *os.File {
	r := b.request(b.model(1))
	r.Embed = true
	a := b.acquire(r)
	return b.openFile(filepath.Join(a.Path, filepath.FromSlash(a.Graph)))
}

func TestCompiledModelOfTheApplicationsOwn(t *testing.T) {
	for load, verdict := range map[string]compilers.Verdict{
		compilers.Passed:       compilers.Optimal,
		compilers.Failed:       compilers.Unsupported,
		compilers.NotCheckable: compilers.Unknown,
		"none":                 compilers.Unknown, // its load check does not end: no reason to refuse the application its own file
	} {
		t.Run(load, func(t *testing.T) {
			b := newOpinion(t, &opinion{verdict: compilers.Optimal, load: load}, Policy{})
			a := b.acquire(b.request(b.own()))
			require.Equal(t, PassThrough, a.Outcome)
			require.Equal(t, verdict, a.Compatibility.Verdict, a.Compatibility.Reason)
			left, err := filepath.Glob(filepath.Join(b.state, "staging", "own-*"))
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}
