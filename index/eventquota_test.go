package index

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestEventsAreKeptFairly(t *testing.T) {
	story := func(spec string) (events []Event) {
		for i, whose := range strings.Fields(spec) {
			events = append(events, Event{By: whose, Scope: "shared", Kind: fmt.Sprint(i)})
		}
		return events
	}
	told := func(events []Event) string {
		var out []string
		for _, e := range events {
			out = append(out, e.By+e.Kind)
		}
		return strings.Join(out, " ")
	}
	one := story("a")[0].size()
	for name, c := range map[string]struct {
		events      string
		most, bytes int
		want        string
	}{
		"all fit":              {"a b a", 3, math.MaxInt, "a0 b1 a2"},
		"the busy one loses":   {"b a a a a c", 4, math.MaxInt, "b0 a3 a4 c5"},
		"two are busy":         {"c a b a b a b", 5, math.MaxInt, "c0 a3 b4 a5 b6"},
		"one alone":            {"a a a a", 3, math.MaxInt, "a1 a2 a3"},
		"by bytes":             {"b a a a a c", 99, 4*one + 1, "b0 a3 a4 c5"},
		"more users than room": {"a b c d", 3, math.MaxInt, "b1 c2 d3"},
		"none":                 {"", 3, math.MaxInt, ""},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, told(latestOfEachUser(story(c.events), c.most, c.bytes)))
		})
	}
}

// One user's events displace no other user's, neither at once nor when the journal is rewritten.
func TestOneUserDoesNotWashOutTheJournal(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	b := publish(t, x)
	require.NoError(t,
		x.Journal.AddEvent(ctx,
			Event{Kind: "compiled", RequestKey: b.RequestKey, Scope: "shared", By: "uid:1"}))
	require.NoError(t, x.Journal.AddEvent(ctx, Event{Kind: "changed", Runtime: "/opt/ort"}))
	text := strings.Repeat("x", maxText)
	for range 2 * maxJournal / maxText {
		require.NoError(t,
			x.Journal.AddEvent(ctx, Event{Kind: "failed", Text: text, Scope: "shared",
				By: "uid:2"}))
	}
	for range 3 * maxEvents {
		require.NoError(t, x.Journal.AddEvent(ctx, Event{Kind: "failed", Scope: "uid:3"}))
	}
	for range 2 {
		kinds := make(map[string]int)
		for _, e := range x.Journal.Events(time.Time{}) {
			kinds[e.Kind]++
		}
		require.Equal(t, 1, kinds["compiled"])
		require.Equal(t, 1, kinds["changed"])
		closeSound(t, x)
		x = open(t, dir)
	}
	closeSound(t, x)
}
