// Package reports handles clients' reports of builds that did not load. It decides whether a build
// is withheld from the reporting user or from all users, and whether the client should retry or
// load the model itself.
//
// Start with Reports.Handle. The package neither stores nor loads builds: the caller examines a
// build, and functions in Options withhold, judge and rebuild it.
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
	Build      string // build key, from the answer
	Code       int32  // ONNX Runtime's error code
	Text       string
	ORTVersion string
	Graph      string // from the answer; identifies the copy that was loaded
}

// The decisions on reports.
const (
	DecidedRetry           = "retry"
	DecidedCompileYourself = "compile_yourself"
	DecidedSound           = "sound"
)

// WithheldFromYou is the state of a build that is withheld from this user only.
const WithheldFromYou = "withheld from you"

// Options are the dependencies of Reports.
type Options struct {
	Store    *store.Store
	Rules    func() *rules.Set
	Settings func() Settings
	// Owner returns the host's user that owns a container's user.
	Owner func(uid uint32) uint32
	// Find returns the builds that the names select and the peer may see.
	Find func(context.Context, rights.Peer, []string) ([]index.Build, error)
	// Rebuild queues a rebuild of the build.
	Rebuild func(b *index.Build, runtime, why string)
	Now     func() time.Time
	Log     *slog.Logger
}

// Settings may change while the daemon runs.
type Settings struct {
	Trusted []uint32 // reports of these users count without confirmation by others
	// Quorum is how many different users must report a build that cannot be checked before the
	// daemon withholds it from all.
	Quorum int
}

// Reports handles the reports of clients, and remembers which builds are withheld from which user.
// It is safe for concurrent use.
type Reports struct {
	o        Options
	doubts   *userWithholds
	limiter  rights.Limiter
	reported memo.Table[reportKey, string]
}

type reportKey struct {
	owner uint32
	build index.BuildID
}

// The rate limit of a user: a burst, because an update of an SDK may make many of an application's
// models stale at the same time, and then one report in each interval.
const (
	reportBurst    = 60
	reportInterval = 2 * time.Second
	maxReportText  = 4096
	maxReported    = 1 << 12 // number of last decisions that are remembered, by user and build
)

func New(o Options) *Reports {
	return &Reports{o: o, doubts: newUserWithholds(o.Now),
		limiter: rights.Limiter{Burst: reportBurst, Interval: reportInterval, Now: o.Now}}
}

// WhyWithheld returns why the build is withheld from the user, "" if it is not.
func (rs *Reports) WhyWithheld(id index.BuildID, uid uint32) string {
	return rs.doubts.reasonFor(id, uid)
}

// CountWithheld counts the builds of the request that are withheld from the user.
func (rs *Reports) CountWithheld(request index.RequestKey, uid uint32) int {
	return rs.doubts.countOfRequest(request, uid)
}

// TotalWithheld counts the builds that are withheld from single users.
func (rs *Reports) TotalWithheld() int64 { return rs.doubts.total.Load() }

// Verdict is the result of an examination.
type Verdict int

const (
	Unverified Verdict = iota // the examination had no result
	Loads
	DoesNotLoad  // it does not load, but other builds do
	DeviceAbsent // its device is not in this machine
	Unverifiable // it does not load here, but may on another device
	Damaged      // its bytes have changed
)

// Examined is the result of examining a reported build.
type Examined struct {
	Verdict   Verdict
	Text      string
	Level     string            // the only optimisation level at which it loads
	Runtime   string            // name of the runtime it was loaded with
	MadeForIt bool              // a compile now would have the same build key
	Record    func(text string) // records that the build does not load with Runtime
}

// Examine finds out whether a build is intact and loads.
type Examine func(context.Context, *index.Build) (Examined, error)

