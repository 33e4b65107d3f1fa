// Package reports decides on what clients report of builds that did not load: whether a build is withheld
// from the reporting user or from all, and whether the client retries or loads the model itself.
//
// Start with Reports.Take. The package stores nothing and loads nothing: the cache examines a build, and
// Options say how a build is withheld, judged and compiled again.
package reports

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// Report says that ONNX Runtime refused a build.
type Report struct {
	Build      string // build key, as the answer gave it
	Code       int32  // ONNX Runtime's error code
	Text       string
	ORTVersion string
	Graph      string // as in the answer: names the copy that was loaded
}

// The decisions on reports.
const (
	DecidedRetry           = "retry"
	DecidedCompileYourself = "compile_yourself"
	DecidedSound           = "sound"
)

// WithheldFromYou is the state of a build that others still get.
const WithheldFromYou = "withheld from you"

// Options are what reports need of the cache.
type Options struct {
	Store    *store.Store
	Rules    func() *rules.Set
	Settings func() Settings
	Owner    func(uid uint32) uint32                                             // the user of a uid
	Find     func(context.Context, rights.Peer, []string) ([]index.Build, error) // builds that the peer may see
	Rebuild  func(b *index.Build, runtime, why string)                           // wants it to be compiled again
	Now      func() time.Time
	Log      *slog.Logger
}

// Settings may change while the daemon runs.
type Settings struct {
	Trusted []uint32 // users whose reports count without others'
	Quorum  int      // distinct users whose reports withhold a build from all, where it cannot be checked
}

// Reports take the reports of clients, and remember which builds are withheld from which user. All
// methods may be called at the same time.
type Reports struct {
	o       Options
	doubts  *doubts
	limiter rights.Limiter
	told    memo.Table[toldKey, string]
}

type toldKey struct {
	owner uint32
	build index.BuildID
}

// A user may report so many builds at once, and then one in each interval: an update of an SDK may make many of an
// application's models stale at a time.
const (
	reportBurst    = 60
	reportInterval = 2 * time.Second
	maxReportText  = 4096
	maxReported    = 1 << 12 // of which it is known what was told last
)

// New returns reports without any.
func New(o Options) *Reports {
	return &Reports{o: o, doubts: newDoubts(o.Now), limiter: rights.Limiter{Burst: reportBurst, Interval: reportInterval, Now: o.Now}}
}

// Doubt returns why the build is withheld from the user, "" if it is not.
func (rs *Reports) Doubt(id index.BuildID, uid uint32) string { return rs.doubts.holds(id, uid) }

// Doubted counts the builds of the request that are withheld from the user.
func (rs *Reports) Doubted(request index.RequestKey, uid uint32) int {
	return rs.doubts.rounds(request, uid)
}

// Doubts counts the builds that are withheld from single users.
func (rs *Reports) Doubts() int64 { return rs.doubts.any.Load() }

// Verdict is the result of an examination.
type Verdict int

// The verdicts.
const (
	Unverified Verdict = iota // nothing could be found out
	Loads
	Refuted    // it does not load, and others do
	Elsewhere  // the device that it is for is not in this machine
	Unprovable // it does not load here, which proves nothing of other devices
	Damaged    // its bytes are not what they were
)

// Examined is what was found out about a reported build.
type Examined struct {
	Verdict  Verdict
	Text     string
	Level    string            // the only optimisation level at which it loads
	Runtime  string            // that it was loaded with
	Exactly  bool              // the compiler would produce this very build now
	Disprove func(text string) // remembers that a refuted build does not load with Runtime
}

// Examine finds out whether a build is sound.
type Examine func(context.Context, *index.Build) (Examined, error)

// Take decides on a report. The client is not simply believed: one user must not be able to empty what
// all share. The build is examined. Meanwhile, and if nothing can be found out, it is withheld from that
// user alone, and from all only when enough other users report the same.
func (rs *Reports) Take(ctx context.Context, p rights.Peer, r Report, examine Examine) (*wire.ReportReply, error) {
	if len(r.Text) > maxReportText {
		r.Text = strings.ToValidUTF8(r.Text[:maxReportText], "")
	}
	owner := rs.o.Owner(p.UID)
	if wait, ok := rs.limiter.Take(owner); !ok {
		return nil, apierr.New(apierr.Busy, nil, "too many reports").WithHint("the next one is looked into in %s; load with plain ONNX Runtime until then", wait.Round(time.Second)+time.Second)
	}
	b, err := rs.find(ctx, p, &r)
	if err != nil {
		return nil, err
	}
	rs.o.Store.Index().Counters.Add("reports", 1)
	class := rs.classify(b, &r)
	from := reporter{p.UID, owner}
	d, err := rs.decide(ctx, from, r.Graph, class, examining{b, examine})
	if err != nil {
		if ctx.Err() != nil {
			return nil, apierr.OfContext(ctx, "model %q", b.ModelName)
		}
		return nil, err
	}
	d.Text, d.Hint = wire.Valid(d.Text), wire.Valid(d.Hint)
	d.Class, d.State = class.Name, cmp.Or(d.State, rs.o.Store.Index().Journal.StateOf(b.ID).Name)
	rs.record(from, &r, b, d)
	return d, nil
}

