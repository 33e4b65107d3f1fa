package cache

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
)

// form is a request for one of the two forms.
func (b *bench) form(embed bool) *request.Request {
	r := b.request(b.model(1))
	r.Embed = embed
	return r
}

// contexts returns the digests of the contexts of an answer, wherever they stand.
func (b *bench) contexts(a *request.Answer) (out []cas.Digest) {
	b.Helper()
	dir := filepath.Join(fmt.Sprintf("/proc/self/fd/%d", a.View.Fd()), filepath.Dir(a.Graph))
	var in workspace.OpenFiles
	defer in.Close()
	graph, err := in.Source(filepath.Join(dir, filepath.Base(a.Graph)))
	require.NoError(b, err)
	m, err := epmodel.Read(context.Background(), a.Graph, graph)
	require.NoError(b, err)
	add := func(src epmodel.Source) {
		d, err := cas.Sum(context.Background(), src, 0, src.Size())
		require.NoError(b, err)
		out = append(out, d)
	}
	for _, node := range m.Contexts {
		if node.Inline.Length > 0 {
			add(node.Open(graph))
		}
	}
	for _, name := range m.ContextFiles() {
		src, err := in.Source(filepath.Join(dir, name))
		require.NoError(b, err)
		add(src)
	}
	return out
}

func TestOneFormIsConvertedFromTheOther(t *testing.T) {
	for name, embed := range map[string]bool{"embedded from a sidecar": true,
		"sidecar from embedded": false} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			made := b.acquire(b.form(!embed))
			a := b.acquire(b.form(embed))
			require.EqualValues(t, 1, b.compiler.Compiles.Load(), "the other form was compiled")
			require.Equal(t, request.Hit, a.Outcome)
			require.Contains(t, a.Why, "converted from the "+request.FormName(!embed)+
				" format, build "+made.Build.BuildKey.String())
			require.Contains(t, a.Compatibility.Reason, a.Why)
			require.Equal(t, compilers.Optimal, a.Compatibility.Verdict)
			require.Equal(t, b.contexts(made), b.contexts(a), "the context's bytes")
			require.Equal(t, map[bool]int{true: 1, false: 2}[embed], len(a.Build.Files))

			require.NotEqual(t, made.RequestKey, a.RequestKey)
			require.NotEqual(t, made.Build.BuildKey, a.Build.BuildKey)
			require.Equal(t, made.Build.ID, a.Build.Converted.ID)
			require.Equal(t, made.Build.BuildKey, a.Build.Converted.BuildKey)
			require.WithinDuration(t, made.Build.Created, a.Build.Compiled(), 0)
			require.Equal(t, embed, a.Build.Embed)
			require.Equal(t, compilers.Passed, a.Build.LoadCheck)
			require.Equal(t, made.Build.Source, a.Build.Source)
			require.Contains(t, b.kinds(a.RequestKey), event.Converted)

			b.reopen()
			again := b.acquire(b.form(embed))
			require.Equal(t, request.Hit, again.Outcome)
			require.Equal(t, a.Build.ID, again.Build.ID, "kept, as any build")
			require.Contains(t, again.Why, "converted from")
			require.EqualValues(t, 1, b.compiler.Compiles.Load())
		})
	}
}

// and what a compile would have given is what the conversion gives, but for names
func TestConversionKeepsTheKeysOfACompile(t *testing.T) {
	b := newBench(t)
	b.acquire(b.form(false))
	converted := b.acquire(b.form(true))
	other := newBench(t)
	compiled := other.acquire(other.form(true))
	require.Equal(t, compiled.RequestKey, converted.RequestKey)
	require.Equal(t, compiled.Build.BuildKey, converted.Build.BuildKey)
	require.Equal(t, compiled.Build.Graph, converted.Build.Graph)
	require.Equal(t, other.contexts(compiled), b.contexts(converted))
}

