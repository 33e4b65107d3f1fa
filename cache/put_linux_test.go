package cache

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/views"
)

// claimed is an application that holds a claim, with what it compiled for it.
type claimed struct {
	*application
	request *request.Request
	claim   *request.Claim
	put     *claims.Put
}

func newClaimed(b *bench, change func(*request.Request)) *claimed {
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	if change != nil {
		change(r)
	}
	claim := app.claim(r).Claim
	return &claimed{app, r, claim, app.compile(r, claim)}
}

// reopen puts another file in place of one that is put.
func (c *claimed) reopen(i, flags int) {
	path := c.put.Files[i].File.Name()
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	require.NoError(c, err)
	c.put.Files[i].File = c.file(fd)
}

func (c *claimed) file(fd int) *os.File {
	f := os.NewFile(uintptr(fd), "descriptor")
	c.Cleanup(func() { f.Close() })
	return f
}

// content replaces a file by one with other bytes.
func (c *claimed) content(i int, content []byte) {
	path := filepath.Join(c.TempDir(), "file")
	require.NoError(c, os.WriteFile(path, content, 0o644))
	c.put.Files[i].File = c.openFile(path)
}

func (c *claimed) bytes(i int) []byte {
	b, err := os.ReadFile(c.put.Files[i].File.Name())
	require.NoError(c, err)
	return b
}

// graph rewrites the graph, without a change of its length.
func (c *claimed) graph(from, to string) {
	b := c.bytes(0)
	require.Len(c, to, len(from))
	require.Contains(c, string(b), from)
	c.content(0, bytes.ReplaceAll(b, []byte(from), []byte(to)))
}

