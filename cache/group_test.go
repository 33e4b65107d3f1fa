package cache

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// group asks for models of the seeds as one group.
func (b *bench) group(seeds ...uint64) *request.Request {
	r := b.request(b.model(seeds[0]))
	r.Name = fmt.Sprintf("model%d.onnx", seeds[0])
	for _, seed := range seeds[1:] {
		r.Group = append(r.Group,
			identity.Files{Name: fmt.Sprintf("model%d.onnx", seed), Graph: b.model(seed)})
	}
	return r
}

// Clients that state no level, such as epcachectl, meet those that state a session's, as Python's
// SessionGroup does.
func TestAGroupThatWasWarmedIsThatOfSessions(t *testing.T) {
	b := newBench(t)
	warmed := b.acquire(b.group(1, 2))
	r := b.group(1, 2)
	r.GraphOptimizationLevel = "basic"
	require.Equal(t, query.Hit, b.explain(r).Decision)
	r.OnMiss = request.Wait
	session := b.acquire(r)
	require.Equal(t, request.Hit, session.Outcome)
	require.Equal(t, warmed.RequestKey, session.RequestKey)
	single := b.request(b.model(1))
	single.Route = compilers.RouteSessionOptions
	at := b.request(b.model(1))
	at.Route, at.GraphOptimizationLevel = compilers.RouteSessionOptions, "basic"
	require.Equal(t, b.explain(single).RequestKey, b.explain(at).RequestKey, "the kind")
}

func TestAGroupIsOneBuild(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.group(1, 2, 3))
	require.Equal(t, request.Compiled, first.Outcome)
	require.Len(t, b.list(), 1)
	require.Len(t, first.Build.Files, 4, "three graphs and what they share")
	require.Len(t, first.Members, 3)
	files := b.read(first)
	for i, m := range first.Members {
		require.Equal(t, fmt.Sprintf("model%d.onnx", i+1), m.Name)
		require.Equal(t, path.Dir(first.Graph), path.Dir(m.Graph))
		require.Contains(t, files, path.Base(m.Graph))
		require.Equal(t, map[string]string{"ep.share_ep_contexts": "1"}, m.SessionOptions)
	}
	require.Equal(t, first.Members[0].Graph, first.Graph)
	require.Equal(t, first.Members[0].ModelDigest, first.ModelDigest)
	require.NotContains(t, first.SessionOptions, "ep.share_ep_contexts",
		"that is what a lone model is loaded with")
	require.Equal(t, compilers.RouteSessionOptions, first.Build.Route)

	second := b.acquire(b.group(1, 2, 3))
	require.Equal(t, request.Hit, second.Outcome)
	require.Equal(t, first.RequestKey, second.RequestKey)
	require.Equal(t, first.Members, second.Members)
	for _, other := range []*request.Request{b.group(2, 1, 3), b.group(1, 2), b.group(1, 2, 3, 4)} {
		require.NotEqual(t, first.RequestKey, b.acquire(other).RequestKey,
			"other members, or in another order")
	}
}

func TestTheKeySaysThatItIsAGroup(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.group(1, 2))
	c, err := identity.Decode(a.Build.Record)
	require.NoError(t, err)
	require.Equal(t, a.Members[1].ModelDigest, c.Group[0])
	key, record := c.Key()
	require.Equal(t, a.RequestKey, key)
	require.Equal(t, a.Build.Record, record)
	require.Contains(t, a.Record, fmt.Sprintf(`"group":[%q]`, a.Members[1].ModelDigest))
	require.NotEqual(t, c.MemberKey(0), c.MemberKey(1))
}