func TestConversionServesRequestsThatDoNotCompile(t *testing.T) {
	b := newBench(t)
	b.acquire(b.form(false))
	r := b.form(true)
	r.OnMiss = request.Fail
	require.Equal(t, request.Hit, b.acquire(r).Outcome)
}

func TestRefreshAndBypassCompile(t *testing.T) {
	for name, wish := range map[string]request.OnMiss{"refresh": request.Refresh,
		"bypass": request.Bypass} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.acquire(b.form(false))
			r := b.form(true)
			r.OnMiss = wish
			require.Equal(t, request.Compiled, b.acquire(r).Outcome)
			require.EqualValues(t, 2, b.compiler.Compiles.Load())
		})
	}
}

func TestConversionForAnUnstoredRequest(t *testing.T) {
	b := newBench(t)
	b.acquire(b.form(false))
	r := b.form(true)
	r.Store = "none"
	a := b.acquire(r)
	require.Equal(t, request.Hit, a.Outcome)
	require.Len(t, b.read(a), 1)
	require.Len(t, b.list(), 1, "only the build that there was")
}

func TestConversionIsSingleFlight(t *testing.T) {
	b := newBench(t)
	b.acquire(b.form(false))
	checks := b.compiler.Checks.Load()
	var wait sync.WaitGroup
	answers := make([]*request.Answer, 16)
	requests := make([]*request.Request, len(answers))
	for i := range requests {
		requests[i] = b.form(true)
	}
	for i := range requests {
		wait.Go(func() { answers[i], _ = b.cache.Acquire(context.Background(), requests[i], nil) })
	}
	wait.Wait()
	for _, a := range answers {
		require.NotNil(t, a)
		require.Equal(t, answers[0].Build.ID, a.Build.ID)
		require.NoError(t, a.View.Close())
	}
	require.Equal(t, checks+1, b.compiler.Checks.Load())
	require.Len(t, b.list(), 2)
}

// a request that looked up before an earlier conversion ended, and comes after it, gets its result
func TestConversionIsNotDoneAgain(t *testing.T) {
	b := newBench(t)
	made := b.acquire(b.form(false))
	first := b.acquire(b.form(true))
	again, err := b.cache.builder.ConvertOnce(context.Background(), b.planned(b.form(true)),
		made.Build)
	require.NoError(t, err)
	require.Equal(t, first.Build.ID, again.Build.ID)
}

func TestFailedConversionIsCompiled(t *testing.T) {
	b := newBench(t)
	b.acquire(b.form(false))
	b.compiler.CheckFault = func(job compilers.CheckJob) *compilers.CheckResult {
		if strings.Contains(job.Graph, "/convert-") {
			return &compilers.CheckResult{Outcome: compilers.Failed, Code: 10,
				Text: "not in this form"}
		}
		return nil
	}
	a := b.acquire(b.form(true))
	require.Equal(t, request.Compiled, a.Outcome)
	require.True(t, a.Build.Converted.ID.IsZero())
	require.Len(t, b.list(), 2)
}

