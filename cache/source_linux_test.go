package cache

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestSourcePathsAreKeptForReadableModels(t *testing.T) {
	for name, c := range map[string]struct {
		change func(b *bench, r *request.Request)
		why    string // it is not kept; "": it is
	}{
		"the daemon's own user": {func(*bench, *request.Request) {}, ""},
		"the daemon's own user, private": {func(b *bench, r *request.Request) {
			require.NoError(b, os.Chmod(r.Graph.Name(), 0o600))
		}, ""},
		"another user": {func(_ *bench, r *request.Request) { r.Peer.UID = stranger }, ""},
		"another user, private": {func(b *bench, r *request.Request) {
			r.Peer.UID = stranger
			require.NoError(b, os.Chmod(r.Graph.Name(), 0o600))
		}, index.WhyPrivate},
		"bytes": {func(b *bench, r *request.Request) {
			fd, err := unix.MemfdCreate("model", unix.MFD_CLOEXEC)
			require.NoError(b, err)
			writable := os.NewFile(uintptr(fd), "memfd")
			b.Cleanup(func() { writable.Close() })
			model, err := os.ReadFile(r.Graph.Name())
			require.NoError(b, err)
			_, err = writable.Write(model)
			require.NoError(b, err)
			r.Graph = b.openFile(fmt.Sprintf("/proc/self/fd/%d", fd))
		}, index.WhyNoPath},
		"deleted": {func(b *bench,
			r *request.Request) {
			require.NoError(b, os.Remove(r.Graph.Name()))
		},
			index.WhyNoPath},
		"replaced": {func(b *bench, r *request.Request) {
			other := r.Graph.Name() + ".new"
			require.NoError(b, os.WriteFile(other, []byte("another"), 0o644))
			require.NoError(b, os.Rename(other, r.Graph.Name()))
		}, index.WhyNoPath},
		"deleted, and another has the name that the kernel gives it": {func(b *bench,
			r *request.Request) {
			require.NoError(b, os.Remove(r.Graph.Name()))
			require.NoError(b, os.WriteFile(r.Graph.Name()+" (deleted)", []byte("another"), 0o644))
		}, index.WhyNoPath},
		"through a link": {func(b *bench, r *request.Request) {
			link := filepath.Join(b.TempDir(), "link.onnx")
			require.NoError(b, os.Symlink(r.Graph.Name(), link))
			r.Graph = b.openFile(link)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			graph := b.model(1)
			path := graph.Name()
			r := b.request(graph)
			c.change(b, r)
			source := b.acquire(r).Build.Source
			if c.why != "" {
				require.Equal(t, index.Source{Why: c.why}, source)
				return
			}
			require.Equal(t, index.Source{Kind: index.SourceReference, Path: path}, source)
			require.Equal(t, source, b.list()[0].Build.Source, "the store says the same")
		})
	}
}

func TestSourceAtAPathIsHashed(t *testing.T) {
	for name, c := range map[string]struct {
		change func(b *bench, path string)
		says   string
	}{
		"gone": {func(b *bench, path string) { require.NoError(b, os.Remove(path)) },
			"no such file"},
		"a link": {func(b *bench, path string) {
			require.NoError(b, os.Rename(path, path+".moved"))
			require.NoError(b, os.Symlink(path+".moved", path))
		}, "cannot be opened"},
		"a pipe": {func(b *bench, path string) {
			require.NoError(b, os.Remove(path))
			require.NoError(b, unix.Mkfifo(path, 0o600))
		}, "cannot be opened: open"},
		"another user's": {func(b *bench, path string) {
			if os.Getuid() != 0 {
				b.Skip("only root can give files away")
			}
			require.NoError(b, os.Chown(path, 4711, 4711))
			require.NoError(b, os.Chmod(path, 0o640))
		}, "owned by user 4711"},
		"not a model": {func(b *bench,
			path string) {
			require.NoError(b, os.WriteFile(path, []byte("no model"), 0o644))
		}, "has changed"},
		"another model": {func(b *bench, path string) { copyOver(b, b.model(2).Name(), path) },
			"has changed"},
		"needs other files": {func(b *bench,
			path string) {
			copyOver(b, b.external(1, nil).Graph.Name(), path)
		}, "has changed"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			build := b.acquire(b.request(b.model(1))).Build
			r, err := b.cache.keptSources.Request(context.Background(), build)
			require.NoError(t, err)
			r.Close()
			c.change(b, build.Source.Path)
			_, err = b.cache.keptSources.Request(context.Background(), build)
			require.ErrorIs(t, err, workspace.ErrNoSource)
			require.ErrorContains(t, err, build.Source.Path)
			require.ErrorContains(t, err, c.says)
		})
	}
}

