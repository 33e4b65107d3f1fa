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
	"github.com/epcached/epcached/internal/keyed"
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
	Store *store.Store
	Rules func() *rules.Set
	// Owner returns the host's user that owns a container's user.
	Owner func(uid uint32) uint32
	// Find returns the builds that the names select and the peer may see.
	Find func(context.Context, rights.Peer, []string) ([]index.Build, error)
	// Rebuild queues a rebuild of the build.
	Rebuild func(b *index.Build, runtime, why string)
	// RunLater runs a function in the background until the daemon ends.
	RunLater func(func(context.Context))
	Now      func() time.Time
	Log      *slog.Logger
}

// Reports handles the reports of clients, and remembers which builds are withheld from which user.
// It is safe for concurrent use.
type Reports struct {
	o        Options
	doubts   *userWithholds
	deciding keyed.Group[*wire.ReportReply] // by build and user
	reported memo.Table[reportKey, string]
}

type reportKey struct {
	owner uint32
	build index.BuildID
}

const (
	maxReportText = 4096
	maxReason     = 1 << 10 // bytes of the reason that is kept
	maxReported   = 1 << 12 // number of last decisions that are remembered, by user and build
)

// New returns a handler of reports that knows which builds an earlier daemon withheld from users.
func New(o Options) *Reports {
	var book memo.Book
	if o.Store != nil {
		book = &o.Store.Index().Memos
	}
	return &Reports{o: o, doubts: newUserWithholds(o.Now, book)}
}

// WhyWithheld returns why the build is withheld from the user, "" if it is not.
func (rs *Reports) WhyWithheld(id index.BuildID, uid uint32) string {
	why, _ := rs.doubts.reasonFor(id, uid)
	return why
}

// TotalWithheld counts the builds that are withheld from single users.
func (rs *Reports) TotalWithheld() int64 { return rs.doubts.total.Load() }

// Verdict is the result of an examination.
type Verdict int