func TestTooLargeToEmbedIsRefusedBeforeACompile(t *testing.T) {
	b := newBench(t)
	b.acquire(b.form(false))
	b.cache.builder.MaxGraph = 500
	e := b.refused(b.form(true))
	require.Equal(t, apierr.CompileFailed, e.Class)
	require.Contains(t, e.Text, "ONNX files may have at most")
	require.Equal(t, "too large", e.Facts["reason"])
	require.Contains(t, e.Hint, "without embedding")
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

func TestDamagedFormIsMadeOfTheOther(t *testing.T) {
	b := newBench(t)
	b.acquire(b.form(false))
	a := b.acquire(b.form(true))
	require.NoError(t, a.View.Close())
	blob := b.blob(a)
	require.NoError(t, os.Chmod(blob, 0o644))
	require.NoError(t, os.Truncate(blob, 100))
	again := b.acquire(b.form(true))
	require.Equal(t, request.Hit, again.Outcome)
	require.NotEqual(t, a.Build.ID, again.Build.ID)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
	require.Contains(t, b.kinds(a.RequestKey), event.Healed)
}

// what came to one user alone must not come to all by way of another form
func TestConversionStaysInItsScope(t *testing.T) {
	b := newBench(t)
	r := b.form(false)
	r.Store = "user"
	own := b.acquire(r)
	require.Equal(t, "uid:"+fmt.Sprint(b.cache.uid), own.Build.Scope)
	require.Equal(t, own.Build.Scope, b.acquire(b.form(true)).Build.Scope)
}

func TestExplanationTellsOfAConversion(t *testing.T) {
	b := newBench(t)
	made := b.acquire(b.form(false))
	r := b.form(true)
	r.OnMiss = request.Explain
	e := b.acquire(r).Explanation
	require.Equal(t, query.Miss, e.Decision)
	require.Contains(t, e.Reason,
		"it would be converted from the sidecar format, without a compile: build "+
			made.Build.BuildKey.String())
	require.Len(t, b.list(), 1, "nothing is converted for it")
}

func TestBackAndForthGivesTheSameFiles(t *testing.T) {
	b := newBench(t)
	made := b.acquire(b.form(false))
	embedded := b.acquire(b.form(true))
	files := b.read(made)
	_, err := b.cache.Remove(context.Background(), b.self(), []string{made.Build.BuildKey.String()},
		false, false)
	require.NoError(t, err)
	back := b.acquire(b.form(false))
	require.Equal(t, request.Hit, back.Outcome)
	require.Equal(t, embedded.Build.ID, back.Build.Converted.ID)
	require.WithinDuration(t, made.Build.Created, back.Build.Compiled(), 0,
		"a conversion of a conversion is as old as the compile")
	require.True(t, slices.Contains(values(files), b.read(back)[contextFile(back)]),
		"the context's digest")
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

func contextFile(a *request.Answer) string { return a.Build.Files[1].Name }

func values(m map[string]string) (out []string) {
	for _, v := range m {
		out = append(out, v)
	}
	return out
}

// what is withheld must not come back by way of its other form
func TestWithheldContextsAreNotConverted(t *testing.T) {
	for name, embed := range map[string]bool{"what was converted": true,
		"what it was converted from": false} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.acquire(b.form(false))
			b.acquire(b.form(true))
			withheld := b.acquire(b.form(embed))
			_, err := b.cache.Invalidate(context.Background(), b.self(),
				[]string{withheld.Build.BuildKey.String()}, "it computes nonsense", false)
			require.NoError(t, err)
			r := b.form(embed)
			r.OnMiss = request.Explain
			require.Contains(t, b.acquire(r).Explanation.Reason, "it computes nonsense")
			again := b.acquire(b.form(embed))
			require.Equal(t, request.Compiled, again.Outcome, again.Why)
			require.EqualValues(t, 2, b.compiler.Compiles.Load())
		})
	}
}

// A converted build that cannot be stored is served all the same, as a compiled one is.
func TestConversionWithoutSpaceIsServed(t *testing.T) {
	for name, embed := range map[string]bool{"embedded": true, "sidecar": false} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			made := b.acquire(b.form(!embed))
			manifests := filepath.Join(b.state, "manifests")
			require.NoError(t, os.Rename(manifests, manifests+".aside"))
			require.NoError(t, os.WriteFile(manifests, nil, 0o600))
			a := b.acquire(b.form(embed))
			require.NoError(t, os.Remove(manifests))
			require.NoError(t, os.Rename(manifests+".aside", manifests))
			require.Equal(t, request.Hit, a.Outcome)
			require.EqualValues(t, 1, b.compiler.Compiles.Load(), "it was compiled")
			require.Contains(t, strings.Join(a.Warnings, "\n"), "not stored: ")
			require.Equal(t, b.contexts(made), b.contexts(a))
			require.Len(t, b.list(), 1)
			require.Empty(t, b.acquire(b.form(embed)).Warnings, "kept as soon as it can be")
			require.Len(t, b.list(), 2)
		})
	}
}