// A shared model of another user's is compiled again in the background after an update, without a
// request.
func TestSharedModelsOfOtherUsersAreRebuilt(t *testing.T) {
	b := rebuilding(t, nil)
	r := b.request(b.model(1))
	r.Peer.UID = stranger
	first := b.acquire(r).Build
	require.Equal(t, "shared", first.Scope)
	b.library("2.0")
	b.want(first, "the SDK is 2.0 now")
	require.Empty(t, b.waitForRebuilds())
	require.Len(t, b.list(), 2)
	require.EqualValues(t, 2, b.compiler.Compiles.Load())

	require.NoError(t, os.Chmod(r.Graph.Name(), 0o600))
	_, err := b.cache.keptSources.Request(context.Background(), first)
	require.ErrorIs(t, err, workspace.ErrNoSource, "its user took the rights back")
	require.ErrorContains(t, err, "other users may not read it")
}

func TestStatusCountsBuildsWithoutSource(t *testing.T) {
	b := rebuilding(t, nil)
	b.acquire(b.request(b.model(1)))
	private := b.request(b.model(2))
	private.Peer.UID = stranger
	require.NoError(t, os.Chmod(private.Graph.Name(), 0o600))
	b.acquire(private)
	moved := b.acquire(b.request(b.model(3))).Build
	app := b.application(stranger, "7.1")
	asked := app.ask(b.model(4))
	app.put(app.compile(asked, app.claim(asked).Claim))
	want := map[string]uint64{index.WhyPrivate: 1, query.WhyPut: 1}
	requireSourceless := func(builds uint64) {
		t.Helper()
		s, err := b.cache.Queries.Status(context.Background(), b.self())
		require.NoError(t, err)
		require.Equal(t, []uint64{builds, 4}, []uint64{s.Sourceless.Builds, s.Sourceless.Looked})
		why := make(map[string]uint64)
		for _, one := range s.Sourceless.Why {
			why[one.Text] = one.Builds
		}
		require.Equal(t, want, why)
	}
	requireSourceless(2)
	require.NoError(t, os.Remove(moved.Source.Path))
	b.age()
	b.refresh(moved)
	require.NotEmpty(t, b.waitForRebuilds())
	want[query.WhyMissing] = 1
	requireSourceless(3)
	advice, err := b.cache.Queries.Doctor().Examine(context.Background(), request.Peer{})
	require.NoError(t, err)
	i := slices.IndexFunc(advice.Advice,
		func(a *wire.Advice) bool { return a.Subject == "rebuilds" })
	require.Equal(t, query.SeverityWarning, advice.Advice[i].Severity)
	require.Contains(t, advice.Advice[i].Text,
		"3 of 4 builds cannot be recompiled in the background")
	require.Contains(t, advice.Advice[i].Text, "1: "+index.WhyPrivate)
}

func copyOver(b *bench, from, to string) {
	bytes, err := os.ReadFile(from)
	require.NoError(b, err)
	require.NoError(b, os.WriteFile(to, bytes, 0o644))
}

func TestExternalDataIsKeptToo(t *testing.T) {
	for _, how := range []string{build.KeepReference, build.KeepCopy} {
		t.Run(how, func(t *testing.T) {
			b := rebuilding(t, func(o *Options) { o.KeepSource = how })
			r := b.external(1, nil)
			weights := r.External["weights.bin"].Name()
			made := b.acquire(r).Build
			again, err := b.cache.keptSources.Request(context.Background(), made)
			require.NoError(t, err)
			require.Len(t, again.External, 1)
			again.Close()
			b.age()
			b.refresh(made)
			require.Empty(t, b.waitForRebuilds())
			require.EqualValues(t, 2, b.compiler.Compiles.Load())
			require.Equal(t, made.Source, b.list()[0].Build.Source)

			require.NoError(t, os.WriteFile(weights, make([]byte, 8*8*4), 0o644))
			again, err = b.cache.keptSources.Request(context.Background(), made)
			if how == build.KeepCopy {
				require.NoError(t, err, "the copy is what it was")
				again.Close()
				return
			}
			require.ErrorIs(t, err, workspace.ErrNoSource)
			require.ErrorContains(t, err, "has changed")
		})
	}
}

func TestCopyIsKeptAndFreed(t *testing.T) {
	b := rebuilding(t, func(o *Options) { o.KeepSource = build.KeepCopy })
	graph := b.model(1)
	made := b.acquire(b.request(graph)).Build
	require.Equal(t, index.SourceCopy, made.Source.Kind)
	copied := made.Source.Files[0].Digest
	require.Equal(t, made.ModelDigest, copied,
		"the digest of a model of one file is that of the file")
	require.NoError(t, os.Remove(graph.Name()))
	b.library("2.0")
	b.reopen()
	// The change is a reason of its own to compile the build again, which would bring it back after
	// its removal.
	b.assessed(func(runtimes.Facts) bool { return true })
	require.NoError(t, b.cache.Store.RemoveLeftovers(context.Background()))
	require.True(t, b.cache.cas.Has(copied))
	b.want(made, "the SDK is 2.0 now")
	require.Empty(t, b.waitForRebuilds())
	builds := b.list()
	require.Len(t, builds, 2)
	require.Equal(t, builds[0].Build.Source, builds[1].Build.Source)

	stored := func() (sum int64) {
		require.NoError(t,
			b.cache.cas.Walk(context.Background(), func(d cas.Digest, _, _ int64) error {
				disk, err := b.cache.Store.WholeBytes(d)
				sum += disk
				return err
			}))
		return sum
	}
	remove := func(id string, freed bool) {
		t.Helper()
		before := stored()
		would, err := b.cache.Remove(context.Background(), request.Peer{UID: b.cache.uid},
			[]string{id}, false, true)
		require.NoError(t, err)
		did, err := b.cache.Remove(context.Background(), request.Peer{UID: b.cache.uid},
			[]string{id}, false, false)
		require.NoError(t, err)
		require.Equal(t, would.FreedBytes, did.FreedBytes, "as reported before")
		require.Equal(t, before-stored(), did.FreedBytes)
		require.Equal(t, freed, !b.cache.cas.Has(copied))
	}
	remove(builds[0].Build.ID.String(), false)
	remove(builds[1].Build.ID.String(), true)
	require.Zero(t, stored(), "nothing is left")
}

