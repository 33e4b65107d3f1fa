package cache

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/unixsock/wire"
)

// Report says that ONNX Runtime refused a build.
type Report struct {
	Build      string // build key, as the answer gave it
	Code       int32  // ONNX Runtime's error code
	Text       string
	ORTVersion string
	Graph      string // as the answer gave it: tells which copy was loaded
	Runtime    RuntimeRef
}

// The decisions on reports.
const (
	DecidedRetry           = "retry"
	DecidedCompileYourself = "compile_yourself"
	DecidedSound           = "sound"
)

// withheldFromYou is the state of a build that others still get.
const withheldFromYou = "withheld from you"

// reports is what is remembered of reports.
type reports struct {
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

func newReports(now func() time.Time) *reports {
	return &reports{doubts: newDoubts(now), limiter: rights.Limiter{Burst: reportBurst, Interval: reportInterval, Now: now}}
}

// Report looks into what a client says of a build. The client is not simply believed: one user must not be able to
// empty what all share. The build's bytes are hashed, and it is loaded in a process of its own; meanwhile, and where
// nothing can be found out, it is withheld from that user alone, and from all only when enough others say the same.
func (c *Cache) Report(ctx context.Context, p Peer, r Report) (*wire.ReportReply, error) {
	if len(r.Text) > maxReportText {
		r.Text = strings.ToValidUTF8(r.Text[:maxReportText], "")
	}
	owner := c.owners.Of(p.UID)
	if wait, ok := c.reports.limiter.Take(owner); !ok {
		return nil, apierr.New(apierr.Busy, nil, "too many reports").WithHint("the next one is looked into in %s; load with plain ONNX Runtime until then", wait.Round(time.Second)+time.Second)
	}
	b, err := c.reported(ctx, p, &r)
	if err != nil {
		return nil, err
	}
	c.index.Counters.Add("reports", 1)
	class := c.classify(b, &r)
	d, err := c.decide(ctx, p, owner, &r, b, class)
	if err != nil {
		if ctx.Err() != nil {
			return nil, contextError(ctx, b.ModelName)
		}
		return nil, err
	}
	d.Text, d.Hint = wire.Valid(d.Text), wire.Valid(d.Hint)
	d.Class, d.State = class.Name, cmp.Or(d.State, c.index.Journal.StateOf(b.ID).Name)
	c.tellReport(p, owner, &r, b, d)
	return d, nil
}

// reported finds the build among those that the peer was given.
func (c *Cache) reported(ctx context.Context, p Peer, r *Report) (*index.Build, error) {
	none := apierr.New(apierr.NotFound, nil, "build %.80q is none that you were given", r.Build).WithHint("name it as the answer to the request did")
	if _, err := index.ParseBuildKey(r.Build); err != nil {
		return nil, none
	}
	builds, err := c.query.Find(ctx, p, []string{r.Build})
	if apierr.ClassOf(err) == apierr.NotFound && err != nil {
		return nil, none
	}
	if err != nil {
		return nil, err
	}
	b := builds[max(0, slices.IndexFunc(builds, func(b index.Build) bool { return c.isCopy(&b, r.Graph) }))]
	return &b, nil
}

// isCopy tells whether the graph is in the build's present view. Who does not say is taken to mean that.
func (c *Cache) isCopy(b *index.Build, graph string) bool {
	id, _, _ := strings.Cut(graph, "/")
	where, ok := c.index.Views.Get(b.ID[:])
	return graph == "" || ok && strings.HasSuffix(string(where), "/"+id)
}

// classify takes the first of the build's execution providers of which the rules know something.
func (c *Cache) classify(b *index.Build, r *Report) rules.Class {
	var class rules.Class
	for i := range b.EPs {
		if one := c.rules().Classify(b.EPs[i].Name, int(r.Code), r.Text); i == 0 || class.Name == rules.Unclear {
			class = one
		}
	}
	return class
}

// decide is the whole way of a report. An error is the context's, or the store's.
func (c *Cache) decide(ctx context.Context, p Peer, owner uint32, r *Report, b *index.Build,
	class rules.Class) (*wire.ReportReply, error) {
	if state := c.index.Journal.StateOf(b.ID); state.Name != index.Current {
		return retry("it is %s already: %s", state.Name, state.Reason), nil
	}
	if !c.isCopy(b, r.Graph) {
		return retry("the copy that you loaded has been replaced since"), nil
	}
	if v, err := c.viewOf(ctx, b, func(string) {}); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return retry("%s", c.store.WithholdDamaged(ctx, b, err)), nil
	} else if r.Graph != "" && !strings.HasPrefix(r.Graph, v.ID()+"/") {
		return retry("a file of the copy that you loaded was changed or missing; there is a new one"), nil
	}
	if class.Name == rules.NotStale {
		return sound(class.Reason, class.Hint), nil
	}
	ds := c.reports.doubts
	again := ds.holds(b.ID, p.UID) != ""
	if !again && !ds.add(b, p.UID, owner, "you reported that it does not load, and it is being looked into", false) {
		return nil, apierr.New(apierr.Busy, nil, "too many reports that could not be verified").WithHint("load with plain ONNX Runtime")
	}
	found, err := c.examine(ctx, p, r, b)
	if err != nil {
		if !again {
			ds.drop(b.ID, p.UID)
		}
		return nil, err
	}
	return c.conclude(p, owner, b, class, found), nil
}

