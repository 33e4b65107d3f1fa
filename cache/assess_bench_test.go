package cache

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkJudgeAll judges 10,000 stored builds after the SDK changed, when all say the same of
// themselves: what a change of an SDK costs besides the probe. Reported per build as well.
func BenchmarkJudgeAll(b *testing.B) {
	const builds = 10_000
	c := newBench(b)
	a := c.acquire(c.request(c.model(1)))
	for i := range builds - 1 {
		one := *a.Build
		one.ID[0], one.ID[1], one.ID[2] = byte(i), byte(i>>8), 0xee
		one.RequestKey[0], one.RequestKey[1] = byte(i), byte(i>>8)
		one.BuildKey[0], one.BuildKey[1] = byte(i), byte(i>>8)
		one.ModelName = fmt.Sprintf("model-%d.onnx", i)
		c.publish(&one)
	}
	c.library("2.0")
	rt := c.cache.runtimes.All()[0]
	_, err := c.cache.runtimes.Content(context.Background(), rt, func(string) {})
	require.NoError(b, err)
	rc := rt.LastContent()
	previous := map[string]string{a.Build.EPs[0].Name: a.Build.EPs[0].LibraryDigest.String()}
	for b.Loop() {
		c.cache.buildJudge.JudgeAll(context.Background(), rt, rc, previous, true)
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/builds, "us/build")
	require.Equal(b, "unsupported", c.cache.buildJudge.BestKnown(a.Build).Verdict.String())
}
