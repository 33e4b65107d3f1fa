package cache

import (
	"context"
	"encoding/binary"
	"slices"
	"sync/atomic"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// A request that comes alone finds other data in the processor's caches, so that its answer takes
// as long as fetching the code and the tables that it needs. Therefore the plans of requests that
// were hits are remembered under their bytes and the stamps of their files. An equal request takes
// the plan from there, and only looks up the build.

// Repeats answers requests that are equal to earlier ones.
type Repeats struct {
	cache *Cache
	known memo.Table[string, *repeated] // by Key
}

// repeated is what is remembered of a request.
type repeated struct {
	*request.Attempt
	last atomic.Pointer[encodedReply]
}

// encodedReply is the reply with a build whose view has not changed since.
type encodedReply struct {
	view     *views.View
	warnings []string
	reply    *wire.AcquireReply
}

// maxRepeated bounds the remembered requests.
const maxRepeated = 1 << 10

// Key returns a text that is the same for requests of a user with equal bodies and unchanged
// files, "" if stamps do not show whether the files are unchanged.
func (rs *Repeats) Key(p request.Peer, body string, fds []int) string {
	if body == "" {
		return ""
	}
	b := make([]byte, 0, 16+64*len(fds)+len(body))
	for _, n := range []uint32{p.UID, p.GID, uint32(len(fds))} {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	now := rs.cache.now()
	for _, fd := range fds {
		var ok bool
		if b, ok = memo.AppendFile(b, fd, now); !ok {
			return ""
		}
	}
	return string(append(b, body...))
}

// generation changes with everything that plans depend on beside the request and the runtime's own
// files.
func (rs *Repeats) generation() uint64 {
	_, planning := rs.cache.planner.Allowed()
	return planning + rs.cache.runtimes.Generation()
}

// remember remembers the plan of a request whose answer is the build that the plan would make.
func (rs *Repeats) remember(at *request.Attempt, rt *runtimes.Runtime, a *request.Answer) {
	switch {
	case at.Repetition == "", a.Outcome != request.Hit:
	case at.Plan == nil, at.Adopt, at.VerifyOutput > 0:
		// compiled models, which have no plan, and comparisons need the files
	case !at.Plan.MadeExactly(a.Build):
	case slices.ContainsFunc(at.EPs, func(ep identity.EP) bool { return len(ep.Files) > 0 }):
		// they are hashed each time
	case rs.cache.runtimes.StaysResolved(at.RuntimeWanted(), rt, at.Content):
		// without the request's own files, connection and progress
		known := &repeated{Attempt: at.WithRequest(at.WithoutFiles()).Again(at.Peer, nil, nil)}
		rs.known.Save(at.Repetition, known, maxRepeated)
	}
}

// Answer answers a request that is equal to one that was a hit. It returns nil if Acquire has to
// answer it.
func (rs *Repeats) Answer(ctx context.Context, p request.Peer, key string,
	progress func(request.Progress)) *request.Answer {
	known, ok := rs.known.Load(key)
	if !ok || known.Generation != rs.generation() || !known.Content.IsStill() {
		return nil
	}
	c := rs.cache
	defer c.Store.Packer().BeginRequest()()
	t := jobs.NewProgressReporter(progress, c.now())
	defer t.End()
	var slow atomic.Bool
	at := known.Again(p, t, func(name string) {
		slow.Store(true)
		t.Phase(name)
	})
	a := c.lookup.FindExact(lookup.WithProgress(ctx, t), at, func(b *index.Build) bool {
		return !c.recompiler.IsTooOld(at, b) // to compile it again, the files are needed
	})
	if a == nil || slow.Load() && checkNotReplaced(a, at) != nil {
		return nil
	}
	if !at.KeepsView {
		c.views.NotePathGiven(a.LeasedView)
	}
	warnings := c.gains.ForBuild(a.Build.ID).Warnings()
	if last := known.last.Load(); last != nil && last.view == a.LeasedView &&
		slices.Equal(last.warnings, warnings) {
		c.Rights.RecordSeen(p, a.Build)
		a.Encoded = last.reply
		return a
	}
	a = c.lookup.FillAnswer(a, at)
	if reply := a.Reply().Encoded(); reply != nil {
		known.last.Store(&encodedReply{a.LeasedView, warnings, reply})
	}
	return a
}