// find returns the build among those that the peer was given.
func (rs *Reports) find(ctx context.Context, p rights.Peer, r *Report) (*index.Build, error) {
	none := apierr.New(apierr.NotFound, nil, "build %.80q is none that you were given", r.Build).WithHint("name it as the answer to the request did")
	if _, err := index.ParseBuildKey(r.Build); err != nil {
		return nil, none
	}
	builds, err := rs.o.Find(ctx, p, []string{r.Build})
	if apierr.ClassOf(err) == apierr.NotFound && err != nil {
		return nil, none
	}
	if err != nil {
		return nil, err
	}
	b := builds[max(0, slices.IndexFunc(builds, func(b index.Build) bool { return rs.isCopy(&b, r.Graph) }))]
	return &b, nil
}

// isCopy reports whether the graph, if the report names one, is in the build's present view.
func (rs *Reports) isCopy(b *index.Build, graph string) bool {
	id, _, _ := strings.Cut(graph, "/")
	where, ok := rs.o.Store.Index().Views.Get(b.ID[:])
	return graph == "" || ok && strings.HasSuffix(string(where), "/"+id)
}

// classify takes the first of the build's execution providers of which the rules know something.
func (rs *Reports) classify(b *index.Build, r *Report) rules.Class {
	var class rules.Class
	for i := range b.EPs {
		if one := rs.o.Rules().Classify(b.EPs[i].Name, int(r.Code), r.Text); i == 0 || class.Name == rules.Unclear {
			class = one
		}
	}
	return class
}

// reporter is the user of a report.
type reporter struct {
	uid, owner uint32
}

// examining is a reported build, and how it is examined.
type examining struct {
	*index.Build
	examine Examine
}

// decide takes all steps of a report. An error is the context's, or the store's.
func (rs *Reports) decide(ctx context.Context, from reporter, graph string, class rules.Class, x examining) (*wire.ReportReply, error) {
	b := x.Build
	if state := rs.o.Store.Index().Journal.StateOf(b.ID); state.Name != index.Current {
		return retry("it is %s already: %s", state.Name, state.Reason), nil
	}
	if !rs.isCopy(b, graph) {
		return retry("the copy that you loaded has been replaced since"), nil
	}
	if view, err := rs.o.Store.View(ctx, b, store.Phases{Phase: func(string) {}}); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return retry("%s", rs.o.Store.WithholdDamaged(ctx, b, err)), nil
	} else if graph != "" && !strings.HasPrefix(graph, view.ID()+"/") {
		return retry("a file of the copy that you loaded was changed or missing; there is a new one"), nil
	}
	if class.Name == rules.NotStale {
		return sound(class.Reason, class.Hint), nil
	}
	ds := rs.doubts
	again := ds.holds(b.ID, from.uid) != ""
	if !again && !ds.add(b, from.uid, from.owner, "you reported that it does not load, and it is being looked into", false) {
		return nil, apierr.New(apierr.Busy, nil, "too many reports that could not be verified").WithHint("load with plain ONNX Runtime")
	}
	found, err := x.examine(ctx, b)
	if err != nil {
		if !again {
			ds.drop(b.ID, from.uid)
		}
		return nil, err
	}
	return rs.conclude(from, b, class, found), nil
}

