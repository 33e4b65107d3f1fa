package judge

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// A judgement that was begun under earlier rules does not count under those in effect.
func TestJudgementsByEarlierRulesDoNotCount(t *testing.T) {
	vs, optimal, id := &Verdicts{}, Judgement{Verdict: compilers.Optimal}, index.BuildID{1}
	vs.save(id, optimal, 1)
	_, known := vs.load(id, 1)
	require.True(t, known)
	_, known = vs.load(id, 2)
	require.False(t, known)
	vs.save(id, optimal, 1) // late
	_, known = vs.load(id, 2)
	require.False(t, known)
}