func (c *claimed) memory(seals int) *os.File {
	fd, err := unix.MemfdCreate("graph", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(c, err)
	f := c.file(fd)
	_, err = f.Write(c.bytes(0))
	require.NoError(c, err)
	_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
	require.NoError(c, err)
	return f
}

// A hostile artefact is refused with its reason, leaves no file behind, and ends the claim.
func TestHostilePuts(t *testing.T) {
	const sealed = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	cases := map[string]struct {
		change func(c *claimed)
		says   string // "": accepted
	}{
		"sound":              {func(*claimed) {}, ""},
		"sealed memory file": {func(c *claimed) { c.put.Files[0].File = c.memory(sealed) }, ""},

		"memory file": {func(c *claimed) { c.put.Files[0].File = c.memory(unix.F_SEAL_GROW) },
			"opened for writing"},
		"open for writing": {func(c *claimed) { c.reopen(1, unix.O_RDWR) }, "opened for writing"},
		"for writing only": {func(c *claimed) { c.reopen(1, unix.O_WRONLY) },
			"not opened for reading"},
		"for nothing":   {func(c *claimed) { c.reopen(1, unix.O_PATH) }, "not opened for reading"},
		"symbolic link": {link, "not opened for reading"},
		"directory": {func(c *claimed) { c.put.Files[1].File = c.openFile(c.TempDir()) },
			"not a regular file"},
		"FIFO": {fifo, "not a regular file"},
		"device": {func(c *claimed) { c.put.Files[1].File = c.openFile("/dev/zero") },
			"not a regular file"},
		"huge": {func(c *claimed) { useSparseFile(c, 1, 1<<40) },
			"all files together may have"},
		"growing":        {grow, "changed while it was read"},
		"no files":       {func(c *claimed) { c.put.Files = nil }, "0 files"},
		"too many files": {many, "files, not 1 to"},
		"file twice": {func(c *claimed) { c.put.Files = append(c.put.Files, c.put.Files[1]) },
			"is listed twice"},
		"file for nothing": {func(c *claimed) {
			c.put.Files = append(c.put.Files,
				claims.PutFile{Name: "more.bin", File: c.put.Files[1].File})
		}, `no node refers to file "more.bin"`},
		"graph twice": {func(c *claimed) {
			c.put.Files = append(c.put.Files,
				claims.PutFile{Name: "more_ctx.onnx", File: c.put.Files[0].File})
		}, "no node refers"},
		"two graphs": {func(c *claimed) { c.put.Graphs = 2 }, "2 graphs"},
		"other graph's name": {func(c *claimed) { c.put.Files[0].Name = "model_ctx.onnx" },
			"the graph is called"},
		"sidecar missing": {func(c *claimed) { c.put.Files = c.put.Files[:1] },
			"not one of the build's files"},
		"sidecar elsewhere": {func(c *claimed) {
			c.put.Files[1].Name = "sub/" +
				c.put.Files[1].Name
		}, "not one of the build's files"},
		"name leads up": {func(c *claimed) { c.put.Files[1].Name = "../x.bin" },
			"not a clean relative name"},
		"absolute name": {func(c *claimed) { c.put.Files[1].Name = "/tmp/x.bin" },
			"not a clean relative name"},
		"unclean name": {func(c *claimed) { c.put.Files[1].Name = "./x.bin" },
			"not a clean relative name"},
		"name of Windows": {func(c *claimed) { c.put.Files[1].Name = `..\x.bin` },
			"not a clean relative name"},
		"name with a NUL": {func(c *claimed) { c.put.Files[1].Name = "x\x00.bin" },
			"control characters"},
		"name that is none": {func(c *claimed) { c.put.Files[1].Name = "" },
			"the name has 0 bytes"},
		"long name": {func(c *claimed) { c.put.Files[1].Name = strings.Repeat("x", 300) },
			"the name has 300 bytes"},
		"deep name": {func(c *claimed) { c.put.Files[1].Name = "a/b/c/d/e/x.bin" },
			"directories deep"},
		"graph leads out": {func(c *claimed) {
			c.graph(c.put.Files[1].Name, "../../../"+c.put.Files[1].Name[9:])
		}, "lies outside the artefact"},
		"graph leads to a secret": {func(c *claimed) {
			c.graph(c.put.Files[1].Name,
				("/etc/shadow" + strings.Repeat("x", 50))[:len(c.put.Files[1].Name)])
		}, "is absolute"},
		"graph is its own sidecar": {func(c *claimed) { embedSelf(c) },
			"one of its own context binaries"},
		"another EP": {func(c *claimed) {
			c.graph(standin.EP,
				"StandOutExecutionProvider"[:len(standin.EP)])
		}, "is of execution provider"},
		"not compiled": {func(c *claimed) { c.content(0, compilertest.Dense(1, 8, 1)) },
			"no EPContext node"},
		"truncated": {func(c *claimed) { b := c.bytes(0); c.content(0, b[:len(b)-20]) },
			"offset"},
		"empty":         {func(c *claimed) { c.content(0, nil) }, "not a compiled form of it"},
		"empty sidecar": {func(c *claimed) { c.content(1, nil) }, "is empty"},
		"garbage": {func(c *claimed) {
			c.content(0,
				bytes.Repeat([]byte("\xff\x00garbage"), 100))
		}, "not a compiled form of it"},
		"another model's": {func(c *claimed) {
			c.graph("\x01y", "\x01q")
		}, "the model does not have"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			c := newClaimed(b, nil)
			tc.change(c)
			a, err := b.cache.Claims.Put(context.Background(), c.request.Peer, c.put, nil)
			if tc.says == "" {
				require.NoError(t, err)
				require.NoError(t, a.View.Close())
				return
			}
			require.Nil(t, a)
			require.Equal(t, apierr.BadRequest, apierr.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, tc.says)
			require.Empty(t, b.list(), "nothing is kept")
			left, err := os.ReadDir(filepath.Join(b.state, "staging"))
			require.NoError(t, err)
			require.Empty(t, left)
			require.Zero(t, b.reserved())
			_, err = b.cache.Claims.Put(context.Background(), c.request.Peer, c.put, nil)
			require.Equal(t, apierr.NotFound, apierr.ClassOf(err), "the claim is over: %v", err)
			require.ErrorContains(t, err, "refused")
			require.Eventually(t, func() bool { return b.cache.jobs.Count() == 0 }, soon,
				time.Millisecond)
		})
	}
}

func link(c *claimed) {
	path := filepath.Join(c.TempDir(), "link")
	require.NoError(c, os.Symlink("/etc/passwd", path))
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	require.NoError(c, err)
	c.put.Files[1].File = c.file(fd)
}

