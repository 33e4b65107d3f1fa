package cache

import (
	"context"
	"iter"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// considered is a build in the order in which builds are considered for a request.
type considered struct {
	suited
	barred   bool   // whatever the runtime: it was not judged
	together bool   // it is a group's, and refused only for the request of one model alone
	refused  string // why it is not served, "" if it may be
}

// stored goes through the builds of the plan's entry, scope by scope, the newest first.
func (c *Cache) stored(p *request.Plan, scopes []string) iter.Seq2[*index.Build, error] {
	return func(yield func(*index.Build, error) bool) {
		for _, b := range p.Fitting {
			if !yield(b, nil) {
				return
			}
		}
		if c.readOnly {
			return
		}
		for _, scope := range scopes {
			builds, err := c.index.Lookup(p.RequestKey, scope)
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

// inOrder is the one order in which builds are considered, by whoever looks one up and by whoever explains what a look-up does: those of
// the plan's own build key as they come, with those that are barred among them, then the others by how they suit the runtime. These are
// judged when it comes to them, and not before: a hit does not wait for that.
func (c *Cache) inOrder(ctx context.Context, at *request.Attempt, builds iter.Seq2[*index.Build, error]) iter.Seq2[considered, error] {
	return func(yield func(considered, error) bool) {
		offer := func(one considered) bool {
			if one.refused == "" {
				var err error
				if one.refused, err = c.notAlone(ctx, at, one.suited); err != nil {
					return yield(considered{}, err)
				}
				one.together = one.refused != ""
			}
			return yield(one, nil)
		}
		var others []*index.Build
		for b, err := range builds {
			if err != nil {
				yield(considered{}, err)
				return
			}
			one := considered{suited: suited{build: b}, refused: c.barred(at, b)}
			switch {
			case one.refused != "":
				one.barred = true
			case at.Plan.MadeExactly(b):
				one.judgement = at.Plan.OwnJudgement(b, at.RuntimeName)
			case at.Plan.Outside:
				one.refused = "made with other libraries, under another ONNX Runtime or on another machine: without running yours nobody can tell whether it suits them"
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
		ranked, err := c.rank(ctx, at.Against(), others, at.Phase)
		if err != nil {
			yield(considered{}, request.WorkerError(err, "model %q", at.Name))
			return
		}
		for _, s := range ranked {
			if !offer(considered{suited: s, refused: c.refused(at, s.judgement)}) {
				return
			}
		}
	}
}

// arrange is inOrder for who wants all of it.
func (c *Cache) arrange(ctx context.Context, at *request.Attempt, builds iter.Seq2[*index.Build, error]) (out []considered, err error) {
	for one, err := range c.inOrder(ctx, at.WithPhase(func(string) {}), builds) {
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}