func TestAMemberAloneIsAnsweredFromTheGroup(t *testing.T) {
	b := newBench(t)
	group := b.acquire(b.group(1, 2, 3))
	for range 2 {
		for i, m := range group.Members {
			alone := b.acquire(b.request(b.model(uint64(i + 1))))
			require.Equal(t, request.Hit, alone.Outcome, alone.Why)
			require.Equal(t, group.Build.ID, alone.Build.ID)
			require.Equal(t, i, alone.Member)
			require.Equal(t, m.ModelDigest, alone.ModelDigest)
			require.Equal(t, path.Base(m.Graph), path.Base(alone.Graph))
			require.NotContains(t, alone.SessionOptions, "ep.share_ep_contexts")
			require.Equal(t, compilers.Optimal, alone.Compatibility.Verdict)
			require.NotEqual(t, group.RequestKey, alone.RequestKey)
		}
		b.reopen()
	}
	r := b.request(b.model(2))
	r.EPs[0].Options = map[string]string{"level": "7"}
	require.Equal(t, request.Compiled, b.acquire(r).Outcome,
		"with other options it is another request")
	r = b.request(b.model(2))
	r.Embed = true
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
	require.EqualValues(t, 3, b.compiler.Compiles.Load())
}

func TestAnExplanationKnowsOfGroups(t *testing.T) {
	b := newBench(t)
	require.Equal(t, query.Miss, b.explain(b.request(b.model(2))).Decision)
	group := b.acquire(b.group(1, 2))
	e := b.explain(b.request(b.model(2)))
	require.Equal(t, query.Hit, e.Decision)
	require.Equal(t, group.Build.BuildKey.String(), e.Candidates[0].Build.Build)
	other := b.request(b.model(2))
	other.Peer.UID = 4711
	e = b.explain(other)
	require.Equal(t, query.Miss, e.Decision)
	require.Empty(t, e.Candidates, "who has not had the group does not hear of it")
}

// Users never see other users' names for a model.
func TestMembersHaveTheCallersNames(t *testing.T) {
	b := newBench(t)
	b.acquire(b.group(1, 2))
	r := b.group(1, 2)
	r.Peer.UID, r.Name, r.Group[0].Name = 4711, "mine.onnx", "also mine.onnx"
	a := b.acquire(r)
	require.Equal(t, request.Hit, a.Outcome)
	require.Equal(t, "mine.onnx", a.Members[0].Name)
	require.Equal(t, "also mine.onnx", a.Members[1].Name)
}

func TestSingleBuildIsPreferredToTheGroup(t *testing.T) {
	b := newBench(t)
	own := b.acquire(b.request(b.model(2)))
	b.acquire(b.group(1, 2))
	alone := b.acquire(b.request(b.model(2)))
	require.Equal(t, request.Hit, alone.Outcome)
	require.Equal(t, own.Build.ID, alone.Build.ID)
	require.Empty(t, alone.Members)
}

// A caller with one model has not proved that it has the others, and the group's files contain all
// of them.
func TestMemberAloneNeedsARequestForTheGroup(t *testing.T) {
	b := newBench(t)
	group := b.acquire(b.group(1, 2))
	require.Equal(t, "shared", group.Build.Scope)
	alone := func() *request.Answer {
		r := b.request(b.model(2))
		r.Peer.UID, r.OnMiss = 4711, request.Fail
		if a, err := b.cache.Acquire(context.Background(), r, nil); err == nil {
			b.Cleanup(func() { a.View.Close() })
			return a
		}
		return nil
	}
	require.Nil(t, alone())
	r := b.group(1, 2)
	r.Peer.UID = 4711
	require.Equal(t, request.Hit, b.acquire(r).Outcome)
	require.NotNil(t, alone())
}

