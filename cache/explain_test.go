package cache

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// explain asks for the decision on a request, and makes sure that asking changes nothing.
func (b *bench) explain(r *request.Request) *wire.Explanation {
	b.Helper()
	compiles, checks := b.compiler.Compiles.Load(), b.compiler.Checks.Load()
	before, err := b.cache.Queries.Status(context.Background(), b.self())
	require.NoError(b, err)
	events := len(b.done())
	r.OnMiss = request.Explain
	a := b.acquire(r)
	require.Equal(b, request.Explained, a.Outcome)
	require.Nil(b, a.View)
	require.Nil(b, a.Build)
	after, err := b.cache.Queries.Status(context.Background(), b.self())
	require.NoError(b, err)
	require.Equal(b, counted(before), counted(after))
	require.Equal(b, compiles, b.compiler.Compiles.Load())
	require.Equal(b, checks, b.compiler.Checks.Load())
	require.Len(b, b.done(), events)
	return a.Explanation
}

// counted is what a status counts of requests.
func counted(s *wire.StatusReply) []uint64 {
	return []uint64{s.Hits, s.Misses, s.Compiles,
		s.Failures}
}

// done lists what was done, without what the background finds out about the runtimes meanwhile.
func (b *bench) done() (out []*wire.Event) {
	for _, e := range b.events(b.self()) {
		if e.RequestKey != "" && e.Kind != event.Judged {
			out = append(out, e)
		}
	}
	return out
}

func (b *bench) why(p request.Peer, entry string) *wire.Explanation {
	b.Helper()
	e, err := b.cache.Queries.Why(context.Background(), p, entry)
	require.NoError(b, err)
	return e
}

// withoutJudged leaves out what the background finds out meanwhile.
func withoutJudged(history []*wire.Event) []string {
	return slices.DeleteFunc(kinds(history), func(kind string) bool { return kind == event.Judged })
}

func differing(list []*wire.Difference) map[string][2]string {
	out := make(map[string][2]string)
	for _, d := range list {
		out[d.Field] = [2]string{d.Asked, d.Found}
	}
	return out
}

func TestExplainDecidesAsARequestDoes(t *testing.T) {
	withLevel := func(r *request.Request, level string) *request.Request {
		r.EPs[0].Options = map[string]string{"level": level}
		return r
	}
	for _, c := range []struct {
		name     string
		prepare  func(b *bench)
		change   func(b *bench, r *request.Request)
		decision string
		reason   string
	}{
		{"nothing is there", func(*bench) {}, nil, "miss", "never compiled"},
		{"compiled", func(b *bench) { b.acquire(b.request(b.model(1))) }, nil, "hit",
			"compiled by these or equal libraries"},
		{"another option", func(b *bench) { b.acquire(withLevel(b.request(b.model(1)), "3")) }, nil,
			"miss", "eps[0].options.level"},
		{"another model of that name", func(b *bench) { b.acquire(b.request(b.model(2))) }, nil,
			"miss", "with other content"},
		{"withheld", func(b *bench) {
			b.acquire(b.request(b.model(1)))
			_, err := b.cache.Invalidate(context.Background(), b.self(), []string{"model.onnx"},
				"for a test", false)
			require.NoError(b, err)
		}, nil, "stale", "for a test"},
		{"damaged", func(b *bench) {
			require.NoError(b, os.Remove(b.blob(b.acquire(b.request(b.model(1))))))
		}, nil, "stale", "damaged"},
		{"another library", func(b *bench) {
			b.acquire(b.request(b.model(1)))
			b.library("2.0")
		}, nil, "stale", ""},
		{"the other ONNX Runtime", func(b *bench) { b.acquire(b.request(b.model(1))) },
			func(b *bench, r *request.Request) {
				r.StrictORT = true
				_, err := standin.Library(b.runtime, "1.32.0",
					standin.SDK{Version: "1.0", Hardware: "sim-1"})
				require.NoError(b, err)
			}, "stale", "strict_ort"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			c.prepare(b)
			r := b.request(b.model(1))
			if c.change != nil {
				c.change(b, r)
			}
			e := b.explain(r)
			require.Equal(t, c.decision, e.Decision, e.Reason)
			require.Contains(t, e.Reason, c.reason)
			require.Equal(t, b.runtime, e.Runtime)

			r.OnMiss = request.Fail
			a, err := b.cache.Acquire(context.Background(), r, nil)
			require.Equal(t, e.Decision == "hit", err == nil, "a request decides the same: %v", err)
			if a != nil {
				require.NoError(t, a.View.Close())
			}
		})
	}
}

