package audit

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/unixsock/wire"
)

// A long answer stays below the limit, begins with the damage, and says how much is left out.
func TestALongAnswerIsCutAndSaysSo(t *testing.T) {
	const limit = 20_000
	result := &checking{CheckReply: &wire.CheckReply{More: 3}}
	for i := range 1000 {
		kind := "leftover"
		if i == 999 {
			kind = "damaged"
		}
		result.Findings = append(result.Findings,
			&wire.Finding{Kind: kind, Object: fmt.Sprint(i), Detail: strings.Repeat("d", 80)})
	}
	result.truncate(limit)
	require.LessOrEqual(t, proto.Size(result), limit)
	require.EqualValues(t, 1003, uint64(len(result.Findings))+result.More)
	require.Equal(t, "damaged", result.Findings[0].Kind, "what is cut off is not the damage")
}

func TestDamageOfRemovedBuildsIsReported(t *testing.T) {
	a := &auditor{}
	require.False(t, a.wasBeingRemoved(&wire.Finding{Kind: "damaged",
		Object: cas.Digest{1}.String()}))
	require.False(t, a.wasBeingRemoved(&wire.Finding{Kind: "leftover", Object: "views/shared/x"}))
}