func TestGroupsThatAreRefused(t *testing.T) {
	b := newBench(t)
	compiled := b.own()
	for name, c := range map[string]struct {
		change func(r *request.Request)
		says   string
	}{
		"embedded": {func(r *request.Request) { r.Embed = true },
			"cannot be embedded"},
		"one model twice": {func(r *request.Request) { r.Group[0].Graph = b.model(1) },
			"are the same"},
		"a model is missing": {func(r *request.Request) { r.Group[0].Graph = nil },
			"no model 2 of the group"},
		"too many": {func(r *request.Request) {
			r.Group = make([]identity.Files,
				request.MaxGroup)
		}, "more than 64"},
		"compiled already": {func(r *request.Request) { r.Group[0].Graph = compiled },
			"compiled already"},
		"under a claim": {func(r *request.Request) { r.OnMiss = request.ForClaim },
			"only the daemon"},
		"external initializers": {
			func(r *request.Request) { r.Output.InitializersFile = "weights.bin" },
			"initializers cannot be in external files"},
	} {
		t.Run(name, func(t *testing.T) {
			r := b.group(1, 2)
			c.change(r)
			e := b.refused(r)
			require.Equal(t, apierr.BadRequest, e.Class)
			require.Contains(t, e.Text, c.says)
		})
	}
	require.EqualValues(t, 1, b.compiler.Compiles.Load(), "of the model that is compiled already")
}

func TestAGroupFailsAsAWhole(t *testing.T) {
	b := newBench(t)
	b.wrap = failsMember{b.compiler}
	b.reopen()
	e := b.refused(b.group(1, 2, 3))
	require.Equal(t, apierr.CompileFailed, e.Class)
	require.Contains(t, e.Text, `"model2.onnx"`)
	require.Equal(t, "11", e.Facts["code"])
	require.Empty(t, b.list())
}

// failsMember refuses the second model of each group.
type failsMember struct{ compilers.Compiler }

func (f failsMember) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	if len(job.Share) == 0 {
		return f.Compiler.Compile(ctx, job, progress)
	}
	return compilers.Result{},
		&compilers.MemberError{Member: 1,
			Err: &compilers.RefusedError{Doing: "compile", Code: 11, Text: "no"}}
}

func TestEveryFileOfAGroupCountsForAll(t *testing.T) {
	for i, name := range []string{"first graph", "second graph", "shared binary"} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			first := b.acquire(b.group(1, 2))
			files := b.read(first)
			require.Len(t, first.Build.Files, 3)
			digest := first.Build.Files[i].Digest.String()
			require.NoError(t, os.Remove(filepath.Join(b.state, "objects", digest[:2], digest)))
			b.views()
			for _, r := range []*request.Request{b.group(1, 2), b.request(b.model(1)),
				b.request(b.model(2))} {
				r.OnMiss = request.Fail
				require.NotEqual(t, apierr.Internal, b.refused(r).Class, "none of it is served")
			}
			again := b.acquire(b.group(1, 2))
			require.Equal(t, request.Compiled, again.Outcome)
			require.Equal(t, files, b.read(again))
			require.Equal(t, request.Hit, b.acquire(b.request(b.model(2))).Outcome)
			require.Len(t, b.list(), 1)
		})
	}
}

func TestAGroupIsWithheldAndRemovedByEachOfItsNames(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.group(1, 2))
	_, err := b.cache.Invalidate(context.Background(), b.self(), []string{"model2.onnx"}, "test",
		false)
	require.NoError(t, err)
	require.Equal(t, index.Withheld, b.list()[0].row.State)
	for _, r := range []*request.Request{b.group(1, 2), b.request(b.model(1)),
		b.request(b.model(2))} {
		r.OnMiss = request.Fail
		b.refused(r)
	}
	b.acquire(b.group(1, 2))
	_, err = b.cache.Remove(context.Background(), b.self(),
		[]string{first.Members[1].ModelDigest.String()[:12]}, false, false)
	require.NoError(t, err)
	require.Empty(t, b.list())
}