func TestExplainNamesTheLibrariesOfABuild(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	b.library("2.0")
	e := b.explain(b.request(b.model(1)))
	require.Len(t, e.Candidates, 1)
	one := e.Candidates[0]
	require.False(t, one.Served)
	require.NotEmpty(t, one.Reason)
	require.Equal(t, first.Build.BuildKey.String(), one.Build.Build)
	d := differing(one.Differences)
	require.Equal(t, [2]string{"2.0", "1.0"}, d["eps[0].sdk_version"])
	require.Equal(t, [2]string{"standin:2.0:sim-1", "standin:1.0:sim-1"},
		d["eps[0].compatibility_string"])
	require.Contains(t, d, "eps[0].library_digest")
	require.NotContains(t, d, "eps[0].hardware_architecture")
	require.NotContains(t, d, "ort_version")
	require.Equal(t, []string{event.Compiled}, withoutJudged(e.History))
	require.Contains(t, e.History[0].Text, "SDK 1.0")

	second := b.acquire(b.request(b.model(1)))
	e = b.explain(b.request(b.model(1)))
	require.Equal(t, "hit", e.Decision)
	require.Len(t, e.Candidates, 2)
	require.Equal(t, second.Build.BuildKey.String(), e.Candidates[0].Build.Build)
	require.True(t, e.Candidates[0].Served)
	require.False(t, e.Candidates[1].Served)
}

func TestNeighboursAreTheNearest(t *testing.T) {
	b := newBench(t)
	ask := func(seed uint64, options map[string]string, dims map[string]int64) *request.Request {
		r := b.request(b.model(seed))
		r.EPs[0].Options, r.FreeDimensions = options, dims
		return r
	}
	b.acquire(ask(1, map[string]string{"level": "1", "fast": "1"}, map[string]int64{"batch": 2}))
	near := b.acquire(ask(1, map[string]string{"level": "2"}, nil))
	changed := b.acquire(ask(2, nil, nil))
	other := ask(3, nil, nil)
	other.Name = "other.onnx"
	b.acquire(other)

	e := b.explain(ask(1, nil, nil))
	require.Len(t, e.Neighbours, 3, "a model with another name is none")
	require.Equal(t, near.RequestKey.String(), e.Neighbours[0].RequestKey)
	require.Equal(t, map[string][2]string{"eps[0].options.level": {"", "2"}},
		differing(e.Neighbours[0].Differences))
	require.EqualValues(t, 1, e.Neighbours[0].Builds)
	require.Len(t, e.Neighbours[1].Differences, 3)
	require.Equal(t, changed.RequestKey.String(), e.Neighbours[2].RequestKey)
	require.Len(t, e.Neighbours[2].Differences, 1)
	require.Equal(t, changed.ModelDigest.String(),
		differing(e.Neighbours[2].Differences)["model"][1])
}

func TestExplanationsAreBounded(t *testing.T) {
	b := newBench(t)
	const longest, most = 200, 50 // a value, and differences
	for i := range 2 * query.MaxNeighbours {
		r := b.request(b.model(1))
		r.FreeDimensions = map[string]int64{"batch": int64(i + 1)}
		b.acquire(r)
	}
	r := b.request(b.model(1))
	r.EPs[0].Options = map[string]string{"tuning": `{"x":"` + strings.Repeat("x", 10*longest) +
		`"}`}
	r.FreeDimensions = make(map[string]int64)
	for i := range 2 * most {
		r.FreeDimensions[strings.Repeat("d", i+1)] = 1
	}
	e := b.explain(r)
	require.Len(t, e.Neighbours, query.MaxNeighbours)
	for _, n := range e.Neighbours {
		require.Len(t, n.Differences, most+1)
		for _, d := range n.Differences {
			require.LessOrEqual(t, len(d.Field)+len(d.Asked)+len(d.Found), 3*longest)
		}
	}
}

func TestExplainRevealsNothingOfOtherUsers(t *testing.T) {
	b := newBench(t)
	alice := b.others(2001, 1)
	alice.Name = "alices-secret.onnx"
	b.acquire(alice)
	apart := b.others(2001, 1)
	apart.Name, apart.EPs[0].Options = alice.Name, map[string]string{"level": "1"}
	b.acquire(apart)

	r := b.others(2002, 1)
	e := b.explain(r)
	require.Equal(t, "hit", e.Decision)
	require.Equal(t, r.Name, e.Candidates[0].Build.ModelName)
	require.Empty(t, e.Neighbours)
	for _, h := range e.History {
		require.NotContains(t, h.Model+h.Text, "secret")
	}
	_, err := b.cache.Queries.Why(context.Background(), request.Peer{UID: 2002},
		"alices-secret.onnx")
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
	require.Len(t, b.explain(b.request(b.model(1))).Neighbours, 1, "an administrator may know")
}

func TestExplainACompiledModel(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	e := b.explain(b.request(b.openFile(filepath.Join(a.Path, filepath.FromSlash(a.Graph)))))
	require.Equal(t, request.PassThrough, e.Decision)
	require.Contains(t, e.Reason, standin.EP)
	require.Contains(t, e.Reason, "optimal")
}

