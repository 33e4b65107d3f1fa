package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
)

// showing has the request show what is beside the application's library, as clients do.
func (a *application) showing(r *request.Request) *request.Request {
	ref := &r.Runtime.EPLibraries[0]
	ref.Beside, ref.Complete = make(map[string]*os.File), true
	for _, name := range compilers.LibrariesBeside(ref.Path) {
		ref.Beside[name] = a.openFile(filepath.Join(filepath.Dir(ref.Path), name))
	}
	return r
}

// addLibraryBeside adds a library to a runtime's directory.
func (b *bench) addLibraryBeside(dir, name, text string) {
	path := filepath.Join(dir, name)
	require.NoError(b, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(b, os.WriteFile(path, []byte(text), 0o644))
}

// Another user's libraries of equal content are the registered runtime, wherever they are: the
// daemon compiles, and the build is shared.
func TestEqualLibrariesAreTheRegisteredRuntime(t *testing.T) {
	b := newBenchWith(t, nil)
	// as the registered one; its ONNX Runtime is another version
	app := b.application(stranger, "1.0")
	for _, dir := range []string{b.runtime, app.dir} {
		b.addLibraryBeside(dir, "libsdk.so.5", "an SDK")
	}
	b.addLibraryBeside(app.dir, "libonnxruntime_providers_shared.so", "no part of an EP's library")
	ask := func() *request.Request {
		r := app.showing(app.ask(b.model(1)))
		r.OnMiss = request.Wait
		return r
	}
	a := b.acquire(ask())
	require.Equal(t, request.Compiled, a.Outcome)
	require.Equal(t, b.runtime, a.Runtime)
	require.Equal(t, "shared", a.Build.Scope)
	require.Equal(t, compilers.Passed, a.Build.LoadCheck)
	again := b.acquire(ask())
	require.Equal(t, request.Hit, again.Outcome)
	require.Equal(t, compilers.Optimal, again.Compatibility.Verdict)
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome, "it is everybody's")
	require.EqualValues(t, 1, b.compiler.Compiles.Load())

	b.addLibraryBeside(b.runtime, "libsdk.so.5", "an update")
	_, err := b.cache.Acquire(context.Background(), ask(), nil)
	require.Equal(t, apierr.Unavailable, apierr.ClassOf(err),
		"the registered runtime is another by now")
	b.addLibraryBeside(app.dir, "libsdk.so.5", "an update")
	require.Equal(t, b.runtime, b.acquire(ask()).Runtime, "both are updated")
}

// An ONNX Runtime does not load the graphs that those from 1.32 on write: libraries beside such a
// one are not those of an application with an earlier one, which compiles itself.
func TestEqualLibrariesBesideALaterONNXRuntime(t *testing.T) {
	later := filepath.Join(t.TempDir(), "later")
	_, err := standin.Library(later, "1.32.0", standin.SDK{Version: "1.0", Hardware: "sim-1"})
	require.NoError(t, err)
	b := newBenchWith(t, func(o *Options) {
		o.Runtimes = []compilers.Runtime{{Directory: later}}
	})
	app := b.application(stranger, "1.0")
	r := app.showing(app.ask(b.model(1)))
	r.OnMiss = request.Wait
	_, err = b.cache.Acquire(t.Context(), r, nil)
	require.Error(t, err)
	require.Equal(t, "claim own", factsOf(err)[runtimes.FactAlternatives])
	app.claim(app.showing(app.ask(b.model(1))))
	r = app.showing(app.ask(b.model(2)))
	r.OnMiss, r.Runtime.ORTVersion = request.Wait, "1.32.1"
	require.Equal(t, later, b.acquire(r).Runtime)
}

