package cache

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/views"
)

// spaceAdvice gives what the doctor says of space with these words; the zero Advice where it says nothing of the kind.
func (b *bench) spaceAdvice(p Peer, words string) Advice {
	b.Helper()
	for _, a := range b.cache.adviseSpace(p) {
		if strings.Contains(a.Text, words) {
			return a
		}
	}
	return Advice{}
}

// What is compiled for nothing, since it has no room, is named, with the numbers and the setting.
func TestDoctorNamesWhatIsNeverKept(t *testing.T) {
	for name, of := range map[string]struct {
		space SpaceOptions
		hint  string
	}{
		"the budget": {SpaceOptions{Budget: Amount{Bytes: perBuild - 1}}, "raise budget in [space]"},
		"the quota":  {SpaceOptions{UserBytes: Amount{Bytes: 1}}, "raise user_bytes in [space]"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBenchWith(t, withSpace(of.space))
			r := b.held(1)
			for range 2 {
				a := b.acquire(r)
				require.True(t, a.Unkept)
				require.NoError(t, a.View.Close())
				b.later.Add(int64(views.HandOver + time.Second))
				b.cache.views.Sweep() // else who asks once more is given the same
			}
			b.use(2)
			a := b.spaceAdvice(b.self(), "was compiled 2 times in the last 7 days and is not kept: it ")
			require.Equal(t, SeverityWarning, a.Severity)
			require.Contains(t, a.Text, "model \"model.onnx\" ")
			require.Contains(t, a.Hint, of.hint)
			if of.space.Budget.Bytes > 0 {
				require.Contains(t, a.Text, "it takes "+bytesText(perBuild+cas.Block)+" on disk, and the budget for all is "+bytesText(perBuild-1))
			}
			require.NotZero(t, b.spaceAdvice(b.self(), "compiled once in"))
			require.Zero(t, b.spaceAdvice(Peer{UID: stranger}, "is not kept"), "models of others are not named")

			require.NoError(t, b.cache.Reload(b.unbounded()))
			require.False(t, b.acquire(r).Unkept)
			require.Zero(t, b.spaceAdvice(b.self(), "compiled 2 times"), "it is kept now")
			b.later.Store(int64(8 * 24 * time.Hour))
			require.Zero(t, b.spaceAdvice(b.self(), "is not kept"))
		})
	}
}

func (b *bench) unbounded() Options {
	o := b.options()
	o.Space = SpaceOptions{}
	return o
}

// The doctor says what waits for room, once it has waited for longer than anybody should.
func TestDoctorTellsOfTheQueue(t *testing.T) {
	b := newBench(t)
	require.Zero(t, b.spaceAdvice(b.self(), "waiting for room"))
	q, ok := b.cache.queue(1, 3<<20, 0, 0, nil)
	require.True(t, ok)
	q.since = q.since.Add(time.Hour)
	require.Zero(t, b.spaceAdvice(b.self(), "waiting for room"), "it came just now")
	q.since = q.since.Add(-11 * time.Hour)
	_, ok = b.cache.queue(1, 1<<20, 0, 0, nil)
	require.True(t, ok)
	a := b.spaceAdvice(b.self(), "waiting for room to be kept: 2 results of 4.0 MiB, the first for 10h")
	require.Equal(t, SeverityWarning, a.Severity)
	require.Contains(t, a.Hint, "raise budget in [space]")
	require.Contains(t, a.Hint, "epcachectl jobs")
}
