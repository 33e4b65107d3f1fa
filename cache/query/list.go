package query

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// List pages through builds that the peer may see, in the order of ids, until Next is empty.
func (q *Queries) List(ctx context.Context, p rights.Peer, w *wire.List,
	progress func(*wire.Progress)) (*wire.ListReply, error) {
	limit := 500
	if w.Limit > 0 {
		limit = min(limit, int(w.Limit))
	}
	var after index.BuildID
	var err error
	if w.After != "" {
		if after, err = index.ParseBuildID(w.After); err != nil {
			return nil, apierr.New(apierr.BadRequest, err, "list: page").
				WithHint("start again with the first page")
		}
	}
	looked, all := 0, uint64(0)
	if progress != nil {
		space, err := q.index.Space()
		if err != nil {
			return nil, apierr.New(apierr.Internal, err, "list")
		}
		all = space.Builds
	}
	reply, left, last := &wire.ListReply{}, wire.SpaceLeft(wire.MaxReply), index.BuildID{}
	err = q.store.Layers.Among(after, func(fn func(index.Build) error) error {
		return q.index.EachAfter(ctx, after, fn)
	}, func(b index.Build) error {
		if looked++; progress != nil && looked%wire.StoreProgressEvery == 0 {
			wire.ReportStoreProgress(progress, "reading builds", "builds",
				estimateBefore(b.ID, all), all)
		}
		if !q.rights.MaySee(p, b.ID, b.Scope) || !isListed(w, &b) {
			return nil
		}
		n := len(reply.Builds)
		one, err := (*wire.Build)(nil), error(nil)
		if n < limit {
			if one, err = q.Listed(p, &b); err != nil {
				return err
			}
		}
		if n == limit || !left.Reserve(one) && n > 0 {
			reply.Next = last.String()
			return errStop
		}
		reply.Builds, last = append(reply.Builds, one), b.ID
		return nil
	})
	if err != nil && !errors.Is(err, errStop) {
		return nil, apierr.New(apierr.Internal, err, "list")
	}
	return reply, nil
}

// estimateBefore estimates how many of all builds come before this one, because ids are random.
func estimateBefore(id index.BuildID, all uint64) uint64 {
	return uint64(float64(binary.BigEndian.Uint32(id[:])) / (1 << 32) * float64(all))
}

func isListed(w *wire.List, b *index.Build) bool {
	if w.Model != "" && !slices.ContainsFunc(b.Models(), func(m index.Member) bool {
		return strings.HasPrefix(m.ModelDigest.String(), w.Model) ||
			strings.Contains(m.ModelName, w.Model)
	}) {
		return false
	}
	return w.Ep == "" || slices.ContainsFunc(b.EPs,
		func(e index.EPFacts) bool { return e.Name == w.Ep })
}

// Listing returns the description of a build without the space it takes, which Listed adds.
func (q *Queries) Listing(b *index.Build) *wire.Build {
	state := q.index.Journal.StateOf(b.ID)
	lastUsed, hits := q.index.Uses.LastUse(b.ID)
	out := &wire.Build{
		Build: b.BuildKey.String(), RequestKey: b.RequestKey.String(),
		ModelDigest: b.ModelDigest.String(), ModelName: wire.Clip(b.ModelName),
		OrtVersion: b.ORTVersion, Scope: b.Scope, Graph: b.Graph,
		CreatedMs: wire.Milliseconds(b.Created), CompileSeconds: b.CompileSeconds,
		State: cmp.Or(state.Name, index.Current), Reason: state.Reason,
		LastUsedMs: wire.Milliseconds(lastUsed), Hits: hits, LoadCheck: b.LoadCheck,
		VerifiedOutput: b.VerifiedOutput, Members: MembersReply(b.Members),
	}
	_, out.Pinned = q.index.Journal.Pinned(b.ID)
	q.options.Judge(out, b)
	if b.Put {
		out.MadeBy = fmt.Sprintf("uid %d", b.UID)
	}
	if b.Layer != "" {
		out.MadeBy = "another machine"
	}
	if from := b.Imported; from.Key != "" {
		out.MadeBy = "another machine"
		out.Imported = &wire.Imported{Key: from.Key, Manifest: hex.EncodeToString(from.Manifest[:]),
			Builder: wire.Valid(from.Builder), Remote: wire.Valid(from.Remote)}
	}
	if !b.Converted.ID.IsZero() {
		out.ConvertedFrom = b.Converted.BuildKey.String()
	}
	if v := q.store.Views().CurrentView(b.ID); v != nil {
		if held, _ := v.Leased(); held { // a directory that cannot be opened has no lease
			out.Leases = 1
		}
	}
	if len(b.EPs) > 0 {
		ep := b.EPs[0]
		out.Ep, out.EpVersion, out.EpLibraryDigest = ep.Name, ep.Version, ep.LibraryDigest.String()
		out.SdkVersion, out.HardwareArchitecture = ep.SDKVersion, ep.HardwareArchitecture
		out.CompatibilityString, out.DriverVersion = ep.CompatibilityString, ep.DriverVersion
	}
	for _, f := range b.Files {
		out.Files = append(out.Files, &wire.File{Name: f.Name, Size: f.Size,
			Digest: f.Digest.String()})
	}
	return out
}

