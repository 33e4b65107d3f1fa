package cache

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// Answers about any number of builds stay below the limit, begin with what comes first, and say how much is left out.
func TestLongAnswersAreCutAndSaySo(t *testing.T) {
	const limit = 20_000
	b := newBench(t)
	build := b.use(1).Build
	changed := b.cache.changed(b.self())
	changed.left = limit
	for range 400 {
		require.NoError(t, changed.took(build))
	}
	require.LessOrEqual(t, proto.Size(changed.reply), limit+100)
	require.EqualValues(t, 400, uint64(len(changed.reply.Builds))+changed.reply.More)
	require.Greater(t, len(changed.reply.Builds), 10, "it is used up")

	result := &checking{CheckReply: &wire.CheckReply{More: 3}}
	for i := range 1000 {
		kind := "leftover"
		if i == 999 {
			kind = "damaged"
		}
		result.Findings = append(result.Findings, &wire.Finding{Kind: kind, Object: fmt.Sprint(i), Detail: strings.Repeat("d", 80)})
	}
	result.cut(limit)
	require.LessOrEqual(t, proto.Size(result), limit)
	require.EqualValues(t, 1003, uint64(len(result.Findings))+result.More)
	require.Equal(t, "damaged", result.Findings[0].Kind, "what is cut off is not the damage")
}
