package change

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// Answers about any number of builds stay below the limit, begin with the first builds, and say how
// many are left out.
func TestLongAnswersAreCutAndSaySo(t *testing.T) {
	const limit = 20_000
	out := &changeLog{reply: &wire.ChangeReply{}, space: limit}
	for range 400 {
		require.NoError(t, out.add(func() (*wire.Build, error) {
			return &wire.Build{ModelName: strings.Repeat("m", 500)}, nil
		}))
	}
	require.LessOrEqual(t, proto.Size(out.reply), limit+100)
	require.EqualValues(t, 400, uint64(len(out.reply.Builds))+out.reply.More)
	require.Greater(t, len(out.reply.Builds), 10, "it is used up")
}