// Handle decides on a report. It does not trust the client, because one user must not be able to
// withhold shared builds from all. It examines the build. Until that has a result, and if it has
// none, the build is withheld from that user only, and from all only when enough users report the
// same.
func (rs *Reports) Handle(ctx context.Context, p rights.Peer, r Report,
	examine Examine) (*wire.ReportReply, error) {
	if len(r.Text) > maxReportText {
		r.Text = strings.ToValidUTF8(r.Text[:maxReportText], "")
	}
	owner := rs.o.Owner(p.UID)
	if wait, ok := rs.limiter.Allow(owner); !ok {
		return nil, apierr.New(apierr.Busy, nil, "too many reports").WithHint("the next one is "+
			"accepted in %s; load with plain ONNX Runtime until "+
			"then", wait.Round(time.Second)+time.Second)
	}
	b, err := rs.find(ctx, p, &r)
	if err != nil {
		return nil, err
	}
	rs.o.Store.Index().Counters.Add("reports", 1)
	class := rs.classify(b, &r)
	from := reporter{p.UID, owner}
	d, err := rs.decide(ctx, from, r.Graph, class, reportedBuild{b, examine})
	if err != nil {
		if ctx.Err() != nil {
			return nil, apierr.FromContext(ctx, "model %q", b.ModelName)
		}
		return nil, err
	}
	d.Text, d.Hint = wire.Valid(d.Text), wire.Valid(d.Hint)
	d.Class, d.State = class.Name, cmp.Or(d.State, rs.o.Store.Index().Journal.StateOf(b.ID).Name)
	rs.record(from, &r, b, d)
	return d, nil
}

// find returns the reported build, if it was served to the peer.
func (rs *Reports) find(ctx context.Context, p rights.Peer, r *Report) (*index.Build, error) {
	none := apierr.New(apierr.NotFound, nil, "build %.80q was never served to this "+
		"user", r.Build).WithHint("use the build's name from the answer to the request")
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
	b := builds[max(0, slices.IndexFunc(builds, func(b index.Build) bool {
		return rs.isCopy(&b, r.Graph)
	}))]
	return &b, nil
}

// isCopy reports whether the graph, if the report names one, is in the build's current view.
func (rs *Reports) isCopy(b *index.Build, graph string) bool {
	id, _, _ := strings.Cut(graph, "/")
	where, ok := rs.o.Store.Index().Views.Get(b.ID[:])
	return graph == "" || ok && strings.HasSuffix(string(where), "/"+id)
}

// classify returns the error's class from the rules for the first of the build's execution
// providers that has one.
func (rs *Reports) classify(b *index.Build, r *Report) rules.Class {
	var class rules.Class
	for i := range b.EPs {
		if one := rs.o.Rules().Classify(b.EPs[i].Name, int(r.Code), r.Text); i == 0 ||
			class.Name == rules.Unclear {
			class = one
		}
	}
	return class
}

// reporter is the user that sent a report.
type reporter struct {
	uid, owner uint32
}

// reportedBuild is a reported build with the function that examines it.
type reportedBuild struct {
	*index.Build
	examine Examine
}

// decide takes all steps of a report. It fails only if the context ends or the store fails.
func (rs *Reports) decide(ctx context.Context, from reporter, graph string, class rules.Class,
	x reportedBuild) (*wire.ReportReply, error) {
	b := x.Build
	if state := rs.o.Store.Index().Journal.StateOf(b.ID); state.Name != index.Current {
		return retryReply("it is %s already: %s", state.Name, state.Reason), nil
	}
	if !rs.isCopy(b, graph) {
		return retryReply("the copy that you loaded was replaced"), nil
	}
	if view, err := rs.o.Store.View(ctx, b, store.Phases{Phase: func(string) {}}); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return retryReply("%s", rs.o.Store.WithholdDamaged(ctx, b, err)), nil
	} else if graph != "" && !strings.HasPrefix(graph, view.ID()+"/") {
		return retryReply(
			"a file of the copy that you loaded was changed or missing; there is a new one"), nil
	}
	if class.Name == rules.NotStale {
		return soundReply(class.Reason, class.Hint), nil
	}
	ds := rs.doubts
	again := ds.reasonFor(b.ID, from.uid) != ""
	if !again && !ds.add(b, from.uid, from.owner, "you reported that it does not load, and the "+
		"report is being checked", false) {
		return nil, apierr.New(apierr.Busy, nil, "too many reports that could not be verified").
			WithHint("load with plain ONNX Runtime")
	}
	found, err := x.examine(ctx, b)
	if err != nil {
		if !again {
			ds.drop(b.ID, from.uid)
		}
		return nil, err
	}
	return rs.applyDecision(from, b, class, found), nil
}