// conclude does what follows from an examination.
func (rs *Reports) conclude(from reporter, b *index.Build, class rules.Class, x Examined) *wire.ReportReply {
	ds := rs.doubts
	switch x.Verdict {
	case Damaged:
		ds.settle(b.ID)
		// Otherwise the disk could not be read, which may pass.
		if rs.o.Store.Index().Journal.StateOf(b.ID).Name == index.Damaged {
			rs.o.Store.Index().Counters.Add("reports_confirmed", 1)
			rs.o.Rebuild(b, "", x.Text)
		}
		return retry("%s", x.Text)
	case Loads:
		ds.answer(b.ID, from.uid)
		d := sound("its bytes are what was compiled, and "+x.Text, "")
		if class.Hint != "" && !strings.HasPrefix(class.Hint, "ask again") {
			d.Hint += "; " + class.Hint
		}
		if x.Level == "disable_all" && b.GraphOptimizationLevel != x.Level {
			d.Hint = "it loads with graph optimisation disabled only (ORT_DISABLE_ALL)"
		}
		return d
	case Refuted:
		ds.answer(b.ID, from.uid)
		rs.o.Store.Index().Counters.Add("reports_confirmed", 1)
		rs.refute(b, x)
		return retry("%s", x.Text)
	case Elsewhere:
		ds.drop(b.ID, from.uid)
		return &wire.ReportReply{Decision: DecidedCompileYourself,
			Text: x.Text + "; nothing is wrong with the build",
			Hint: "load the model itself, with what this machine has"}
	}
	return rs.withholdFrom(from, b, x)
}

// refute takes a build that does not load out of service: for all if it was made for just these libraries, else for
// them alone.
func (rs *Reports) refute(b *index.Build, x Examined) {
	if x.Exactly {
		rs.doubts.settle(b.ID)
		_ = rs.o.Store.Withhold(b.ID, index.Withheld, "reported, and "+x.Text)
	} else {
		x.Disprove(x.Text)
	}
	rs.o.Rebuild(b, x.Runtime, "reported, and "+x.Text)
}

// withholdFrom withholds from the reporter what could not be verified, and from all if enough say the same.
func (rs *Reports) withholdFrom(from reporter, b *index.Build, x Examined) *wire.ReportReply {
	ds := rs.doubts
	counts := x.Verdict == Unverified && b.Scope == "shared" // towards the quorum
	why := "you reported that it does not load; " + x.Text
	ds.add(b, from.uid, from.owner, why, counts) // it is there already, so there is room
	trusted := counts && slices.Contains(rs.o.Settings().Trusted, from.uid)
	if n := ds.owners(b.ID); counts && (trusted || n >= rs.o.Settings().Quorum) {
		reason := fmt.Sprintf("%d users reported that it does not load; %s", n, x.Text)
		if trusted {
			reason = "a trusted user reported that it does not load; " + x.Text
		}
		ds.settle(b.ID)
		_ = rs.o.Store.Withhold(b.ID, index.Withheld, reason)
		rs.o.Rebuild(b, "", reason)
		return retry("%s", reason)
	}
	d := &wire.ReportReply{Decision: DecidedRetry, Text: x.Text, State: WithheldFromYou,
		Hint: "ask again: one of your own is compiled, and others keep this one"}
	switch {
	case ds.rounds(b.RequestKey, from.uid) >= MaxRounds:
		d.Decision = DecidedCompileYourself
		d.Hint = fmt.Sprintf("what is compiled here does not load for you, twice: load the model itself; epcached offers it again after %s", DoubtHolds)
	case b.Put && b.UID == from.uid: // there is no other to be had from here, and the same compile a moment later makes the same
		d.Decision = DecidedCompileYourself
		d.Hint = "it is one of your own, made with your libraries: load the model itself; the next session may compile it once more"
	}
	return d
}

// MaxRounds is how often a user's report that cannot be verified brings that user another build for the same request.
const MaxRounds = 2

func retry(format string, args ...any) *wire.ReportReply {
	return &wire.ReportReply{Decision: DecidedRetry, Text: fmt.Sprintf(format, args...),
		Hint: "ask again"}
}

func sound(text, hint string) *wire.ReportReply {
	return &wire.ReportReply{Decision: DecidedSound, Text: text,
		Hint: cmp.Or(hint, "the artefact is sound; look at your session's options: provider options, session options and optimisation level have to be those of the answer")}
}

// record writes the decision to the log and the history, unless it repeats the last one for this user: a
// flood of reports must not push other events out. The client's own words are for the log, because they
// may contain paths.
func (rs *Reports) record(from reporter, r *Report, b *index.Build, d *wire.ReportReply) {
	outcome := d.Decision + ": " + d.Text
	key := toldKey{from.owner, b.ID}
	if last, _ := rs.told.Load(key); last == outcome {
		return
	}
	rs.told.Save(key, outcome, maxReported)
	rs.o.Log.Info("report", "build", b.BuildKey.String(), "uid", from.uid, "code", r.Code, "text", identity.Shortened(r.Text), "decision", d.Decision, "found", d.Text)
	rs.o.Store.RecordEvent(event.Of(b, event.Report, "%s: %s: %s", compilers.CodeName(int(r.Code)), d.Decision, d.Text))
}

