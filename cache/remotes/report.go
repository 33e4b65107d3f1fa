package remotes

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/remote"
	"github.com/epcached/epcached/unixsock/wire"
)

// figures count the outcomes of calls to a remote, since the daemon's start.
type figures struct {
	hits, refused     atomic.Int64 // fetched builds; refused cards or builds
	fetched, seeds    atomic.Int64 // bytes from the network, and from local builds
	lost              atomic.Int64 // nanoseconds spent on failed transfers
	published, failed atomic.Int64 // builds
	sent              atomic.Int64 // bytes uploaded
	won, waited       atomic.Int64 // leases
	failure           atomic.Pointer[string]
	refusal           atomic.Pointer[outcome] // the last one of refused
	// Unix nanoseconds when the trust document is read next
	trustNext  atomic.Int64
	trustError atomic.Pointer[string] // why the trust document was refused
	told       atomic.Int64           // Unix nanoseconds of the last event of kind remote
	damage     [maxDamage]time.Time   // times of wrong bytes; Remotes.mu guards it
}

// A remote that sends wrong bytes so often within asideFor is not asked until that has passed. It
// is reported by one event each tellEvery at most.
const (
	maxDamage  = 3
	asideFor   = time.Hour
	tellEvery  = 10 * time.Minute
	wrongBytes = "it sent wrong bytes three times in an hour"
)

func (rs *Remotes) noteDamage(r *Remote) {
	f := rs.figuresOf(r.Name)
	rs.mu.Lock()
	copy(f.damage[:], f.damage[1:])
	f.damage[maxDamage-1] = rs.Now()
	rs.mu.Unlock()
	if rs.aside(r) > 0 {
		rs.tell(r, wrongBytes)
	}
}

// aside returns for how long a remote is not asked, because it sent wrong bytes.
func (rs *Remotes) aside(r *Remote) time.Duration {
	f := rs.figuresOf(r.Name)
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return f.damage[0].Add(asideFor).Sub(rs.Now())
}

// tell records an event of a remote that fails.
func (rs *Remotes) tell(r *Remote, text string) {
	f, now := rs.figuresOf(r.Name), rs.Now().UnixNano()
	if last := f.told.Load(); now-last >= int64(tellEvery) && f.told.CompareAndSwap(last, now) {
		rs.Store.RecordEvent(index.Event{Kind: event.Remote,
			Text: "remote " + r.Name + ": " + text})
	}
}

func (rs *Remotes) figuresOf(name string) *figures {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if rs.figures[name] == nil {
		rs.figures[name] = new(figures)
	}
	return rs.figures[name]
}

// Explain returns for each remote whether the request would query it, and the outcome of the last
// look-up.
func (rs *Remotes) Explain(a *Ask) (lines []string) {
	for _, r := range rs.all() {
		text := ""
		o, known := rs.looked.Load().Load(looked{r.Name, a.Plan.BuildKey})
		known = known && o.text != ""
		switch why := a.whyNot(); {
		case !r.Ask:
			text = "not asked: it is only written to"
		case why != "":
			text = "not asked: " + why
		case rs.aside(&r) > 0:
			text = fmt.Sprintf("not asked for %s: %s", rs.aside(&r).Round(time.Second), wrongBytes)
		case known && a.Refresh: // it was asked for this request
			text = o.text
		case known && rs.Now().Before(o.until):
			text = fmt.Sprintf("not asked again for %s: %s",
				o.until.Sub(rs.Now()).Round(time.Second), o.text)
		case known:
			text = "asked " + rs.Now().Sub(o.at).Round(time.Second).String() + " ago: " + o.text
		default:
			text = "it is asked before a compile"
		}
		lines = append(lines, "remote "+r.Name+": "+text)
	}
	return lines
}

// Status returns the state of each remote.
func (rs *Remotes) Status() (out []*wire.Remote) {
	all := rs.all()
	if len(all) == 0 {
		return nil
	}
	calls := make(map[string]remote.Status)
	for _, s := range rs.Client.Status() {
		calls[s.Name] = s
	}
	rs.mu.Lock()
	queued := len(rs.queue)
	rs.mu.Unlock()
	for _, r := range all {
		f, s := rs.figuresOf(r.Name), calls[r.Name]
		one := &wire.Remote{Name: r.Name, Url: wire.Valid(r.URL), Asked: r.Ask,
			Publishes: r.Publish, Calls: uint64(s.Calls), Missing: uint64(s.Missing),
			Denied: uint64(s.Refused), Unreachable: uint64(s.Unreachable),
			Damaged: uint64(s.Damaged), Skipped: uint64(s.Skipped), Fetched: uint64(f.hits.Load()),
			FetchedBytes: f.fetched.Load(), SeedBytes: f.seeds.Load(),
			LostSeconds: time.Duration(f.lost.Load()).Seconds(), Refused: uint64(f.refused.Load()),
			Published: uint64(f.published.Load()), NotPublished: uint64(f.failed.Load()),
			SentBytes: f.sent.Load(), LeasesWon: uint64(f.won.Load()),
			LeasesWaited: uint64(f.waited.Load()), Failing: s.Failing}
		if r.Publish {
			one.Queued = uint64(queued)
		}
		if s.Open {
			one.BreakerSeconds = max(0.001, s.OpenFor.Seconds())
		}
		if n := len(s.Last); n > 0 {
			one.LastError = wire.Valid(s.Last[n-1].Text)
			one.LastErrorMs = wire.Milliseconds(s.Last[n-1].Time)
		}
		why := f.refusal.Load()
		if why != nil && wire.Milliseconds(why.at) > one.LastErrorMs {
			one.LastError = wire.Valid(why.text)
			one.LastErrorMs = wire.Milliseconds(why.at)
		}
		if left := rs.aside(&r); left > 0 {
			one.BreakerSeconds, one.LastError = max(one.BreakerSeconds, left.Seconds()), wrongBytes
		}
		if _, err := rs.signer(&r, index.BuildKey{}); r.Publish && err != nil {
			one.PublishError = wire.Valid(err.Error())
		} else if why := f.failure.Load(); why != nil {
			one.PublishError = wire.Valid(*why)
		}
		rs.trustStatus(&r, one)
		out = append(out, one)
	}
	return out
}