// conclude does what follows from an examination.
func (c *Cache) conclude(p Peer, owner uint32, b *index.Build, class rules.Class,
	x examined) *wire.ReportReply {
	ds := c.reports.doubts
	switch x.verdict {
	case damagedNow:
		ds.settle(b.ID)
		if c.index.Journal.StateOf(b.ID).Name == index.Damaged { // else the disk could not be read, which may pass
			c.index.Counters.Add("reports_confirmed", 1)
			c.wantAnew(b, "", x.text, nil)
		}
		return retry("%s", x.text)
	case loads:
		ds.answer(b.ID, p.UID)
		d := sound("its bytes are what was compiled, and "+x.text, "")
		if class.Hint != "" && !strings.HasPrefix(class.Hint, "ask again") {
			d.Hint += "; " + class.Hint
		}
		if x.level == "disable_all" && b.GraphOptimizationLevel != x.level {
			d.Hint = "it loads with graph optimisation disabled only (ORT_DISABLE_ALL)"
		}
		return d
	case refuted:
		ds.answer(b.ID, p.UID)
		c.index.Counters.Add("reports_confirmed", 1)
		c.refute(b, x)
		return retry("%s", x.text)
	case elsewhere:
		ds.drop(b.ID, p.UID)
		return &wire.ReportReply{Decision: DecidedCompileYourself,
			Text: x.text + "; nothing is wrong with the build",
			Hint: "load the model itself, with what this machine has"}
	}
	return c.withholdFrom(p, owner, b, x)
}

// refute takes a build that does not load out of service: for all if it was made for just these libraries, else for
// them alone.
func (c *Cache) refute(b *index.Build, x examined) {
	if x.exactly {
		c.reports.doubts.settle(b.ID)
		c.store.Withhold(b.ID, index.Withheld, "reported, and "+x.text)
	} else {
		c.disprove(x.against, b, x.text)
	}
	c.wantAnew(b, x.against.runtime, "reported, and "+x.text, nil)
}