// doubts are the builds that are withheld from single users, who reported that they do not load.
// They are kept in memory only: after a restart such a build is served, and reported, again.
type doubts struct {
	now   func() time.Time
	any   atomic.Int64 // how many there are: a hit looks no further when there are none
	mu    sync.Mutex
	known map[doubtKey]doubt // guarded by mu
}

type doubtKey struct {
	build index.BuildID
	uid   uint32
}

type doubt struct {
	owner   uint32
	request index.RequestKey
	why     string
	counts  bool // towards the quorum
	until   time.Time
}

const (
	DoubtHolds    = 24 * time.Hour
	doubtsPerUser = 256
	maxDoubts     = 1 << 14
)

func newDoubts(now func() time.Time) *doubts {
	return &doubts{now: now, known: make(map[doubtKey]doubt)}
}

// add withholds a build from a user; false: there are too many doubts already.
func (ds *doubts) add(b *index.Build, uid, owner uint32, why string, counts bool) bool {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	key := doubtKey{b.ID, uid}
	if _, again := ds.known[key]; !again && ds.full(owner) {
		ds.delete(func(_ doubtKey, d doubt) bool { return ds.now().After(d.until) })
		if ds.full(owner) {
			return false
		}
	}
	ds.known[key] = doubt{owner: owner, request: b.RequestKey, why: why, counts: counts, until: ds.now().Add(DoubtHolds)}
	ds.any.Store(int64(len(ds.known)))
	return true
}

// full reports whether there may be no other of an owner's. The caller holds mu.
func (ds *doubts) full(owner uint32) bool {
	own := 0
	for _, d := range ds.known {
		if d.owner == owner {
			own++
		}
	}
	return own >= doubtsPerUser || len(ds.known) >= maxDoubts
}

// delete is called with mu held.
func (ds *doubts) delete(which func(doubtKey, doubt) bool) {
	maps.DeleteFunc(ds.known, which)
	ds.any.Store(int64(len(ds.known)))
}

// holds says why the build is withheld from the user, "" if it is not.
func (ds *doubts) holds(id index.BuildID, uid uint32) string {
	if ds.any.Load() == 0 {
		return ""
	}
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d, ok := ds.known[doubtKey{id, uid}]
	if !ok || ds.now().After(d.until) {
		return ""
	}
	return d.why
}

func (ds *doubts) drop(id index.BuildID, uid uint32) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.delete(func(k doubtKey, _ doubt) bool { return k == doubtKey{id, uid} })
}

// answer ends the doubt of a user after the build was tried with that user's runtime. Others keep
// theirs, because they may have another runtime, but they no longer count towards the quorum.
func (ds *doubts) answer(id index.BuildID, uid uint32) {
	ds.drop(id, uid)
	ds.mu.Lock()
	defer ds.mu.Unlock()
	for k, d := range ds.known {
		if k.build == id {
			d.counts = false
			ds.known[k] = d
		}
	}
}

// settle ends all doubts about a build after a trial.
func (ds *doubts) settle(id index.BuildID) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.delete(func(k doubtKey, _ doubt) bool { return k.build == id })
}

// owners counts the distinct owners of doubts about the build that count.
func (ds *doubts) owners(id index.BuildID) int {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	distinct := make(map[uint32]bool)
	for k, d := range ds.known {
		if k.build == id && d.counts && !ds.now().After(d.until) {
			distinct[d.owner] = true
		}
	}
	return len(distinct)
}

// rounds counts the builds of the request that are withheld from the user.
func (ds *doubts) rounds(request index.RequestKey, uid uint32) int {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	n := 0
	for k, d := range ds.known {
		if k.uid == uid && d.request == request && !ds.now().After(d.until) {
			n++
		}
	}
	return n
}

// ErrDoubted refuses to compile for a request again what its user reported as often as that counts.
func ErrDoubted(model string, key index.RequestKey) error {
	return apierr.New(apierr.Stale, nil, "model %q: you reported that what is compiled here for this "+
		"request does not load, and it could not be verified", model).
		WithFact("request_key", key.String()).
		WithHint("load the model without epcached; what is compiled here is offered again after %s", DoubtHolds)
}