func TestWhyAnEntryIsAsItIs(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	for _, name := range []string{a.RequestKey.String(), a.Build.BuildKey.String()[:12],
		a.Build.ID.String(), "model.onnx"} {
		e := b.why(b.self(), name)
		require.Equal(t, index.Current, e.Decision, e.Reason)
		require.Equal(t, a.RequestKey.String(), e.RequestKey)
		require.Equal(t, a.Record, e.Record)
		require.Equal(t, b.runtime, e.Runtime)
		require.True(t, e.Candidates[0].Served)
		require.Empty(t, e.Candidates[0].Differences)
	}

	b.library("2.0")
	e := b.why(b.self(), "model.onnx")
	require.Equal(t, "stale", e.Decision)
	require.Equal(t, [2]string{"2.0", "1.0"},
		differing(e.Candidates[0].Differences)["eps[0].sdk_version"])

	b.acquire(b.request(b.model(1)))
	require.Len(t, b.why(b.self(), a.Build.ID.String()).Candidates, 2,
		"a build's name stands for its entry")

	_, err := b.cache.Invalidate(context.Background(), b.self(), []string{"model.onnx"},
		"for a test", false)
	require.NoError(t, err)
	e = b.why(b.self(), "model.onnx")
	require.Equal(t, index.Withheld, e.Decision)
	require.Contains(t, e.Reason, "for a test")
	require.Equal(t, []string{event.Compiled, event.Compiled, event.Withheld, event.Withheld},
		withoutJudged(e.History))
	require.EqualValues(t, 2, b.compiler.Compiles.Load(), "explaining compiles nothing")
}

func TestWhyWithoutARuntime(t *testing.T) {
	t.Parallel() // it waits
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	require.NoError(t, os.RemoveAll(b.runtime))
	e := b.why(b.self(), "model.onnx")
	require.Equal(t, "stale", e.Decision)
	require.Contains(t, e.Reason, standin.EP)
	require.Len(t, e.Candidates, 1)
	require.False(t, e.Candidates[0].Served)
}

func TestWhyAnEntryWasRemoved(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	_, err := b.cache.Remove(context.Background(), b.self(), nil, true, false)
	require.NoError(t, err)
	for _, name := range []string{a.RequestKey.String()[:16], a.Build.BuildKey.String(),
		"model.onnx"} {
		e := b.why(b.self(), name)
		require.Equal(t, "gone", e.Decision)
		require.Contains(t, e.Reason, "removed by request")
		require.Equal(t, []string{event.Compiled, event.Retracted}, kinds(e.History))
	}
	_, err = b.cache.Queries.Why(context.Background(), b.self(), "never.onnx")
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
	_, err = b.cache.Queries.Why(context.Background(), request.Peer{UID: 2002}, "model.onnx")
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
}

// A removed build was not "never compiled": a client with the model gets the reason of the
// removal, by why and with the next answer.
func TestWhyARequestHasNoBuildAnyMore(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(2))) // another model of that name
	a := b.acquire(b.request(b.model(1)))
	require.NoError(t, a.View.Close())
	for _, one := range []struct {
		remove func()
		says   string
	}{
		{func() { b.later.Add(int64(time.Hour)); b.collect(b.plan(0)) }, " to free space (gc): "},
		{func() {
			_, err := b.cache.Remove(context.Background(), b.self(),
				[]string{a.RequestKey.String()}, false, false)
			require.NoError(t, err)
		}, "removed by request"},
	} {
		one.remove()
		gone := b.why(b.self(), a.ModelDigest.String()) // what a model's file stands for
		require.Equal(t, "gone", gone.Decision)
		require.Contains(t, gone.Reason, "no build is left")
		e := b.explain(b.request(b.model(1)))
		require.Equal(t, "miss", e.Decision)
		require.Contains(t, e.Reason, one.says)
		require.NotContains(t, e.Reason, "never")
		again := b.acquire(b.request(b.model(1)))
		require.Equal(t, request.Compiled, again.Outcome)
		require.Contains(t, again.Why, one.says)
		require.NoError(t, again.View.Close())
		b.acquire(b.request(b.model(2)))
	}
	require.Contains(t, b.explain(b.request(b.model(3))).Reason, "never compiled")
}

func TestWhyANameMeansSeveral(t *testing.T) {
	b := newBench(t)
	first, second := b.acquire(b.request(b.model(1))), b.acquire(b.request(b.model(2)))
	_, err := b.cache.Queries.Why(context.Background(), b.self(), "model.onnx")
	var e *apierr.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, apierr.BadRequest, e.Class)
	for _, build := range []index.BuildKey{first.Build.BuildKey, second.Build.BuildKey} {
		require.Contains(t, e.Hint, build.String()[:12]+" of ", "as list names them")
	}
}

// A build that is lost with its manifest leaves its reason in the history.
func TestWhyNamesADamagedManifest(t *testing.T) {
	b := newBench(t)
	b.use(1)
	b.close()
	found, err := filepath.Glob(filepath.Join(b.state, "manifests", "??", "*"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.NoError(t, os.Truncate(found[0], 20))
	require.NoError(t, os.Remove(filepath.Join(b.state, "index.db")))
	b.open()
	require.Contains(t, b.explain(b.request(b.model(1))).Reason,
		"its manifest was damaged, and is in the quarantine")
	b.use(1)
	require.Equal(t, request.Hit, b.use(1).Outcome)
}