func fifo(c *claimed) {
	path := filepath.Join(c.TempDir(), "fifo")
	require.NoError(c, unix.Mkfifo(path, 0o600))
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	require.NoError(c, err)
	c.put.Files[1].File = c.file(fd)
}

func useSparseFile(c *claimed, i int, size int64) {
	path := filepath.Join(c.TempDir(), "sparse")
	require.NoError(c, os.WriteFile(path, nil, 0o644))
	require.NoError(c, os.Truncate(path, size))
	c.put.Files[i].File = c.openFile(path)
}

func many(c *claimed) {
	for i := range 64 {
		c.put.Files = append(c.put.Files,
			claims.PutFile{Name: fmt.Sprintf("%d.bin", i), File: c.put.Files[1].File})
	}
}

// grow has the file written to for as long as it is put.
func grow(c *claimed) {
	path := filepath.Join(c.TempDir(), "growing")
	require.NoError(c, os.WriteFile(path, make([]byte, 8<<20), 0o644))
	c.put.Files[1].File = c.openFile(path)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(c, err)
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-done:
				return
			default:
				if _, err := f.Write([]byte("x")); err != nil {
					return
				}
			}
		}
	}()
	c.Cleanup(func() { close(done); <-stopped; f.Close() })
}

// embedSelf makes a graph that names itself as its context binary.
func embedSelf(c *claimed) {
	binary := c.put.Files[1].Name
	m := compilertest.DenseModel(1, 8, 1)
	name := c.put.Files[0].Name
	m.Nodes = []tinymodel.Node{{Name: "n", Op: "EPContext", Domain: "com.microsoft",
		Inputs: []string{m.Inputs[0].Name}, Outputs: []string{m.Outputs[0].Name},
		Attributes: map[string]any{"main_context": int64(1), "embed_mode": int64(0),
			"ep_cache_context": binary, "source": standin.EP}}}
	m.Initializers = nil
	m.Nodes = append(m.Nodes, m.Nodes[0])
	m.Nodes[1].Name, m.Nodes[1].Outputs = "o", []string{"unused"}
	m.Nodes[1].Attributes = map[string]any{"main_context": int64(1), "embed_mode": int64(0),
		"ep_cache_context": name, "source": standin.EP}
	c.content(0, m.Encode())
}

// A put build is protected no longer than the client keeps its descriptor: a store full of put
// builds frees space at once after that.
func TestReleasedPutMayBeEvicted(t *testing.T) {
	for _, holds := range []bool{true, false} {
		b := newBench(t)
		c := newClaimed(b, func(r *request.Request) { r.KeepsView = holds })
		a := c.application.put(c.put)
		require.NotEmpty(t, b.cache.Store.Collector().WhyProtected(a.Build.ID, &views.OwnFiles{}))
		require.NoError(t, a.View.Close())
		want := "served recently, perhaps by path"
		if holds {
			want = ""
		}
		require.Equal(t, want, b.cache.Store.Collector().
			WhyProtected(a.Build.ID, &views.OwnFiles{}))
	}
}

// A client that has put an artefact gets it, even if all builds are collected at that moment.
func TestPutIsAnsweredBeforeEviction(t *testing.T) {
	b := newBench(t)
	b.cache.Claims.Limiter.Burst = 1 << 20 // each round may take a claim
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	r.KeepsView = true
	ctx, stop := context.WithCancel(context.Background())
	var collecting sync.WaitGroup
	collecting.Go(func() {
		for ctx.Err() == nil {
			b.collect(b.plan(0))
		}
	})
	defer collecting.Wait()
	defer stop()
	for range 100 {
		a := b.acquire(r)
		if a.Outcome == request.Claimed {
			put, err := b.cache.Claims.Put(context.Background(), r.Peer, app.compile(r, a.Claim),
				nil)
			require.NoError(t, err)
			require.NoError(t, put.View.Close())
		} else {
			require.NoError(t, a.View.Close())
		}
	}
}