// applyDecision acts on the result of an examination.
func (rs *Reports) applyDecision(from reporter, b *index.Build, class rules.Class,
	x Examined) *wire.ReportReply {
	ds := rs.doubts
	switch x.Verdict {
	case Damaged:
		ds.endForAll(b.ID)
		// Otherwise reading the disk failed, which may be temporary.
		if rs.o.Store.Index().Journal.StateOf(b.ID).Name == index.Damaged {
			rs.o.Store.Index().Counters.Add("reports_confirmed", 1)
			rs.o.Rebuild(b, "", x.Text)
		}
		return retryReply("%s", x.Text)
	case Loads:
		ds.endForUser(b.ID, from.uid)
		d := soundReply("its bytes are intact, and "+x.Text, "")
		if class.Hint != "" {
			d.Hint += "; " + class.Hint
		}
		if x.Level == "disable_all" && b.GraphOptimizationLevel != x.Level {
			d.Hint = "it loads only with graph optimization disabled (ORT_DISABLE_ALL)"
		}
		return d
	case DoesNotLoad:
		ds.endForUser(b.ID, from.uid)
		rs.o.Store.Index().Counters.Add("reports_confirmed", 1)
		rs.withdraw(b, x)
		return retryReply("%s", x.Text)
	case DeviceAbsent:
		ds.drop(b.ID, from.uid)
		return &wire.ReportReply{Decision: DecidedCompileYourself,
			Text: x.Text + "; the build is sound",
			Hint: "load the source model with an execution provider of this machine"}
	}
	return rs.withholdFrom(from, b, x)
}

// withdraw withholds a build that does not load: from all users if it was made for exactly these
// libraries, otherwise only with these libraries.
func (rs *Reports) withdraw(b *index.Build, x Examined) {
	if x.MadeForIt {
		rs.doubts.endForAll(b.ID)
		_ = rs.o.Store.Withhold(b.ID, index.Withheld, "reported, and "+x.Text)
	} else {
		x.Record(x.Text)
	}
	rs.o.Rebuild(b, x.Runtime, "reported, and "+x.Text)
}

// withholdFrom withholds a build that could not be checked from the reporter, and from all users if
// enough of them have reported it.
func (rs *Reports) withholdFrom(from reporter, b *index.Build, x Examined) *wire.ReportReply {
	ds := rs.doubts
	counts := x.Verdict == Unverified && b.Scope == "shared" // counts towards the quorum
	why := "you reported that it does not load; " + x.Text
	ds.add(b, from.uid, from.owner, why, counts) // the entry exists already, so the limit is kept
	trusted := counts && slices.Contains(rs.o.Settings().Trusted, from.uid)
	if n := ds.owners(b.ID); counts && (trusted || n >= rs.o.Settings().Quorum) {
		reason := fmt.Sprintf("%d users reported that it does not load; %s", n, x.Text)
		if trusted {
			reason = "a trusted user reported that it does not load; " + x.Text
		}
		ds.endForAll(b.ID)
		_ = rs.o.Store.Withhold(b.ID, index.Withheld, reason)
		rs.o.Rebuild(b, "", reason)
		return retryReply("%s", reason)
	}
	d := &wire.ReportReply{Decision: DecidedRetry, Text: x.Text, State: WithheldFromYou,
		Hint: "retry: the daemon compiles another build for this user"}
	switch {
	case ds.countOfRequest(b.RequestKey, from.uid) >= MaxRounds:
		d.Decision = DecidedCompileYourself
		d.Hint = fmt.Sprintf("two builds did not load for this user: load the model without "+
			"epcached, which serves a build again after %s", WithholdTime)
	case b.Put && b.UID == from.uid:
		// The daemon has no other build, and compiling again would make the same one.
		d.Decision = DecidedCompileYourself
		d.Hint = "your own libraries compiled it: load the model without epcached; the next " +
			"session may recompile it"
	}
	return d
}

// MaxRounds is how often a user gets another build for the same request after a report that cannot
// be checked.
const MaxRounds = 2

func retryReply(format string, args ...any) *wire.ReportReply {
	return &wire.ReportReply{Decision: DecidedRetry, Text: fmt.Sprintf(format, args...),
		Hint: "ask again"}
}

func soundReply(text, hint string) *wire.ReportReply {
	return &wire.ReportReply{Decision: DecidedSound, Text: text,
		Hint: cmp.Or(hint, "the build is sound: use the provider options, session options and "+
			"optimization level of the answer")}
}