func TestGroupIsRecompiledFromItsKeptModels(t *testing.T) {
	for _, how := range []string{build.KeepReference, build.KeepCopy} {
		t.Run(how, func(t *testing.T) {
			b := rebuilding(t, func(o *Options) { o.KeepSource = how })
			first := b.acquire(b.group(1, 2, 3))
			b.library("2.0")
			b.want(first.Build, "the SDK is 2.0 now")
			require.Empty(t, b.waitForRebuilds())
			again := b.acquire(b.group(1, 2, 3))
			require.Equal(t, request.Hit, again.Outcome, again.Why)
			require.Equal(t, "2.0", again.Build.EPs[0].SDKVersion)
			require.Len(t, again.Members, 3)
			require.Equal(t, again.Build.ID, b.acquire(b.request(b.model(3))).Build.ID)
			require.Equal(t, how, again.Build.Members[2].Source.Kind)
		})
	}
}

func TestGroupWithChangedModelsIsNotRecompiled(t *testing.T) {
	b := rebuilding(t, nil)
	r := b.group(1, 2)
	first := b.acquire(r)
	require.NoError(t, os.WriteFile(r.Group[0].Graph.Name(), compilertest.Dense(9, 8, 1), 0o644))
	b.library("2.0")
	b.want(first.Build, "the SDK is 2.0 now")
	b.waitForRebuilds()
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

// Where a compiled group loads only as a whole, a model alone is compiled for itself.
func TestMembersThatDoNotLoadAlone(t *testing.T) {
	b := newBench(t)
	b.compiler.CheckFault = func(job compilers.CheckJob) *compilers.CheckResult {
		if len(job.Share) > 0 && job.SessionOptions["ep.share_ep_contexts"] == "" {
			return &compilers.CheckResult{Outcome: compilers.Failed, Code: 10, Text: "not alone",
				Member: 1}
		}
		return nil
	}
	group := b.acquire(b.group(1, 2))
	require.Len(t, group.Warnings, 1)
	require.Contains(t, group.Warnings[0], `"model2.onnx": not alone`)
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(2))).Outcome)
	require.Equal(t, request.Hit, b.acquire(b.group(1, 2)).Outcome)
}

// groupsOnDevices has load checks of groups answer by device: one that is absent has no answer, one
// that is present loads.
func (b *bench) groupsOnDevices(present, alone *bool) {
	b.compiler.CheckFault = func(job compilers.CheckJob) *compilers.CheckResult {
		switch {
		case len(job.Share) == 0:
			return nil
		case !*present:
			return &compilers.CheckResult{Outcome: compilers.NotCheckable}
		case job.SessionOptions["ep.share_ep_contexts"] == "" && !*alone:
			return &compilers.CheckResult{Outcome: compilers.Failed, Code: 11, Text: "not alone"}
		}
		return nil
	}
}

// A group that was compiled where its device is absent answers requests for one of its models only
// where the device is, once the models were loaded alone there.
func TestGroupsAnswerSingleRequestsOnlyWhereMembersAreKnownToLoadAlone(t *testing.T) {
	present, alone := false, true
	b := newBench(t)
	b.groupsOnDevices(&present, &alone)
	group := b.acquire(b.group(1, 2, 3))
	require.Equal(t, compilers.NotCheckable, group.Build.LoadCheck)
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(2))).Outcome)
	e := b.explain(b.request(b.model(3)))
	require.Equal(t, query.Miss, e.Decision)
	require.Contains(t, e.Candidates[0].Reason,
		"loads is unknown: it cannot be tested on this machine")
	require.Equal(t, request.Hit, b.acquire(b.group(1, 2, 3)).Outcome)

	b.close()
	present = true
	// what was found out elsewhere does not come along
	require.NoError(t, os.Remove(filepath.Join(b.state, "index.db")))
	b.open()
	require.Equal(t, group.Build.ID, b.acquire(b.request(b.model(1))).Build.ID)
	require.Equal(t, query.Hit, b.explain(b.request(b.model(3))).Decision)
}