// A build that all its waiters have had and released may be evicted, because no other taker is
// expected.
func TestReleasedBuildMayBeEvictedAfterTheWait(t *testing.T) {
	b := newBench(t)
	c := newClaimed(b, func(r *request.Request) { r.KeepsView = true })
	var waits []<-chan waitResult
	for _, miss := range []request.OnMiss{request.ForClaim, request.Wait} {
		r := c.application.ask(c.request.Graph)
		r.OnMiss, r.KeepsView = miss, true
		waits = append(waits, b.asked(r))
	}
	a := c.application.put(c.put)
	require.NoError(t, a.View.Close())
	for _, w := range waits {
		got := <-w
		require.NoError(t, got.err)
		require.Equal(t, request.Waited, got.answer.Outcome)
		require.Equal(t, store.KeptInUse, b.cache.Store.Collector().
			WhyProtected(a.Build.ID, &views.OwnFiles{}))
		require.NoError(t, got.answer.View.Close())
	}
	require.Empty(t, b.cache.Store.Collector().WhyProtected(a.Build.ID, &views.OwnFiles{}))
}

func TestPutWithoutOwner(t *testing.T) {
	b := newBench(t)
	c := newClaimed(b, nil)
	for name, tc := range map[string]struct {
		uid   uint32
		claim string
	}{
		"no claim": {stranger, ""}, "made up": {stranger, jobs.NewID()},
		"another user's": {stranger + 1, c.claim.ID},
	} {
		put := *c.put
		put.Claim = tc.claim
		_, err := b.cache.Claims.Put(context.Background(), request.Peer{UID: tc.uid}, &put, nil)
		require.Equal(t, apierr.NotFound, apierr.ClassOf(err), name)
		require.Equal(t, apierr.NotFound,
			apierr.ClassOf(b.cache.Claims.GiveUp(request.Peer{UID: tc.uid}, tc.claim, "", 0)), name)
	}
	c.application.put(c.put)
	_, err := b.cache.Claims.Put(context.Background(), c.request.Peer, c.put, nil)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
	require.ErrorContains(t, err, "submitted already")
	require.Zero(t, b.reserved())
	require.Len(t, b.list(), 1)
}

// The form that was asked for is the one that is taken.
func TestPutOfTheOtherForm(t *testing.T) {
	for _, embed := range []bool{false, true} {
		b := newBench(t)
		c := newClaimed(b, func(r *request.Request) { r.Embed = embed })
		other := *c.request
		other.Embed = !embed
		_, err := b.cache.Claims.Put(context.Background(), c.request.Peer,
			c.application.compile(&other, c.claim), nil)
		require.ErrorContains(t, err, "embed_mode")
		claim := c.application.claim(c.request)
		c.application.put(c.application.compile(c.request, claim.Claim))
	}
}

// A conversion of what a user put is that user's as well, and bounded with it.
func TestConversionsOfPutsAreBoundedWithThem(t *testing.T) {
	b := newBench(t)
	spec, err := compilers.Find(b.runtime)
	require.NoError(t, err)
	app := &application{bench: b, uid: b.cache.uid, spec: spec, worker: standin.New()}
	r := b.request(b.model(1))
	r.OnMiss = request.ForClaim
	put := app.put(app.compile(r, app.claim(r).Claim))
	var size int64
	for _, f := range put.Build.Files {
		size += f.Size
	}
	b.reload(func(o *Options) { o.Claims.UserBytes = size + size/2 })
	other := b.request(r.Graph)
	other.Embed = true
	a := b.acquire(other)
	require.Equal(t, request.Hit, a.Outcome)
	require.Contains(t, strings.Join(a.Warnings, " "), "not stored: ")
	require.Contains(t, strings.Join(a.Warnings, " "), "builds submitted by uid")
	require.Len(t, b.list(), 1)
	b.reload(func(o *Options) { o.Claims.UserBytes = 3 * size })
	require.Empty(t, b.acquire(other).Warnings)
	require.Len(t, b.list(), 2)
}

// Writes of the client after its put are in no artefact.
func TestPutStoresTheCopyItChecked(t *testing.T) {
	b := newBench(t)
	c := newClaimed(b, nil)
	got := c.application.put(c.put)
	before := b.read(got)
	for _, f := range c.put.Files {
		require.NoError(t, os.WriteFile(f.File.Name(), []byte("other bytes"), 0o644))
	}
	again := b.acquire(c.request)
	require.Equal(t, request.Hit, again.Outcome)
	require.Equal(t, before, b.read(again))
}