const (
	Unverified Verdict = iota // it cannot be tested here, or the examination had no result
	Loads
	DoesNotLoad  // it does not load, but other builds do
	DeviceAbsent // its device is not in this machine
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
// withhold shared builds from all, and because the text of an error proves nothing about a build.
// It examines the build. Until that has a result, and if it has none, the build is withheld from
// that user only.
func (rs *Reports) Handle(ctx context.Context, p rights.Peer, r Report,
	examine Examine) (*wire.ReportReply, error) {
	if len(r.Text) > maxReportText {
		r.Text = strings.ToValidUTF8(r.Text[:maxReportText], "")
	}
	b, err := rs.find(ctx, p, &r)
	if err != nil {
		return nil, err
	}
	rs.o.Store.Index().Counters.Add("reports", 1)
	// A report is decided also if its client does not wait for that long, because its next start
	// would load the build again otherwise.
	d, err := rs.deciding.Do(ctx, rs.o.RunLater, fmt.Sprint(b.ID, p.UID),
		func(ctx context.Context) (*wire.ReportReply, error) {
			class := rs.classify(b, &r)
			from := reporter{p.UID, rs.o.Owner(p.UID)}
			d, err := rs.decide(ctx, from, r.Graph, class, reportedBuild{b, examine})
			if err != nil {
				return nil, err
			}
			d.Text, d.Hint, d.Class = wire.Valid(d.Text), wire.Valid(d.Hint), class.Name
			d.State = cmp.Or(d.State, rs.o.Store.Index().Journal.StateOf(b.ID).Name)
			rs.record(from, &r, b, d)
			return d, nil
		})
	if err != nil && ctx.Err() != nil {
		return nil, apierr.FromContext(ctx, "model %q", b.ModelName)
	}
	return d, err
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
	ds := rs.doubts
	if why, decided := ds.reasonFor(b.ID, from.uid); decided {
		// not checked again, so that repeated reports of a user cost nothing
		return &wire.ReportReply{Decision: DecidedCompileYourself, Text: why,
			State: WithheldFromYou, Hint: "load the model without epcached"}, nil
	}
	if !ds.add(b, from.uid, from.owner, "you reported that it does not load, and the report is "+
		"being checked", time.Time{}) {
		return nil, apierr.New(apierr.Busy, nil, "too many reports that could not be verified").
			WithHint("load with plain ONNX Runtime")
	}
	defer ds.dropUndecided(b.ID, from.uid)
	if view, err := rs.o.Store.View(ctx, b, store.Phases{Phase: func(string) {}}); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return retryReply("%s", rs.o.Store.WithholdDamaged(ctx, b, err)), nil
	} else if graph != "" && !strings.HasPrefix(graph, view.ID()+"/") {
		return retryReply(
			"a file of the copy that you loaded was changed or missing; there is a new one"), nil
	}
	found, err := x.examine(ctx, b)
	if err != nil {
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
		d := soundReply("its bytes are intact, and "+x.Text, "")
		if class.Hint != "" {
			d.Hint += "; " + class.Hint
		}
		if x.Level == "disable_all" && b.GraphOptimizationLevel != x.Level {
			d.Hint = "it loads only with graph optimization disabled (ORT_DISABLE_ALL)"
		}
		return d
	case DoesNotLoad:
		rs.o.Store.Index().Counters.Add("reports_confirmed", 1)
		rs.withdraw(b, x)
		return retryReply("%s", x.Text)
	case DeviceAbsent:
		return &wire.ReportReply{Decision: DecidedCompileYourself,
			Text: x.Text + "; its bytes are intact",
			Hint: "load the source model with an execution provider of this machine"}
	}
	return rs.withholdFrom(from, b, class, x)
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

// withholdFrom withholds a build that could not be checked from the reporter. The next compile for
// the same libraries would make an equal build, so that only one of other libraries is replaced.
func (rs *Reports) withholdFrom(from reporter, b *index.Build, class rules.Class,
	x Examined) *wire.ReportReply {
	// The entry exists already, so the limit is kept.
	why := fmt.Sprintf("you reported that it does not load (%s); %s", class.Reason, x.Text)
	why = strings.ToValidUTF8(why[:min(len(why), maxReason)], "")
	rs.doubts.add(b, from.uid, from.owner, why, rs.o.Now().Add(WithholdTime))
	d := &wire.ReportReply{Decision: DecidedRetry, Text: x.Text, State: WithheldFromYou,
		Hint: "retry: the daemon compiles another build"}
	if x.MadeForIt || b.Put && b.UID == from.uid {
		d.Decision = DecidedCompileYourself
		d.Hint = fmt.Sprintf("load the model without epcached: equal libraries would compile an "+
			"equal build, and this one is served to you again after %s", WithholdTime)
	}
	if class.Hint != "" {
		d.Hint += "; " + class.Hint
	}
	return d
}

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
// load. Entries of reports that were decided are kept over restarts.
type userWithholds struct {
	now   func() time.Time
	book  memo.Book    // nil: nothing is kept
	total atomic.Int64 // number of entries; while it is 0, a hit takes no lock
	mu    sync.Mutex
	known map[withholdKey]userWithhold // guarded by mu
}

type withholdKey struct {
	build index.BuildID
	uid   uint32
}

type userWithhold struct {
	Build index.BuildID
	UID   uint32
	Owner uint32
	Why   string
	Until time.Time // zero: the report is being checked
}

const (
	WithholdTime     = 24 * time.Hour
	withholdsPerUser = 256
	maxWithholds     = 1 << 12 // bounds the memo that is written for each decision
)

const withholdsMemo = "withheld from users"

func newUserWithholds(now func() time.Time, book memo.Book) *userWithholds {
	ds := &userWithholds{now: now, book: book, known: make(map[withholdKey]userWithhold)}
	if book != nil {
		kept, _ := memo.Recall[[]userWithhold](book, withholdsMemo)
		for _, d := range kept {
			ds.known[withholdKey{d.Build, d.UID}] = d
		}
	}
	ds.total.Store(int64(len(ds.known)))
	return ds
}

// add withholds a build from a user, until a time or while the report is being checked. It reports
// false if the user has too many entries.
func (ds *userWithholds) add(b *index.Build, uid, owner uint32, why string,
	until time.Time) bool {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	key := withholdKey{b.ID, uid}
	if _, again := ds.known[key]; !again && ds.atLimit(owner) {
		ds.delete(func(_ withholdKey, d userWithhold) bool { return ds.isOver(d) })
		if ds.atLimit(owner) {
			return false
		}
	}
	ds.known[key] = userWithhold{b.ID, uid, owner, why, until}
	ds.total.Store(int64(len(ds.known)))
	if !until.IsZero() {
		ds.save()
	}
	return true
}

func (ds *userWithholds) isOver(d userWithhold) bool {
	return !d.Until.IsZero() && ds.now().After(d.Until)
}

// atLimit reports whether the owner or the table has no space for another entry. The caller holds
// mu.
func (ds *userWithholds) atLimit(owner uint32) bool {
	own := 0
	for _, d := range ds.known {
		if d.Owner == owner {
			own++
		}
	}
	return own >= withholdsPerUser || len(ds.known) >= maxWithholds
}

// delete removes the entries that which selects. The caller holds mu.
func (ds *userWithholds) delete(which func(withholdKey, userWithhold) bool) {
	decided := false
	maps.DeleteFunc(ds.known, func(k withholdKey, d userWithhold) bool {
		gone := which(k, d)
		decided = decided || gone && !d.Until.IsZero()
		return gone
	})
	ds.total.Store(int64(len(ds.known)))
	if decided {
		ds.save()
	}
}

// save keeps the entries of decided reports. The caller holds mu.
func (ds *userWithholds) save() {
	if ds.book == nil {
		return
	}
	decided := slices.DeleteFunc(slices.Collect(maps.Values(ds.known)),
		func(d userWithhold) bool { return d.Until.IsZero() })
	// Best effort: without it, the builds are reported again after a restart.
	_ = memo.Save(ds.book, withholdsMemo, decided)
}

// reasonFor returns why the build is withheld from the user, "" if it is not, and whether the
// report is decided.
func (ds *userWithholds) reasonFor(id index.BuildID, uid uint32) (why string, decided bool) {
	if ds.total.Load() == 0 {
		return "", false
	}
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d, ok := ds.known[withholdKey{id, uid}]
	if !ok || ds.isOver(d) {
		return "", false
	}
	return d.Why, !d.Until.IsZero()
}

// dropUndecided removes the entry of a report whose check ended without withholding the build.
func (ds *userWithholds) dropUndecided(id index.BuildID, uid uint32) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.delete(func(k withholdKey, d userWithhold) bool {
		return k == withholdKey{id, uid} && d.Until.IsZero()
	})
}

// endForAll removes all entries of a build after it was checked.
func (ds *userWithholds) endForAll(id index.BuildID) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.delete(func(k withholdKey, _ userWithhold) bool { return k.build == id })
}

// ErrWithheld returns the error that refuses a compile to a user who reported the build that the
// compile would make again. why says what was found.
func ErrWithheld(model string, key index.RequestKey, why string) error {
	const text = "model %q: its build is withheld from you: %s"
	return apierr.New(apierr.Stale, nil, text, model, why).
		WithFact("request_key", key.String()).
		WithHint("load the model without epcached, which serves a build again after "+
			"%s", WithholdTime)
}
