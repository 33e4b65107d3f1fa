package query

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

func TestExplanationFitsIntoAFrame(t *testing.T) {
	long := strings.Repeat("x", 10<<10)
	e := &wire.Explanation{Decision: "miss"}
	for i := range 300 {
		e.History = append(e.History, &wire.Event{Sequence: uint64(i + 1), Text: long})
		e.Neighbours = append(e.Neighbours,
			&wire.Neighbour{ModelName: fmt.Sprint(i),
				Differences: []*wire.Difference{{Asked: long}}})
		e.Candidates = append(e.Candidates, &wire.Candidate{Reason: fmt.Sprint(i, long)})
	}
	reply := proto.CloneOf(e)
	shortenExplanation(reply, wire.MaxReply)
	require.LessOrEqual(t, proto.Size(reply), wire.MaxReply)
	require.Equal(t, "miss", reply.Decision)
	require.NotEmpty(t, reply.Candidates, "the history goes first, then the neighbours")
	require.True(t, strings.HasPrefix(reply.Candidates[0].Reason, "0x"),
		"the first candidates stay")

	e.Candidates = nil
	reply = proto.CloneOf(e)
	shortenExplanation(reply, wire.MaxReply)
	require.LessOrEqual(t, proto.Size(reply), wire.MaxReply)
	require.Equal(t, "0", reply.Neighbours[0].ModelName, "the nearest stay")

	e.Neighbours = nil
	reply = proto.CloneOf(e)
	shortenExplanation(reply, wire.MaxReply)
	require.LessOrEqual(t, proto.Size(reply), wire.MaxReply)
	require.EqualValues(t, 300, reply.History[len(reply.History)-1].Sequence, "the newest stay")
}