// A program that states only its ONNX Runtime gets a build of a runtime whose graphs that loads:
// its own version first, and never one that writes later graphs.
func TestRuntimeForAProgramsONNXRuntime(t *testing.T) {
	dirs := make([]compilers.Runtime, 2)
	for i, version := range []string{"1.32.0", "1.31.1"} {
		dirs[i].Directory = filepath.Join(t.TempDir(), version)
		_, err := standin.Library(dirs[i].Directory, version, standin.SDK{Version: "1.0",
			Hardware: "sim-1"})
		require.NoError(t, err)
	}
	b := newBenchWith(t, func(o *Options) { o.Runtimes = dirs })
	for version, want := range map[string]int{"": 0, "1.32.0": 0, "1.32.1": 0, "1.31.1": 1,
		"1.30.0": 1} {
		r := b.request(b.model(1))
		r.Runtime.ORTVersion = version
		require.Equal(t, dirs[want].Directory, b.acquire(r).Runtime, version)
	}

	alone := newBenchWith(t, func(o *Options) { o.Runtimes = dirs[:1] })
	for _, dir := range []string{"", dirs[0].Directory} {
		r := alone.request(alone.model(1))
		r.Runtime.Directory, r.Runtime.ORTVersion = dir, "1.30.0"
		_, err := alone.cache.Acquire(t.Context(), r, nil)
		require.Equal(t, apierr.Unavailable, apierr.ClassOf(err))
		require.ErrorContains(t, err, "may not load what the runtime compiles, which has 1.32.0")
	}
}

// The files beside an EP library are its SDK: a difference there makes another runtime, and the
// builds of the first are not served.
func TestLibrariesBesideTellRuntimesApart(t *testing.T) {
	for name, change := range map[string]func(b *bench, app *application){
		"another": func(b *bench, app *application) {
			b.addLibraryBeside(app.dir, "libsdk.so.5",
				"another SDK")
		},
		"one is missing": func(b *bench, app *application) {
			require.NoError(b, os.Remove(filepath.Join(app.dir, "libsdk.so.5")))
		},
		"one more": func(b *bench, app *application) {
			b.addLibraryBeside(app.dir, "libplugin.so",
				"a plugin")
		},
		"one more, brought along": func(b *bench, app *application) {
			b.addLibraryBeside(app.dir+".libs", "libc++-71bc.so.1", "a runtime library")
		},
		"another library": func(b *bench, app *application) {
			_, err := standin.Library(app.dir, "1.30.0", standin.SDK{Version: "1.1",
				Hardware: "sim-1"})
			require.NoError(b, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			app := b.application(stranger, "1.0")
			b.addLibraryBeside(b.runtime, "libsdk.so.5", "an SDK")
			b.addLibraryBeside(app.dir, "libsdk.so.5", "an SDK")
			model := b.model(1)
			r := app.showing(app.ask(model))
			r.OnMiss = request.Wait
			require.Equal(t, request.Compiled, b.acquire(r).Outcome)
			change(b, app)
			r = app.showing(app.ask(model))
			r.OnMiss = request.Wait
			_, err := b.cache.Acquire(context.Background(), r, nil)
			require.Equal(t, apierr.Unavailable, apierr.ClassOf(err))
			require.Equal(t, "claim own", factsOf(err)[runtimes.FactAlternatives])
			r.OnMiss = request.Fail
			_, err = b.cache.Acquire(context.Background(), r, nil)
			require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
			app.claim(app.showing(app.ask(model)))
		})
	}
}

func factsOf(err error) map[string]string {
	var e *apierr.Error
	_ = errors.As(err, &e)
	return e.Facts
}

// The daemon advises a client with libraries that it may not run.
func TestErrorsProposeAClaim(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	instead := func(change func(*request.Request)) string {
		r := app.ask(b.model(1))
		r.OnMiss = request.Wait
		change(r)
		_, err := b.cache.Acquire(context.Background(), r, nil)
		require.Equal(t, apierr.Unavailable, apierr.ClassOf(err))
		return factsOf(err)[runtimes.FactAlternatives]
	}
	require.Equal(t, "show claim own", instead(func(*request.Request) {}))
	require.Equal(t, "claim own", instead(func(r *request.Request) { app.showing(r) }))
	require.Equal(t, "own",
		instead(func(r *request.Request) { app.showing(r).OnMiss = request.Background }),
		"only a daemon can compile in the background")
	require.Equal(t, "own", instead(func(r *request.Request) { app.showing(r).Store = "none" }),
		"a claim is for what is kept")
	require.Equal(t, "own",
		instead(func(r *request.Request) {
			app.showing(r).Group = []identity.Files{{Name: "2.onnx",
				Graph: b.model(2)}}
		}))
	require.Equal(t, "show claim own",
		instead(func(r *request.Request) { r.Runtime = runtimes.Ref{Directory: app.dir} }))
	options := b.options()
	options.Runtimes = nil
	require.NoError(t, b.cache.Reload(options))
	require.Equal(t, "own claim", instead(func(r *request.Request) { app.showing(r) }),
		"it can compile for nobody, and steps aside")
}

