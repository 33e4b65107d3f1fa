package cache

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
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
}