// MembersReply converts the members of a group for clients.
func MembersReply(members []index.Member) (out []*wire.Member) {
	for _, m := range members {
		out = append(out, &wire.Member{Name: wire.Clip(m.ModelName),
			ModelDigest: m.ModelDigest.String(), Graph: m.Graph, SessionOptions: m.SessionOptions})
	}
	return out
}

// Listed is Listing of a build that has not been removed.
func (q *Queries) Listed(p rights.Peer, b *index.Build) (*wire.Build, error) {
	own, err := q.RemovalBytes(p, b)
	if err != nil {
		return nil, err
	}
	out := q.Listing(b)
	out.KeptAs, out.OwnBytes = q.Representation(b), own
	if b.UID == p.UID || q.rights.IsAdministrator(p) {
		out.ModelPath = wire.Clip(b.ModelPath)
	}
	return out, nil
}

// Show returns all details of the builds of a name, with records and latest history.
func (q *Queries) Show(ctx context.Context, p rights.Peer, name string) (*wire.ShowReply, error) {
	builds, err := q.Find(ctx, p, []string{name})
	if err != nil {
		return nil, err
	}
	reply, left := &wire.ShowReply{}, wire.SpaceLeft(wire.MaxReply)
	var history []string
	seen := make(map[index.RequestKey]bool)
	for i := range builds {
		b := &builds[i]
		one, err := q.Listed(p, b)
		if err != nil {
			return nil, apierr.New(apierr.Internal, err, "show %q", name)
		}
		one.KeptText, one.ModelName = wire.Valid(q.FormText(b)), wire.Valid(b.ModelName)
		if !left.ReserveBytes(proto.Size(one)+len(b.RecordJSON)+8) && i > 0 {
			reply.More = uint64(len(builds) - i)
			break
		}
		reply.Builds, reply.Records = append(reply.Builds, one), append(reply.Records, b.RecordJSON)
		if seen[b.RequestKey] {
			continue
		}
		seen[b.RequestKey] = true
		for _, e := range q.index.Journal.History(b.RequestKey) {
			one := fmt.Sprintf("%s %s: %s", e.At.Format(time.RFC3339), e.Kind, e.Text)
			history = append(history, wire.Valid(one))
		}
	}
	from := len(history)
	for from > 0 && left.ReserveBytes(len(history[from-1])) {
		from--
	}
	reply.History = history[from:]
	return reply, nil
}

// EachNamed calls fn once with every build that one of the names means and that the peer may see. A
// name is a request key, build key, build id or model digest, a prefix of one, or a model's name. A
// name without builds is an error, after fn was called for the names before it.
func (q *Queries) EachNamed(ctx context.Context, p rights.Peer, names []string,
	fn func(*index.Build) error) error {
	seen := make(map[index.BuildID]bool)
	for _, name := range names {
		used := false
		err := q.index.EachNamed(ctx, name, func(b index.Build) error {
			if !q.rights.MaySee(p, b.ID, b.Scope) {
				return nil
			}
			used = true
			if seen[b.ID] {
				return nil
			}
			if len(names) > 1 {
				seen[b.ID] = true
			}
			return fn(&b)
		})
		if err != nil {
			if errors.As(err, new(*apierr.Error)) {
				return err
			}
			return Error(ctx, err)
		}
		if !used {
			return apierr.New(apierr.NotFound, nil, "no entry %q", name).
				WithHint("%s", hintOf(name))
		}
	}
	return nil
}

func hintOf(name string) string {
	const list = "epcachectl list shows all entries"
	if name != "" && len(name) < index.MinPrefix && strings.Trim(name, "0123456789abcdef") == "" {
		return fmt.Sprintf("a key needs at least %d digits; %s", index.MinPrefix, list)
	}
	return list
}

const maxFound = 1000

// Find returns the builds that the names mean, see EachNamed.
func (q *Queries) Find(ctx context.Context, p rights.Peer, names []string) (out []index.Build,
	err error) {
	err = q.EachNamed(ctx, p, names, func(b *index.Build) error {
		if len(out) == maxFound {
			return apierr.New(apierr.BadRequest, nil, "%q matches more than %d "+
				"builds", names, maxFound).WithHint("give one key: epcachectl list --model NAME " +
				"shows them")
		}
		out = append(out, *b)
		return nil
	})
	return out, err
}

const eventsLimit = 10_000