// Other libraries may load a group together and not its models alone.
func TestAGroupOfOtherLibrariesIsTriedAlone(t *testing.T) {
	present, alone := true, true
	b := newBench(t)
	b.groupsOnDevices(&present, &alone)
	group := b.acquire(b.group(1, 2))
	require.Equal(t, group.Build.ID, b.acquire(b.request(b.model(2))).Build.ID)
	alone = false
	b.library("1.0.1")
	require.Equal(t, group.Build.ID, b.acquire(b.group(1, 2)).Build.ID)
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(2))).Outcome)
}

// A group that does not load together is none, and one that cannot be tried here is no failure.
func TestTheLoadCheckOfAGroup(t *testing.T) {
	for outcome, class := range map[string]apierr.Class{compilers.Failed: apierr.CompileFailed,
		compilers.NotCheckable: 0} {
		t.Run(outcome, func(t *testing.T) {
			b := newBench(t)
			b.compiler.CheckFault = func(job compilers.CheckJob) *compilers.CheckResult {
				if len(job.Share) != 1 {
					return nil // the control
				}
				return &compilers.CheckResult{Outcome: outcome, Code: -1, Text: "crashed",
					Member: 1}
			}
			if class != 0 {
				e := b.refused(b.group(1, 2))
				require.Equal(t, class, e.Class)
				require.Contains(t, e.Text, `"model2.onnx" compiles`)
				return
			}
			require.Equal(t, compilers.NotCheckable, b.acquire(b.group(1, 2)).Build.LoadCheck)
			require.Equal(t, request.Hit, b.acquire(b.group(1, 2)).Outcome)
		})
	}
}

// layered writes models into directories, all with their weights in a file of one name, and asks
// for them as a group.
func (b *bench) layered(dirs ...string) *request.Request {
	var r *request.Request
	dir := b.TempDir()
	for i, directory := range dirs {
		m := compilertest.DenseModel(7, 8, i+1)
		raw := m.Initializers[0].Raw
		m.Initializers[0].Location, m.Initializers[0].Length = "weights.bin", strconv.Itoa(len(raw))
		name := fmt.Sprintf("model%d.onnx", i+1)
		require.NoError(b, os.MkdirAll(filepath.Join(dir, directory), 0o755))
		require.NoError(b, os.WriteFile(filepath.Join(dir, directory, name), m.Encode(), 0o644))
		require.NoError(b, os.WriteFile(filepath.Join(dir, directory, "weights.bin"), raw, 0o644))
		one := identity.Files{Name: name, Graph: b.openFile(filepath.Join(dir, directory, name)),
			External: map[string]*os.File{"weights.bin": b.openFile(filepath.Join(dir, directory,
				"weights.bin"))}}
		if i == 0 {
			r = b.request(one.Graph)
			r.External = one.External
		} else {
			r.Group = append(r.Group, one)
		}
	}
	return r
}

func TestMembersShareAFileOfWeights(t *testing.T) {
	for name, c := range map[string]struct {
		dirs   []string
		copies int
	}{
		"one file":                  {[]string{"a", "a", "a"}, 1},
		"files of one name":         {[]string{"a", "b", "c"}, 3},
		"one file, and another one": {[]string{"a", "b", "a"}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			copies := &countsCopies{Compiler: b.compiler}
			b.wrap = copies
			b.reopen()
			require.Len(t, b.acquire(b.layered(c.dirs...)).Members, 3)
			require.Equal(t, c.copies, copies.weights)
		})
	}
}

// countsCopies counts the files of weights beside the models of a job.
type countsCopies struct {
	compilers.Compiler
	weights int
}

func (c *countsCopies) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	for _, pattern := range []string{"weights.bin", "*/weights.bin"} {
		found, err := filepath.Glob(filepath.Join(filepath.Dir(job.Model), pattern))
		if err != nil {
			return compilers.Result{}, err
		}
		c.weights += len(found)
	}
	for _, m := range job.Share { // beside each model is what it refers to
		if _, err := os.Stat(filepath.Join(filepath.Dir(m.Model), "weights.bin")); err != nil {
			return compilers.Result{}, err
		}
	}
	return c.Compiler.Compile(ctx, job, progress)
}