// record writes the decision to the log and the history, unless it repeats the last one for this
// user: because many reports must not displace other events. The client's text is only logged,
// because it may contain paths.
func (rs *Reports) record(from reporter, r *Report, b *index.Build, d *wire.ReportReply) {
	outcome := d.Decision + ": " + d.Text
	key := reportKey{from.owner, b.ID}
	if last, _ := rs.reported.Load(key); last == outcome {
		return
	}
	rs.reported.Save(key, outcome, maxReported)
	rs.o.Log.Info("report", "build", b.BuildKey.String(), "uid", from.uid, "code", r.Code, "text",
		identity.Truncated(r.Text), "decision", d.Decision, "found", d.Text)
	rs.o.Store.RecordEvent(event.Of(b, event.Report, "%s: %s: %s", compilers.CodeName(int(r.Code)),
		d.Decision, d.Text))
}

// userWithholds has the builds that are withheld from single users who reported that they do not
// load. It is in memory only: after a restart such a build is served again, and the user may report
// it again.
type userWithholds struct {
	now   func() time.Time
	total atomic.Int64 // number of entries; while it is 0, a hit takes no lock
	mu    sync.Mutex
	known map[withholdKey]userWithhold // guarded by mu
}

type withholdKey struct {
	build index.BuildID
	uid   uint32
}

type userWithhold struct {
	owner   uint32
	request index.RequestKey
	why     string
	counts  bool // counts towards the quorum
	until   time.Time
}

const (
	WithholdTime     = 24 * time.Hour
	withholdsPerUser = 256
	maxWithholds     = 1 << 14
)

func newUserWithholds(now func() time.Time) *userWithholds {
	return &userWithholds{now: now, known: make(map[withholdKey]userWithhold)}
}

// add withholds a build from a user. It reports false if the user has too many entries.
func (ds *userWithholds) add(b *index.Build, uid, owner uint32, why string, counts bool) bool {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	key := withholdKey{b.ID, uid}
	if _, again := ds.known[key]; !again && ds.atLimit(owner) {
		ds.delete(func(_ withholdKey, d userWithhold) bool { return ds.now().After(d.until) })
		if ds.atLimit(owner) {
			return false
		}
	}
	ds.known[key] = userWithhold{owner: owner, request: b.RequestKey, why: why, counts: counts,
		until: ds.now().Add(WithholdTime)}
	ds.total.Store(int64(len(ds.known)))
	return true
}

// atLimit reports whether the owner or the table has no space for another entry. The caller holds
// mu.
func (ds *userWithholds) atLimit(owner uint32) bool {
	own := 0
	for _, d := range ds.known {
		if d.owner == owner {
			own++
		}
	}
	return own >= withholdsPerUser || len(ds.known) >= maxWithholds
}

// delete removes the entries that which selects. The caller holds mu.
func (ds *userWithholds) delete(which func(withholdKey, userWithhold) bool) {
	maps.DeleteFunc(ds.known, which)
	ds.total.Store(int64(len(ds.known)))
}

// reasonFor returns why the build is withheld from the user, "" if it is not.
func (ds *userWithholds) reasonFor(id index.BuildID, uid uint32) string {
	if ds.total.Load() == 0 {
		return ""
	}
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d, ok := ds.known[withholdKey{id, uid}]
	if !ok || ds.now().After(d.until) {
		return ""
	}
	return d.why
}

func (ds *userWithholds) drop(id index.BuildID, uid uint32) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.delete(func(k withholdKey, _ userWithhold) bool { return k == withholdKey{id, uid} })
}

// endForUser removes a user's entry after the build was checked with that user's runtime. Entries
// of other users remain, because these may have another runtime, but no longer count towards the
// quorum.
func (ds *userWithholds) endForUser(id index.BuildID, uid uint32) {
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

// endForAll removes all entries of a build after it was checked.
func (ds *userWithholds) endForAll(id index.BuildID) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.delete(func(k withholdKey, _ userWithhold) bool { return k.build == id })
}

// owners counts the different users with reports of the build that count towards the quorum.
func (ds *userWithholds) owners(id index.BuildID) int {
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

// countOfRequest counts the builds of the request that are withheld from the user.
func (ds *userWithholds) countOfRequest(request index.RequestKey, uid uint32) int {
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

// ErrWithheld returns the error that refuses another compile to a user that has reported MaxRounds
// builds of the request.
func ErrWithheld(model string, key index.RequestKey) error {
	return apierr.New(apierr.Stale, nil, "model %q: you reported that its builds do not load, "+
		"which could not be verified", model).
		WithFact("request_key", key.String()).
		WithHint("load the model without epcached, which serves a build again after "+
			"%s", WithholdTime)
}