// Events returns the events since a time that the peer may see, oldest first, as far as they are
// kept: at most the newest limit of them. A limit of 0 means the largest allowed.
func (q *Queries) Events(ctx context.Context, p rights.Peer, since time.Time, limit int) (
	*wire.EventsReply, error) {
	if limit <= 0 || limit > eventsLimit {
		limit = eventsLimit
	}
	all := q.index.Journal.Events(since)
	out, left := &wire.EventsReply{}, wire.SpaceLeft(wire.MaxReply)
	for i := len(all) - 1; i >= 0 && len(out.Events) < limit; i-- {
		if ctx.Err() != nil {
			return nil, apierr.FromContext(ctx, "events")
		}
		if e := &all[i]; q.rights.MaySeeEvent(p, e) {
			one := event.Reply(q.completeEvent(e))
			if !left.Reserve(one) {
				break
			}
			out.Events = append(out.Events, one)
		}
	}
	slices.Reverse(out.Events)
	return out, nil
}

// completeEvent adds fields that earlier versions of epcached did not store.
func (q *Queries) completeEvent(e *index.Event) *index.Event {
	if e.Scope == "" && !e.BuildID.IsZero() {
		if b, err := q.index.Get(e.BuildID); err == nil {
			e.BuildKey, e.ModelName, e.Scope = b.BuildKey, b.ModelName, b.Scope
		}
	}
	return e
}

// Subscribe calls fn with each event that the peer may see, one at a time, starting with the
// sequence number next (0: only new events), until the context ends, which is no error, or fn
// fails. A subscriber that falls far behind misses events. It then receives an event of the kind
// "missed", without a sequence number.
func (q *Queries) Subscribe(ctx context.Context, p rights.Peer, next uint64,
	fn func(*wire.Event) error) error {
	if next == 0 {
		next = q.options.Stream.End()
	}
	for {
		events, missed, more := q.options.Stream.since(next)
		if missed > 0 {
			next += missed
			e := index.Event{At: q.options.Now(), Kind: event.Missed, Text: "this subscriber " +
				"was too slow; epcachectl events shows recorded events"}
			if err := fn(event.Reply(&e)); err != nil {
				return err
			}
		}
		for i := range events {
			next = events[i].Sequence + 1
			if !q.rights.MaySeeEvent(p, &events[i]) {
				continue
			}
			if err := fn(event.Reply(&events[i])); err != nil {
				return err
			}
		}
		if len(events) > 0 && ctx.Err() == nil {
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-more:
		}
	}
}

// Stream holds the latest events for subscribers. Their sequence numbers have no gap.
type Stream struct {
	mu     sync.Mutex
	latest []index.Event // oldest first; guarded by mu
	more   chan struct{} // closed and replaced with each event; guarded by mu
}

// MaxBehind is how many events a subscriber may fall behind.
const MaxBehind = 1024

// Add appends an event. The index calls it in order.
func (s *Stream) Add(e index.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.latest) >= 2*MaxBehind {
		s.latest = slices.Clone(s.latest[MaxBehind:]) // occasionally, instead of for each event
	}
	s.latest = append(s.latest, e)
	if s.more != nil {
		close(s.more)
		s.more = nil
	}
}

// End returns the sequence number of the next event.
func (s *Stream) End() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.latest) == 0 {
		return 1
	}
	return s.latest[len(s.latest)-1].Sequence + 1
}

// since returns the events from next on, how many were dropped, and a channel that is closed with
// the next event.
func (s *Stream) since(next uint64) (events []index.Event, missed uint64, more <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.more == nil {
		s.more = make(chan struct{})
	}
	kept := s.latest[max(0, len(s.latest)-MaxBehind):]
	if len(kept) == 0 {
		return nil, 0, s.more
	}
	if first := kept[0].Sequence; next < first {
		missed, next = first-next, first
	}
	return slices.Clone(kept[min(next-kept[0].Sequence, uint64(len(kept))):]), missed, s.more
}

const maxHistory = 200

// AddHistory adds the entry's events that the peer may see, as many as fit, and returns the answer.
func (q *Queries) AddHistory(p rights.Peer, key index.RequestKey,
	out *wire.Explanation) *wire.Explanation {
	all := q.index.Journal.History(key)
	out.Reason = wire.Valid(out.Reason)
	for i := len(all) - 1; i >= 0 && len(out.History) < maxHistory; i-- {
		if e := &all[i]; q.rights.MaySeeEvent(p, e) {
			out.History = append(out.History, event.Reply(q.completeEvent(e)))
		}
	}
	slices.Reverse(out.History)
	// the answer has these fields twice
	shortenExplanation(out, wire.MaxReply-len(out.Record)-len(out.Reason))
	return out
}

// shortenExplanation drops the least relevant parts: old events first, then far neighbours.
func shortenExplanation(e *wire.Explanation, limit int) {
	for proto.Size(e) > limit {
		switch {
		case len(e.History) > 0:
			e.History = e.History[(len(e.History)+1)/2:]
		case len(e.Neighbours) > 0:
			e.Neighbours = e.Neighbours[:len(e.Neighbours)/2]
		case len(e.Candidates) > 0:
			e.Candidates = e.Candidates[:len(e.Candidates)/2]
		case e.Record != "":
			e.Record = ""
		default:
			return
		}
	}
}