// A library that is replaced between the claim and the put may have made another artefact than the
// claim was for.
func TestLibraryReplacedUnderAClaim(t *testing.T) {
	b := newBench(t)
	c := newClaimed(b, nil)
	_, err := standin.Library(c.dir, "1.30.0", standin.SDK{Version: "7.2", Hardware: "sim-1"})
	require.NoError(t, err)
	_, err = b.cache.Claims.Put(context.Background(), c.request.Peer, c.put, nil)
	require.Equal(t, apierr.BadRequest, apierr.ClassOf(err))
	require.ErrorContains(t, err, "replaced")
}

// Package managers link libraries into many places: the one that is replaced has other names still.
func TestLinkedLibraryReplacedUnderAClaim(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	lib := app.spec.EPs[0].Path
	require.NoError(t, os.Link(lib, filepath.Join(filepath.Dir(app.dir), "packages")))
	r := app.ask(b.model(1))
	put := app.compile(r, app.claim(r).Claim)
	_, err := standin.Library(app.dir, "1.30.0", standin.SDK{Version: "7.2", Hardware: "sim-1"})
	require.NoError(t, err)
	_, err = b.cache.Claims.Put(context.Background(), r.Peer, put, nil)
	require.ErrorContains(t, err, "replaced")
	require.Equal(t, apierr.Unavailable, b.refused(r).Class,
		"what is open now is not what would be loaded")
}

func TestLibraryWrittenUnderAClaim(t *testing.T) {
	b := newBench(t)
	c := newClaimed(b, nil)
	require.NoError(t, os.WriteFile(c.spec.EPs[0].Path, []byte("stand-in\n7.2\nsim-1\n"), 0o644))
	_, err := b.cache.Claims.Put(context.Background(), c.request.Peer, c.put, nil)
	require.ErrorContains(t, err, "replaced")
}

func TestPutUnderAnotherORT(t *testing.T) {
	b := newBench(t)
	c := newClaimed(b, nil)
	c.put.ORTVersion = "1.31.1"
	_, err := b.cache.Claims.Put(context.Background(), c.request.Peer, c.put, nil)
	require.ErrorContains(t, err, `with ONNX Runtime "1.31.1"`)
}

// Publishers put for all users with the same libraries.
func TestPublishersPutForAll(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Publishers = []uint32{stranger} })
	c := newClaimed(b, nil)
	got := c.application.put(c.put)
	require.Equal(t, "shared", got.Build.Scope)
	other := *c.application
	other.uid++
	require.Equal(t, request.Hit, b.acquire(other.ask(c.request.Graph)).Outcome)
}

func TestPutIsExplained(t *testing.T) {
	b := newBench(t)
	spec, err := compilers.Find(b.runtime)
	require.NoError(t, err)
	app := &application{bench: b, uid: stranger, spec: spec, worker: standin.New(),
		connect: context.Background()}
	r := b.request(b.model(1))
	r.Peer.UID, r.OnMiss = stranger, request.ForClaim
	app.put(app.compile(r, app.claim(r).Claim))
	r.OnMiss = request.Explain
	why := b.acquire(r)
	require.Equal(t, query.Hit, why.Explanation.Decision)
	require.Contains(t, why.Explanation.Reason, "compiled by uid 4242 with its own libraries")
	require.Equal(t, "uid 4242", why.Explanation.Candidates[0].Build.MadeBy)
	r.Peer.UID++
	require.Equal(t, query.Miss, b.acquire(r).Explanation.Decision,
		"another user knows nothing of it")
}