// A library on a file system that never answers holds up its user's requests until their deadlines,
// and no others.
func TestLibrariesOnAFileSystemThatNeverAnswers(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "1.0")
	stuck := unansweredFile(t, "libsdk.so.5")
	for range 2 {
		r := app.showing(app.ask(b.model(1)))
		r.OnMiss = request.Wait
		r.Runtime.EPLibraries[0].Beside["libsdk.so.5"] = stuck
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		_, err := b.cache.Acquire(ctx, r, nil)
		require.Contains(t, []apierr.Class{apierr.Cancelled, apierr.Deadline},
			apierr.ClassOf(err))
	}
	other := b.application(stranger+1, "1.0")
	r := other.showing(other.ask(b.model(1)))
	r.OnMiss = request.Wait
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
	s, err := cas.StampOf(stuck)
	require.NoError(t, err)
	require.NotZero(t, s.Size)
}

// Package managers link one file into several environments. A library that gets another name while
// it is hashed is the same library.
func TestLibraryIsLinkedElsewhereWhileItIsHashed(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	owner := b.cache.owners.OwnerOf(stranger)
	leave, err := b.cache.readGate.Lock(b.Context(), owner) // its libraries are hashed afterwards
	require.NoError(t, err)
	path := app.spec.EPs[0].Path
	linked := make(chan error, 1)
	go func() {
		defer leave()
		for b.cache.readGate.UsersOf(owner) < 2 && b.Context().Err() == nil {
			time.Sleep(time.Millisecond)
		}
		linked <- os.Link(path, filepath.Join(filepath.Dir(app.dir), "another environment"))
	}()
	app.claim(app.ask(b.model(1)))
	require.NoError(t, <-linked)
}

// linkElsewhere gives the library of a runtime another name, in another environment.
func (b *bench) linkElsewhere(library string) {
	require.NoError(b, os.Link(library, filepath.Join(b.TempDir(), "another environment")))
}

// A compile with a runtime's libraries goes on when one of them is linked elsewhere. It ends if
// another file was in a library's place meanwhile, even if the first one is back by now.
func TestLibrariesKeepTheirDigestWhenLinkedElsewhere(t *testing.T) {
	b := newBench(t)
	app := b.application(b.cache.uid, "1.0") // as the registered runtime
	library := filepath.Join(b.runtime, filepath.Base(app.spec.EPs[0].Path))
	aside := library + ".aside"
	for name, row := range map[string]struct {
		between func()
		refused bool
	}{
		"linked elsewhere": {between: func() { b.linkElsewhere(library) }},
		"moved aside, and back": {func() {
			require.NoError(t, os.Rename(library, aside))
			require.NoError(t, os.Rename(aside, library))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := b.request(b.model(uint64(len(name))))
			r.OnMiss = request.ForClaim
			claim := b.acquire(r)
			require.Equal(t, request.Claimed, claim.Outcome)
			put := app.compile(r, claim.Claim)
			row.between()
			taken, err := b.cache.Claims.Put(t.Context(), r.Peer, put, nil)
			if row.refused {
				require.ErrorIs(t, err, runtimes.ErrFilesChanging)
				return
			}
			require.NoError(t, err)
			require.NoError(t, taken.View.Close())
		})
	}
	b.close()
	b.wrap = &interrupted{Compiler: b.compiler, during: func() { b.linkElsewhere(library) }}
	b.open()
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(9))).Outcome)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}
