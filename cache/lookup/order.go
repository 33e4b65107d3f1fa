package lookup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/packing"
)

// Candidate is a build that a look-up considers, with its judgement.
type Candidate struct {
	Build     *index.Build
	Judgement judge.Judgement // how it suits the runtime
	// a group's build that is refused only because the request is for one of its models
	Together bool
	Refused  string // why it is not served, "" if it may be
	withheld bool   // withheld for every runtime, so it was not judged
	notTried error  // why it could not be judged, nil if it was
}

// Builds iterates over builds in the order of reading.
type Builds = iter.Seq2[*index.Build, error]

// StoredBuilds iterates over the stored builds of the plan's request, scope by scope, in each the
// newest first.
func (l *Lookup) StoredBuilds(p *request.Plan, scopes []string) Builds {
	return func(yield func(*index.Build, error) bool) {
		for _, b := range p.Fitting {
			if !yield(b, nil) {
				return
			}
		}
		for _, scope := range scopes {
			builds, err := l.o.Store.Index().Lookup(p.RequestKey, scope)
			if err != nil {
				yield(nil, apierr.New(apierr.Internal, err, "look-up of %s", p.RequestKey))
				return
			}
			for i := range builds {
				if !yield(&builds[i], nil) {
					return
				}
			}
		}
	}
}

// inOrder iterates over the builds in the order in which both a look-up and its explanation
// consider them. First come builds with the plan's own build key, and withheld ones, in the order
// of reading; then the others, best first. The others are judged only then, so that a hit does not
// wait for judgements.
func (l *Lookup) inOrder(ctx context.Context, at *request.Attempt,
	builds Builds) iter.Seq2[Candidate, error] {
	return func(yield func(Candidate, error) bool) {
		offer := func(one Candidate) bool {
			if one.Refused == "" {
				var err error
				if one.Refused, err = l.whyNotAlone(ctx, at, &one); err != nil {
					return yield(Candidate{}, err)
				}
				one.Together = one.Refused != ""
			}
			return yield(one, nil)
		}
		var others []*index.Build
		for b, err := range builds {
			if err != nil {
				yield(Candidate{}, err)
				return
			}
			one := Candidate{Build: b, Refused: l.WhyWithheld(at, b)}
			switch {
			case one.Refused != "":
				one.withheld = true
			case at.Plan.MadeExactly(b):
				one.Judgement = at.Plan.OwnJudgement(b, at.RuntimeName)
			case at.Plan.Outside:
				one.Refused = "compiled with other libraries, another ONNX Runtime or on " +
					"another machine: only a load with your libraries can show whether it fits"
			default:
				others = append(others, b)
				continue
			}
			if !offer(one) {
				return
			}
		}
		if len(others) == 0 {
			return
		}
		ranked, err := l.rank(ctx, at.JudgeTarget(), others, at.Phase)
		if err != nil {
			yield(Candidate{}, request.WorkerError(err, "model %q", at.Name))
			return
		}
		for _, one := range ranked {
			one.Refused = l.whyRefused(at, one.Judgement)
			if !offer(one) {
				return
			}
		}
	}
}

// Ranked returns the builds in the order in which a look-up considers them.
func (l *Lookup) Ranked(ctx context.Context, at *request.Attempt, builds Builds) (out []Candidate,
	err error) {
	for one, err := range l.inOrder(ctx, at.WithPhase(func(string) {}), builds) {
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

// rank judges builds and sorts them, best first, and newest first among equals. A build that cannot
// be judged, because its files are damaged or its load check does not end, is unknown.
func (l *Lookup) rank(ctx context.Context, a *request.JudgeTarget, builds []*index.Build,
	phase func(string)) (out []Candidate, err error) {
	for _, b := range builds {
		if !l.o.Judge.IsKnown(a, b) {
			phase("judging")
		}
		j, err := l.o.Judge.Judge(ctx, a, b)
		switch {
		case err == nil:
		case runtimes.IsTransient(ctx, err):
			return nil, err
		case errors.Is(err, packing.ErrNoSpace):
			return nil, noUnpackSpace(b, err)
		default:
			j = judge.Judgement{Verdict: compilers.Unknown, At: l.o.Now(), Runtime: a.Runtime,
				Reason: "loading it could not be tested: " + err.Error()}
		}
		out = append(out, Candidate{Build: b, Judgement: j, notTried: err})
	}
	slices.SortStableFunc(out, func(a, b Candidate) int {
		return cmp.Or(judge.Rank(a.Judgement.Verdict)-judge.Rank(b.Judgement.Verdict),
			b.Build.Created.Compare(a.Build.Created))
	})
	return out, nil
}

// whyRefused returns why a build with this judgement is not served, "" if it is.
func (l *Lookup) whyRefused(at *request.Attempt, j judge.Judgement) string {
	policy := l.o.Policy(at.Plan.EPs)
	switch {
	case j.Verdict == compilers.Optimal:
	case j.Verdict == compilers.PreferRecompilation && at.OnlyOptimal:
		return "refused by session.fail_on_suboptimal_compiled_model: " + j.Reason
	case j.Verdict == compilers.PreferRecompilation &&
		policy.PreferRecompilation != request.PolicyRefuse:
	case j.Verdict == compilers.Unknown && policy.Unknown == request.PolicyServe:
	case j.Verdict == compilers.PreferRecompilation:
		return "refused by policy: " + j.Reason
	default:
		return cmp.Or(j.Reason, j.Verdict.String())
	}
	return ""
}

// WhyWithheld returns why a build is not served to this caller with any runtime, "" if it is.
func (l *Lookup) WhyWithheld(at *request.Attempt, b *index.Build) string {
	state, doubt := l.o.Store.Index().Journal.StateOf(b.ID),
		l.o.Reports.WhyWithheld(b.ID, at.Peer.UID)
	switch {
	case at.AsMember && !l.o.Rights.MaySee(at.Peer, b.ID, b.Scope):
		return "it has models that this user has not requested"
	case state.Name == index.Withheld || state.Name == index.Damaged:
		return fmt.Sprintf("the build of %s is %s: %s",
			b.Created.Format(time.RFC3339), state.Name, state.Reason)
	case doubt != "":
		return fmt.Sprintf("the build of %s is withheld from you: %s",
			b.Created.Format(time.RFC3339), doubt)
	case at.NeedsOtherORT(b.ORTVersion):
		return fmt.Sprintf("strict_ort: the build was compiled with ONNX Runtime %s, not %s",
			b.ORTVersion, at.ORTVersion())
	}
	return ""
}