// Builds for libraries that are not run here are explained without running them.
func TestOwnLibrariesAreExplained(t *testing.T) {
	b := newBench(t)
	c := newClaimed(b, nil)
	ask := func(app *application, wish request.OnMiss) *request.Answer {
		r := app.ask(c.request.Graph)
		r.OnMiss = wish
		return b.acquire(r)
	}
	require.Equal(t, query.Miss, ask(c.application, request.Explain).Explanation.Decision)
	got := c.application.put(c.put)
	require.Equal(t, got.RequestKey, ask(c.application, request.KeyOnly).RequestKey)
	why := ask(c.application, request.Explain).Explanation
	require.Equal(t, query.Hit, why.Decision)
	require.Contains(t, why.Reason, "compiled by uid 4242 with its own libraries")
	require.Empty(t, why.Candidates[0].Differences)
	why = ask(b.application(stranger, "7.2"), request.Explain).Explanation
	require.Equal(t, query.Stale, why.Decision)
	require.Contains(t, why.Reason, "other libraries")
	require.Equal(t, "eps[0].library_digest", why.Candidates[0].Differences[0].Field)
}

// An artefact's metadata is the claim of its maker. Before it is served to an application with
// libraries that the daemon has, it is loaded.
func TestPutIsLoadCheckedWhateverItStates(t *testing.T) {
	for fault, hit := range map[standin.Fault]bool{standin.None: true, standin.Mutilate: false} {
		b := newBench(t)
		b.acquire(b.request(b.model(2))).View.Close() // something loads here
		app := b.application(stranger, "1.0")
		app.worker.Fault = fault
		r := app.ask(b.model(1))
		r.EPs[0].Devices = []compilers.Device{{Type: "CPU", VendorID: 0x1234, DeviceID: 1}}
		put := app.put(app.compile(r, app.claim(r).Claim))
		checks := b.compiler.Checks.Load()
		other := b.request(r.Graph)
		other.Peer.UID, other.OnMiss = stranger, request.Fail
		a, err := b.cache.Acquire(context.Background(), other, nil)
		require.Greater(t, b.compiler.Checks.Load(), checks, "it was loaded")
		if !hit {
			require.Equal(t, apierr.Stale, apierr.ClassOf(err), "%v", err)
			continue
		}
		require.NoError(t, err)
		defer a.View.Close()
		require.Equal(t, put.RequestKey, a.RequestKey)
		require.Equal(t, put.Graph, a.Graph)
	}
}

// A store that fails half way leaves the claim as it would be had nothing been put: it is held,
// unless it ended meanwhile.
func TestAPutThatIsCancelledWhileItIsStored(t *testing.T) {
	for name, c := range map[string]struct {
		meanwhile func(*claimed)
		held      bool
	}{
		"the put alone":  {func(*claimed) {}, true},
		"the connection": {func(c *claimed) { c.leave() }, false},
		"the job": {func(c *claimed) {
			for _, f := range c.cache.jobs.List() {
				f.GiveUp(c.request.Peer.UID, false)
			}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			claim := newClaimed(b, nil)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			_, err := b.cache.Claims.Put(ctx, claim.request.Peer, claim.put,
				func(p request.Progress) {
					if p.Phase == "storing" {
						c.meanwhile(claim)
						cancel()
					}
				})
			require.Equal(t, apierr.Cancelled, apierr.ClassOf(err), "%v", err)
			require.Empty(t, b.list())
			if c.held {
				require.Equal(t, request.Taken, claim.application.put(claim.put).Outcome)
			}
			require.Eventually(t, func() bool { return b.cache.jobs.Count() == 0 }, soon,
				time.Millisecond)
		})
	}
}

// A put build ends the rebuild of an earlier one that waits for a request.
func TestPutEndsARebuildThatWaits(t *testing.T) {
	b := rebuilding(t, nil)
	put := func() *request.Answer {
		c := newClaimed(b, nil)
		a, err := b.cache.Claims.Put(context.Background(), c.request.Peer, c.put, nil)
		require.NoError(t, err)
		require.NoError(t, a.View.Close())
		return a
	}
	b.cache.rebuilds.Enqueue(upkeep.RebuildRequest{Build: put().Build,
		Compile: func(context.Context, upkeep.Rebuild, *request.Request) upkeep.Outcome {
			return upkeep.Outcome{Err: workspace.ErrNoSource}
		}})
	require.Equal(t, upkeep.Waiting, b.waitForRebuilds()[0].State)
	_, err := b.cache.Remove(context.Background(), request.Peer{}, nil, true, false)
	require.NoError(t, err)
	put()
	require.Empty(t, b.cache.rebuilds.List())
}
