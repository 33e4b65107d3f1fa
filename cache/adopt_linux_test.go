//go:build linux && (amd64 || arm64)

package cache

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// shipped is a compiled model as an application ships it: the files of a build, in a directory of
// their own.
type shipped struct {
	graph string
	files []string // that the graph refers to
}

func (b *bench) ship(a *request.Answer) shipped {
	s := shipped{graph: filepath.Join(b.TempDir(), "shipped_ctx.onnx")}
	for _, f := range a.Build.Files {
		data, err := os.ReadFile(filepath.Join(a.Path, filepath.Dir(a.Graph), f.Name))
		require.NoError(b, err)
		to := s.graph
		if f.Name != a.Build.Graph {
			to = filepath.Join(filepath.Dir(s.graph), f.Name)
			s.files = append(s.files, f.Name)
		}
		require.NoError(b, os.WriteFile(to, data, 0o644))
	}
	return s
}

// adopts asks for the model to be adopted, by the execution providers of the request that it was
// compiled for.
func (b *bench) adopts(s shipped, eps ...identity.EP) *request.Request {
	r := b.request(b.openFile(s.graph))
	if len(eps) > 0 {
		r.EPs = eps
	}
	r.Adopt, r.External = true, map[string]*os.File{}
	for _, name := range s.files {
		r.External[name] = b.openFile(filepath.Join(filepath.Dir(s.graph), name))
	}
	return r
}

// elsewhereCompiled returns a bench that has not compiled what it is given: what another bench
// compiled.
func elsewhereCompiled(t *testing.T, embed bool) (*bench, shipped) {
	other := newBench(t)
	r := other.request(other.model(1))
	r.Embed = embed
	s := other.ship(other.acquire(r))
	return newBench(t), s
}

// A compiled model is adopted with all of its files, and is a build as any other: found again,
// verified, listed and removed.
func TestCompiledModelsAreAdopted(t *testing.T) {
	for name, embed := range map[string]bool{"sidecar": false, "embedded": true} {
		t.Run(name, func(t *testing.T) {
			b, s := elsewhereCompiled(t, embed)
			before, err := os.ReadFile(s.graph)
			require.NoError(t, err)
			a := b.acquire(b.adopts(s))
			require.Equal(t, request.Adopted, a.Outcome, a.Warnings)
			require.Equal(t, compilers.Optimal, a.Compatibility.Verdict, a.Compatibility.Reason)
			require.Equal(t, compilers.Passed, a.Build.LoadCheck)
			require.Equal(t, embed, a.Build.Embed)
			require.True(t, a.Build.Put)
			require.Len(t, a.Build.Files, 1+len(s.files))
			served, err := os.ReadFile(filepath.Join(a.Path, filepath.FromSlash(a.Graph)))
			require.NoError(t, err)
			require.Equal(t, before, served)
			require.Zero(t, b.compiler.Compiles.Load(), "nothing is compiled")

			checks := b.compiler.Checks.Load()
			again := b.acquire(b.adopts(s))
			require.Equal(t, request.Hit, again.Outcome)
			require.Equal(t, a.Build.ID, again.Build.ID)
			require.Equal(t, b.read(a), b.read(again))
			require.Equal(t, checks, b.compiler.Checks.Load())
			require.Len(t, b.list(), 1)
			require.Contains(t, kinds(b.events(b.self())), event.Put)

			plain := b.adopts(s)
			plain.Adopt = false
			require.Equal(t, request.PassThrough, b.acquire(plain).Outcome, "on request only")

			damage := b.current(a.Build.Files[0].Digest)
			require.NoError(t, os.Chmod(damage, 0o600))
			require.NoError(t, os.WriteFile(damage, []byte("damaged"), 0o600))
			healed := b.acquire(b.adopts(s))
			require.Equal(t, request.Adopted, healed.Outcome, "from the user's own files")
			require.Equal(t, b.read(healed), b.read(b.acquire(b.adopts(s))))
		})
	}
}

// Files that are larger than what may be put are not even read: hashing a terabyte would keep the
// application waiting for a model that it loads as it is.
func TestModelsTooLargeToAdoptAreNotRead(t *testing.T) {
	b, s := elsewhereCompiled(t, false)
	bin := filepath.Join(filepath.Dir(s.graph), s.files[0])
	require.NoError(t, os.Truncate(bin, 1<<40))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // reading takes several
	defer cancel()
	a, err := b.cache.Acquire(ctx, b.adopts(s), nil)
	require.NoError(t, err)
	defer a.View.Close()
	require.Equal(t, request.PassThrough, a.Outcome)
	require.Contains(t, strings.Join(a.Warnings, "\n"),
		"not adopted: its files have 1.0 TiB; ")
}