// A copy stays one when sources are kept otherwise by then: its path would be one in the store.
func TestACopyStaysOne(t *testing.T) {
	how := build.KeepCopy
	b := rebuilding(t, func(o *Options) { o.KeepSource = how })
	made := b.acquire(b.request(b.model(1))).Build
	how = build.KeepReference
	b.reopen()
	b.age()
	b.refresh(made)
	require.Empty(t, b.waitForRebuilds())
	again := b.list()[0].Build
	require.NotEqual(t, made.ID, again.ID)
	require.Equal(t, made.Source, again.Source)
}

func TestADamagedCopyHarmsNoBuild(t *testing.T) {
	b := rebuilding(t, func(o *Options) { o.KeepSource = build.KeepCopy })
	first := b.acquire(b.request(b.model(1)))
	copied := first.Build.Source.Files[0].Digest
	path := b.current(copied)
	require.NoError(t, os.Chmod(path, 0o644))
	require.NoError(t, os.WriteFile(path, []byte("something else"), 0o444))
	result, err := b.cache.Check(context.Background(), request.Peer{UID: b.cache.uid},
		&wire.Check{Deep: true}, nil)
	require.NoError(t, err)
	require.Len(t, result.Findings, 1)
	require.Empty(t, result.Findings[0].Builds)
	require.Contains(t, result.Findings[0].Detail, "source model")
	b.age()
	b.refresh(first.Build)
	left := b.waitForRebuilds()
	require.Len(t, left, 1)
	require.Equal(t, upkeep.Waiting, left[0].State)
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
	require.False(t, b.cache.cas.Has(copied), "it is in quarantine")
}

func TestUnknownWaysToKeep(t *testing.T) {
	_, err := Open(t.TempDir(), Options{KeepSource: "carbon copy"})
	require.ErrorContains(t, err, "carbon copy")
}

// Files that a client sends and the graph does not refer to may have any name, and are not written
// anywhere.
func TestOnlyReferencedFilesAreCopied(t *testing.T) {
	b := newBench(t)
	r := b.external(1, nil)
	name := "epcached-" + filepath.Base(filepath.Dir(r.Graph.Name())) + ".bin"
	r.External["../../../"+name] = b.model(3)
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
	require.NoError(t,
		filepath.WalkDir(filepath.Dir(b.state), func(p string, d os.DirEntry, err error) error {
			require.NotEqual(t, name, d.Name())
			return err
		}))
}

func TestFoundDamageHeals(t *testing.T) {
	b := rebuilding(t, nil)
	first := b.acquire(b.request(b.model(1)))
	files := b.read(first)
	require.NoError(t, os.Remove(b.current(first.Build.Files[0].Digest)))
	_, err := b.cache.Check(context.Background(), request.Peer{UID: b.cache.uid},
		&wire.Check{Deep: true, Repair: true}, nil)
	require.NoError(t, err)
	require.Equal(t, index.Damaged, b.list()[0].row.State)
	b.reopen() // the queue is forgotten, the damage is not
	require.Eventually(t, func() bool { return len(b.cache.rebuilds.List()) == 1 }, soon,
		time.Millisecond)
	b.later.Add(int64(upkeep.DamageDelay))
	b.cache.rebuilds.Wake()
	require.Empty(t, b.waitForRebuilds())
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, again.Outcome)
	require.Equal(t, files, b.read(again))
}

// A request may name one descriptor as often as fits into a message.
func TestOneDescriptorStaysOne(t *testing.T) {
	b := newBench(t)
	r := b.group(1, 2)
	r.External, r.Group[0].External = make(map[string]*os.File), make(map[string]*os.File)
	for i := range 100 {
		r.External[fmt.Sprint(i)], r.Group[0].External[fmt.Sprint(i)] = r.Graph, r.Graph
	}
	own, err := r.WithOwnFiles()
	require.NoError(t, err)
	defer own.Close()
	require.Len(t, own.External, 100)
	require.Len(t, own.Descriptors(), 2)
	for _, f := range own.Descriptors() {
		require.False(t, slices.Contains(r.AllFiles(), f), "it has a descriptor of its own")
	}
}
