package index

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/epcached/epcached/index/manifestpb"
)

// Ghost is what is left of a build that was collected: so that it can be said
// where it went, and what that costs.
type Ghost struct {
	BuildID        BuildID
	RequestKey     RequestKey
	BuildKey       BuildKey
	ModelName      string
	Scope          string // who may hear of it, as of the build
	At             time.Time
	Reason         string
	Bytes          int64   // that it freed
	CompileSeconds float64 // that it takes to have it back
	LastUsed       time.Time
	ForBudget      bool // it went to keep to the budget, and not as somebody asked or for another bound
}

// maxGhosts bounds what is remembered; the oldest go. One takes some 400 bytes.
const maxGhosts = 4 << 10

// addGhost keeps memory within bounds without moving all ghosts every time.
func (j *journal) addGhost(one Ghost) {
	if len(j.ghosts) >= 2*maxGhosts {
		j.ghosts = j.ghosts[len(j.ghosts)-maxGhosts:]
	}
	j.ghosts = append(j.ghosts, one)
}

// Haunt leaves ghosts of builds that are about to be retracted, durably when
// it returns: a crash between the two leaves ghosts of builds that are there,
// which the next Open drops. After an error (a full disk) they are known until
// Close, and written as soon as the journal can be written again.
func (x *Index) Haunt(ctx context.Context, list []Ghost) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	records := make([]*manifestpb.Record, len(list))
	for i := range list {
		g := &list[i]
		g.At, g.LastUsed, g.Reason = trimTime(g.At), trimTime(g.LastUsed), shorten(g.Reason, maxText)
		g.ModelName, g.Scope = shorten(g.ModelName, maxName), shorten(g.Scope, 64)
		records[i] = ghostRecord(g)
	}
	j := x.journal
	return j.change(func() {
		for _, g := range list {
			j.addGhost(g)
		}
	}, records...)
}

// Exorcise forgets the ghost of a build that stays after all. The file need
// not say so: the ghost of a build that is there means nothing.
func (x *Index) Exorcise(id BuildID) {
	x.journal.mu.Lock()
	defer x.journal.mu.Unlock()
	x.journal.ghosts = slices.DeleteFunc(x.journal.ghosts, func(g Ghost) bool { return g.BuildID == id })
}

// Ghosts returns what is still known of builds that were collected, oldest
// first: some 4,000 at least, and never more than twice as many. match may be
// nil.
func (x *Index) Ghosts(match func(*Ghost) bool) []Ghost {
	x.journal.mu.Lock()
	defer x.journal.mu.Unlock()
	var out []Ghost
	for i := range x.journal.ghosts {
		if one := &x.journal.ghosts[i]; match == nil || match(one) {
			out = append(out, *one)
		}
	}
	return out
}

func ghostOf(m *manifestpb.Ghost) (Ghost, error) {
	g := Ghost{ModelName: m.GetModelName(), Scope: m.GetScope(), At: fromNanos(m.GetAt()), Reason: m.GetReason(), Bytes: m.GetBytes(),
		CompileSeconds: m.GetCompileSeconds(), LastUsed: fromNanos(m.GetLastUsed()), ForBudget: m.GetForBudget()}
	return g, cmp.Or(fixed("build_id", g.BuildID[:], m.GetBuildId()),
		fixed("request_key", g.RequestKey[:], m.GetRequestKey()), fixed("build_key", g.BuildKey[:], m.GetBuildKey()))
}

func ghostRecord(g *Ghost) *manifestpb.Record {
	return &manifestpb.Record{Kind: &manifestpb.Record_Ghost{Ghost: &manifestpb.Ghost{
		BuildId: g.BuildID[:], RequestKey: g.RequestKey[:], BuildKey: g.BuildKey[:], ModelName: g.ModelName, Scope: g.Scope,
		At: nanos(g.At), Reason: g.Reason, Bytes: g.Bytes, CompileSeconds: g.CompileSeconds, LastUsed: nanos(g.LastUsed), ForBudget: g.ForBudget,
	}}}
}