// Every file that the graph refers to has to come, and is part of the identity.
func TestAdoptionTakesAllFiles(t *testing.T) {
	b, s := elsewhereCompiled(t, false)
	r := b.adopts(s)
	r.External = nil
	_, err := b.cache.Acquire(context.Background(), r, nil)
	var need *identity.NeedFilesError
	require.ErrorAs(t, err, &need)
	require.Equal(t, s.files, need.Locations)
	first := b.acquire(b.adopts(s))
	other := newBench(t)
	changed := other.ship(other.acquire(other.request(other.model(1))))
	bin := filepath.Join(filepath.Dir(changed.graph), changed.files[0])
	require.NoError(t, os.WriteFile(bin, append(slices.Clone(must(os.ReadFile(bin))), 0), 0o644))
	a := b.acquire(b.adopts(changed))
	require.Equal(t, request.PassThrough, a.Outcome)
	require.NotEqual(t, first.ModelDigest, a.ModelDigest)
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// A model that is no sound artefact for the request is not adopted but passed through as before,
// and the answer has the reason.
func TestAdoptionIsStrict(t *testing.T) {
	for name, c := range map[string]struct {
		change func(b *bench, s *shipped) *request.Request
		says   string
	}{
		"does not load": {func(b *bench, s *shipped) *request.Request {
			bin := filepath.Join(filepath.Dir(s.graph), s.files[0])
			require.NoError(b, os.WriteFile(bin, []byte("standin 00\n"), 0o644))
			return b.adopts(*s)
		}, "not adopted: it does not load: "},
		"another execution provider's": {func(b *bench, s *shipped) *request.Request {
			m := wrapsIR("part.bin", 1)
			require.NoError(b, os.WriteFile(s.graph, m.Encode(), 0o644))
			require.NoError(b,
				os.WriteFile(filepath.Join(filepath.Dir(s.graph), "part.bin"), []byte("context"),
					0o644))
			s.files = []string{"part.bin"}
			return b.adopts(*s)
		},
			`not adopted: the build does not fit this request: ` +
				`node "ContextNode" is of execution provider "OpenVINOExecutionProvider"`},
		"kept nowhere": {func(b *bench, s *shipped) *request.Request {
			r := b.adopts(*s)
			r.Store = "none"
			return r
		}, "not adopted: the request asks to store nothing"},
		"outside its directory": {func(b *bench, s *shipped) *request.Request {
			m := wrapsIR("../part.bin", 1)
			require.NoError(b, os.WriteFile(s.graph, m.Encode(), 0o644))
			s.files = nil
			return b.adopts(*s)
		}, `not adopted: `},
	} {
		t.Run(name, func(t *testing.T) {
			b, s := elsewhereCompiled(t, false)
			a := b.acquire(c.change(b, &s))
			require.Equal(t, request.PassThrough, a.Outcome)
			require.True(t,
				slices.ContainsFunc(a.Warnings,
					func(w string) bool { return strings.HasPrefix(w, c.says) }), a.Warnings)
			require.Empty(t, b.list())
		})
	}
}

// An adopted model is private to its user, unless that is a publisher, and other users never see
// it.
func TestAdoptedModelsAreTheirUsersOwn(t *testing.T) {
	b, s := elsewhereCompiled(t, false)
	r := b.adopts(s)
	r.Peer.UID = stranger
	a := b.acquire(r)
	require.Equal(t, request.Adopted, a.Outcome, a.Warnings)
	require.Equal(t, rights.OwnScope(r.Peer), a.Build.Scope)
	mine := b.acquire(b.adopts(s))
	require.Equal(t, request.Adopted, mine.Outcome, "another user's bytes are not served")
	require.Equal(t, "shared", mine.Build.Scope)
}

// Where a request compiles nothing, nothing is adopted either.
func TestAdoptionOnRequestOnly(t *testing.T) {
	b, s := elsewhereCompiled(t, false)
	r := b.adopts(s)
	r.OnMiss = request.Fail
	a := b.acquire(r)
	require.Equal(t, request.PassThrough, a.Outcome)
	require.Contains(t, a.Why, "it would be adopted")
	e := b.explain(b.adopts(s))
	require.Equal(t, request.PassThrough, e.Decision)
	require.Contains(t, e.Reason, "it would be adopted")
	r = b.adopts(s)
	r.OnMiss = request.Bypass
	require.Equal(t, request.PassThrough, b.acquire(r).Outcome)
	require.Empty(t, b.list())

	key := b.adopts(s)
	key.OnMiss = request.KeyOnly
	a = b.acquire(b.adopts(s))
	require.Equal(t, a.RequestKey, b.acquire(key).RequestKey)
	require.Equal(t, query.Hit, b.explain(b.adopts(s)).Decision)
	compared := b.adopts(s)
	compared.VerifyOutput = 0.01
	require.Contains(t, b.acquire(compared).Warnings[0],
		"the model is compiled already, so there is no source to compare with")
	source := b.request(b.model(2))
	source.Adopt = true
	require.Equal(t, request.Compiled, b.acquire(source).Outcome, "a source is compiled")
}

// An adopted build is judged for each runtime that it meets, and never compiled again: there is no
// source of it.
func TestAdoptedBuildsAreJudged(t *testing.T) {
	b, s := elsewhereCompiled(t, false)
	first := b.acquire(b.adopts(s))
	b.library("1.1") // which prefers to recompile what 1.0 made
	a := b.acquire(b.adopts(s))
	require.Equal(t, request.Hit, a.Outcome)
	require.Equal(t, first.Build.ID, a.Build.ID)
	require.Equal(t, compilers.PreferRecompilation, a.Compatibility.Verdict)
	require.Empty(t, b.cache.rebuilds.List())
	b.library("2.0") // which does not load it
	a = b.acquire(b.adopts(s))
	require.Equal(t, request.PassThrough, a.Outcome)
	require.Contains(t, a.Warnings[0], "not adopted: the build of ")
}

// Real compiled models are adopted, with the options that they are loaded with, and compute what
// they did.
func TestRealCompiledModelsAreAdopted(t *testing.T) {
	for name, c := range map[string]struct {
		compile, load map[string]string
	}{
		"openvino-1.8.1": {},
		"openvino-1.4.0": {},
		"qnn-2.7.0": {compile: map[string]string{"soc_model": "60",
			"enable_htp_fp16_precision": "1"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.Runtime(t, name)
			ep := r.EPs[0].EP
			made, ort := newRealBench(t, r)
			asked := made.request(made.openFile(writeTo(t, compilertest.Dense(1, 64, 1))))
			asked.EPs = []identity.EP{{Name: ep, Options: c.compile}}
			compiled := made.acquire(asked)
			s := made.ship(compiled)

			b, _ := newRealBench(t, r)
			a := b.acquire(b.adopts(s, identity.EP{Name: ep, Options: c.load}))
			require.Equal(t, request.Adopted, a.Outcome, a.Warnings)
			require.Equal(t, compilers.Passed, a.Build.LoadCheck)
			require.Equal(t, compiled.Build.EPs[0].HardwareArchitecture,
				a.Build.EPs[0].HardwareArchitecture)
			require.Equal(t, cas.Digest{}, a.Build.EPs[0].LibraryDigest)
			run := func(a *request.Answer) []byte {
				return b.outputs(ort,
					compilers.CheckJob{Runtime: r,
						EPs: []compilers.EP{{Name: ep, Options: a.ProviderOptions[ep]}},
						Session: compilers.Session{SessionOptions: a.SessionOptions,
							GraphOptimizationLevel: a.GraphOptimizationLevel},
						Graph: filepath.Join(a.Path, filepath.FromSlash(a.Graph))})
			}
			require.Equal(t, run(compiled), run(a))
			again := b.acquire(b.adopts(s, identity.EP{Name: ep, Options: c.load}))
			require.Equal(t, request.Hit, again.Outcome)
			require.Equal(t, slices.Sorted(maps.Values(b.read(a))),
				slices.Sorted(maps.Values(made.read(compiled))),
				"the bytes are those that were shipped")
		})
	}
}

func writeTo(t *testing.T, model []byte) string {
	path := filepath.Join(t.TempDir(), "m.onnx")
	require.NoError(t, os.WriteFile(path, model, 0o644))
	return path
}

// An artefact that is written to after its digest was taken is not stored under that digest.
func TestArtefactWrittenAfterItWasIdentifiedIsNotAdopted(t *testing.T) {
	for name, embed := range map[string]bool{"sidecar": false, "graph": true} {
		t.Run(name, func(t *testing.T) {
			b, s := elsewhereCompiled(t, embed)
			r := b.adopts(s)
			other := newBench(t)
			changed := other.request(other.model(2))
			changed.Embed = embed
			from := other.ship(other.acquire(changed))
			content, to := must(os.ReadFile(from.graph)), s.graph
			if !embed {
				content = must(os.ReadFile(filepath.Join(filepath.Dir(from.graph), from.files[0])))
				to = filepath.Join(filepath.Dir(s.graph), s.files[0])
			}
			puts, owner := &b.cache.Claims.Puts, b.cache.owners.OwnerOf(r.Peer.UID)
			leave, err := puts.Lock(t.Context(), owner)
			require.NoError(t, err)
			answered := b.asked(r)
			require.Eventually(t, func() bool {
				listed, err := b.cache.JobList.Visible(t.Context(), request.Peer{})
				return err == nil && len(listed) == 1 && listed[0].Phase == "queued"
			}, soon, time.Millisecond, "the adoption waits for its turn to copy")
			require.NoError(t, os.WriteFile(to, content, 0o644))
			leave()
			got := <-answered
			require.NoError(t, got.err)
			require.Equal(t, request.PassThrough, got.answer.Outcome)
			require.Contains(t, got.answer.Warnings[0], "changed")
			require.Empty(t, b.list())
		})
	}
}