func TestAGroupNeedsTheFilesOfEachModel(t *testing.T) {
	b := newBench(t)
	r := b.layered("a", "b", "c")
	r.External, r.Group[1].External = nil, nil
	_, err := b.cache.Acquire(context.Background(), r, nil)
	var need *identity.NeedFilesError
	require.ErrorAs(t, err, &need)
	require.Equal(t, []string{"weights.bin", "weights.bin"}, need.Locations)
	require.Equal(t, []int{0, 2}, need.Members)
}

func TestAnOptionThatMakesAnEPShareIsFilledIn(t *testing.T) {
	r := &request.Request{
		CompileTerms: identity.CompileTerms{EPs: []identity.EP{{Name: "QNNExecutionProvider",
			Options: map[string]string{"soc_model": "60"}}, {Name: standin.EP}}}}
	out := r.Sharing()
	require.Equal(t, map[string]string{"soc_model": "60", "enable_htp_weight_sharing": "1"},
		out.EPs[0].Options)
	require.Empty(t, out.EPs[1].Options)
	require.Len(t, r.EPs[0].Options, 1, "the caller's is left as it is")
	r.EPs[0].Options["enable_htp_weight_sharing"] = "0"
	require.Equal(t, "0", r.Sharing().EPs[0].Options["enable_htp_weight_sharing"])
}

// A group that other libraries compiled is tried as applications load it: together, in order, with
// the options for sharing.
func TestAGroupOfOtherLibrariesIsTriedTogether(t *testing.T) {
	b := newBench(t)
	noted := &notesChecks{opinion: opinion{Compiler: b.compiler, load: compilers.Passed}}
	b.close()
	b.wrap = noted
	b.open()
	first := b.acquire(b.group(1, 2, 3))
	b.library("2.0")
	noted.jobs = nil
	again := b.acquire(b.group(1, 2, 3))
	require.Equal(t, request.Hit, again.Outcome)
	require.Equal(t, first.Build.ID, again.Build.ID)
	require.Equal(t, judge.SourceLoadCheck, again.Compatibility.Source)
	require.Len(t, noted.jobs, 1)
	job := noted.jobs[0]
	require.Equal(t, "1", job.SessionOptions["ep.share_ep_contexts"])
	require.Len(t, job.Share, 2)
	for i, path := range job.Share {
		require.Equal(t, filepath.Join(filepath.Dir(job.Graph), graphName(again, i+1)), path)
	}
}

// graphName is the name of a member's graph.
func graphName(a *request.Answer, member int) string { return path.Base(a.Members[member].Graph) }

// notesChecks notes what is loaded of what others made.
type notesChecks struct {
	opinion
	jobs []compilers.CheckJob
}

func (n *notesChecks) Check(ctx context.Context, job compilers.CheckJob) (compilers.CheckResult,
	error) {
	n.jobs = append(n.jobs, job)
	return n.opinion.Check(ctx, job)
}

// A further model that is changed under the work is noticed like the first.
func TestGroupModelsChangeDuringARebuild(t *testing.T) {
	for i := range 2 {
		t.Run(fmt.Sprint("model ", i+1), func(t *testing.T) {
			b := newBench(t)
			r := b.group(1, 2)
			_, err := b.cache.Acquire(context.Background(), r, func(p request.Progress) {
				if p.Phase == "queued" { // it is identified, and not copied yet
					if err := os.WriteFile(r.ModelFiles(i).Graph.Name(),
						compilertest.Dense(9, 8, 1), 0o644); err != nil {
						panic(err)
					}
				}
			})
			require.Equal(t, apierr.BadModel, apierr.ClassOf(err))
			require.ErrorContains(t, err,
				fmt.Sprintf(`"model%d.onnx" changed while being read`, i+1))
			require.Empty(t, b.list(), "what came of it is not kept")
		})
	}
}
