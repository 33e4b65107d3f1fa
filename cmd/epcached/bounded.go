package main

import (
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/unixsock/wire"
)

// Answers whose length nobody knows before are cut where the frame is full, and say how much is missing. What comes first is
// always told.

// room is what is left of an answer.
type room int

// takes tells whether a message still goes in, and counts it.
func (r *room) takes(m proto.Message) bool { return r.takesBytes(proto.Size(m)) }

func (r *room) takesBytes(n int) bool {
	if *r < room(n+8) { // 8: its tag and length, at most
		*r = 0 // what follows is smaller perhaps, and would stand in another order
		return false
	}
	*r -= room(n + 8)
	return true
}

// buildsReply lists builds in at most so many bytes, and says how many are left out. One is always there.
func buildsReply(list []cache.Listing, limit int) (out []*wire.Build, cut int) {
	left := room(limit)
	for i := range list {
		if one := buildReply(&list[i]); left.takes(one) || i == 0 {
			out = append(out, one)
		} else {
			return out, len(list) - i
		}
	}
	return out, 0
}

func changeReply(ch *cache.Changed, freed int64, limit int) *wire.ChangeReply {
	builds, cut := buildsReply(ch.Builds, limit)
	return &wire.ChangeReply{Builds: builds, FreedBytes: freed, More: ch.More + uint64(cut)}
}

// showReply has the builds, each with its record, and of the history the latest.
func showReply(list []cache.Listing, history []string, limit int) *wire.ShowReply {
	reply := &wire.ShowReply{}
	left := room(limit)
	for i := range list {
		one, record := buildReply(&list[i]), list[i].Build.RecordJSON
		if !left.takesBytes(proto.Size(one)+len(record)+8) && i > 0 {
			reply.More = uint64(len(list) - i)
			break
		}
		reply.Builds, reply.Records = append(reply.Builds, one), append(reply.Records, record)
	}
	from := len(history)
	for from > 0 && left.takesBytes(len(history[from-1])) {
		from--
	}
	reply.History = slices.Clone(history[from:])
	return reply
}

// checkReply has the findings, the first of them.
func checkReply(result *cache.CheckResult, limit int) *wire.CheckReply {
	reply := &wire.CheckReply{Blobs: result.Blobs, Builds: result.Builds, Bytes: result.Bytes, More: result.More}
	left := room(limit)
	// Leftovers come last: what is cut off must not be the damage.
	slices.SortStableFunc(result.Findings, func(a, b cache.Finding) int { return leftoverLast(&a) - leftoverLast(&b) })
	for i, f := range result.Findings {
		out := &wire.Finding{Kind: f.Kind, Object: f.Object, Detail: clip(f.Detail)}
		for _, key := range f.Builds {
			out.Builds = append(out.Builds, key.String())
		}
		if !left.takes(out) {
			reply.More += uint64(len(result.Findings) - i)
			break
		}
		reply.Findings = append(reply.Findings, out)
	}
	return reply
}

func leftoverLast(f *cache.Finding) int {
	if f.Kind == "leftover" {
		return 1
	}
	return 0
}
