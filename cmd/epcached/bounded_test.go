package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/index"
)

// Answers about any number of builds stay below the limit, begin with what comes first, and say how much is left out.
func TestLongAnswersAreCutAndSaySo(t *testing.T) {
	const limit = 20_000
	var list []cache.Listing
	var history []string
	for i := range 400 {
		list = append(list, cache.Listing{Build: index.Build{ModelName: fmt.Sprint(i, strings.Repeat("m", 100)), RecordJSON: strings.Repeat("r", 200)}})
		history = append(history, fmt.Sprint(i, strings.Repeat("h", 50)))
	}
	builds, cut := buildsReply(list, limit)
	require.Len(t, builds, 400-cut)
	require.Greater(t, len(builds), 40, "it is used up")

	changed := changeReply(&cache.Changed{Builds: list, More: 7}, 5, limit)
	require.LessOrEqual(t, proto.Size(changed), limit+100)
	require.EqualValues(t, 407, uint64(len(changed.Builds))+changed.More)

	shown := showReply(list, history, limit)
	require.LessOrEqual(t, proto.Size(shown), limit)
	require.EqualValues(t, 400, uint64(len(shown.Builds))+shown.More)
	require.Len(t, shown.Records, len(shown.Builds))
	require.Equal(t, list[0].Build.ModelName, shown.Builds[0].ModelName)

	shown = showReply(list[:1], history, limit)
	require.Zero(t, shown.More)
	require.Less(t, len(shown.History), 400)
	require.Equal(t, history[399], shown.History[len(shown.History)-1], "the latest is told")

	result := &cache.CheckResult{More: 3}
	for i := range 1000 {
		kind := "leftover"
		if i == 999 {
			kind = "damaged"
		}
		result.Findings = append(result.Findings, cache.Finding{Kind: kind, Object: fmt.Sprint(i), Detail: strings.Repeat("d", 80)})
	}
	found := checkReply(result, limit)
	require.LessOrEqual(t, proto.Size(found), limit)
	require.EqualValues(t, 1003, uint64(len(found.Findings))+found.More)
	require.Equal(t, "damaged", found.Findings[0].Kind, "what is cut off is not the damage")
}