// withholdFrom withholds from the reporter what could not be verified, and from all if enough say the same.
func (c *Cache) withholdFrom(p Peer, owner uint32, b *index.Build, x examined) *wire.ReportReply {
	ds := c.reports.doubts
	counts := x.verdict == unverified && b.Scope == "shared" // without the device at hand, nobody here can tell
	why := "you reported that it does not load; " + x.text
	ds.add(b, p.UID, owner, why, counts) // it is there already, so there is room
	trusted := counts && slices.Contains(c.settings.Load().trustedReporters, p.UID)
	if n := ds.owners(b.ID); counts && (trusted || n >= c.settings.Load().reportQuorum) {
		reason := fmt.Sprintf("%d users reported that it does not load; %s", n, x.text)
		if trusted {
			reason = "a trusted user reported that it does not load; " + x.text
		}
		ds.settle(b.ID)
		c.store.Withhold(b.ID, index.Withheld, reason)
		c.wantAnew(b, "", reason, nil)
		return retry("%s", reason)
	}
	d := &wire.ReportReply{Decision: DecidedRetry, Text: x.text, State: withheldFromYou,
		Hint: "ask again: one of your own is compiled, and others keep this one"}
	switch {
	case ds.rounds(b.RequestKey, p.UID) >= maxRounds:
		d.Decision = DecidedCompileYourself
		d.Hint = fmt.Sprintf("what is compiled here does not load for you, twice: load the model itself; epcached offers it again after %s", doubtHolds)
	case b.Put && b.UID == p.UID: // there is no other to be had from here, and the same compile a moment later makes the same
		d.Decision = DecidedCompileYourself
		d.Hint = "it is one of your own, made with your libraries: load the model itself; the next session may compile it once more"
	}
	return d
}

// maxRounds is how often a user's report that cannot be verified brings that user another build for the same request.
const maxRounds = 2

func retry(format string, args ...any) *wire.ReportReply {
	return &wire.ReportReply{Decision: DecidedRetry, Text: fmt.Sprintf(format, args...),
		Hint: "ask again"}
}

func sound(text, hint string) *wire.ReportReply {
	return &wire.ReportReply{Decision: DecidedSound, Text: text,
		Hint: cmp.Or(hint, "the artefact is sound; look at your session's options: provider options, session options and optimisation level have to be those of the answer")}
}

// disprove remembers that a build of another library does not load with the runtime, whatever judgements said.
func (c *Cache) disprove(a *against, b *index.Build, text string) {
	j := Judgement{Verdict: compilers.Unsupported, Source: sourceLoadCheck, Reason: text, At: c.now(), Runtime: a.runtime, firm: true}
	notesOn(a.rc).verdicts.save(b.ID, j, c.settings.Load().judging)
	c.happened(event.Of(b, event.Judged, "%s for %s: %s", j.Verdict, a.runtime, text))
	if err := memo.Save(&c.index.Memos, c.disprovedKey(a, b), j); err != nil {
		c.log.Warn("judgement not kept", "build", b.BuildKey.String(), "error", err) // it is reported again after a restart
	}
}

// disproved gives the judgement that a report brought about.
func (c *Cache) disproved(a *against, b *index.Build) (j Judgement, ok bool) {
	j, ok = memo.Recall[Judgement](&c.index.Memos, c.disprovedKey(a, b))
	j.firm = ok
	return j, ok
}

func (c *Cache) disprovedKey(a *against, b *index.Build) string {
	return "disproved:" + c.runtimes.Key("report", a.rc, b.ID[:])
}

// tellReport writes down what came of a report, unless that is what came of this user's last one: a flood of reports
// must not wash away what else is known. The client's own words are for the log: they may hold paths.
func (c *Cache) tellReport(p Peer, owner uint32, r *Report, b *index.Build, d *wire.ReportReply) {
	outcome := d.Decision + ": " + d.Text
	key := toldKey{owner, b.ID}
	if last, _ := c.reports.told.Load(key); last == outcome {
		return
	}
	c.reports.told.Save(key, outcome, maxReported)
	c.log.Info("report", "build", b.BuildKey.String(), "uid", p.UID, "code", r.Code, "text", identity.Shortened(r.Text), "decision", d.Decision, "found", d.Text)
	c.happened(event.Of(b, event.Report, "%s: %s: %s", compilers.CodeName(int(r.Code)), d.Decision, d.Text))
}

// errDoubted refuses to compile once more what its user says does not load.
func errDoubted(at *attempt) error {
	return apierr.New(apierr.Stale, nil, "model %q: you reported that what is compiled here for this request does not load, and it could not be verified", at.Name).
		WithFact("request_key", at.plan.requestKey.String()).
		WithHint("load the model without epcached; what is compiled here is offered again after %s", doubtHolds)
}
