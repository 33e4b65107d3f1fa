package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

const stranger = 4242 // a user without any privilege

// owner is an application with libraries that the daemon does not know: it compiles with them in a
// worker of its own.
type owner struct {
	*epcached
	uid     int
	spec    compilers.Runtime
	library compilers.EPLibrary
	worker  *compilers.ORT
	options map[string]string
	embed   bool
}

func newOwner(t *testing.T, d *epcached, uid int) *owner {
	t.Helper()
	return newOwnerOf(t, d, uid, openVINO, openVINOProvider())
}

func newOwnerOf(t *testing.T, d *epcached, uid int, dir string,
	ep *wire.ExecutionProvider) *owner {
	t.Helper()
	o := &owner{epcached: d, uid: uid,
		worker: compilers.NewORT(compilers.ORTOptions{Worker: filepath.Join(programs,
			"epcached-ort"), Scratch: t.TempDir()})}
	var err error
	o.spec, err = compilers.Find(runtimeDir(t, dir))
	require.NoError(t, err)
	o.library, err = o.spec.Library(ep.Name)
	require.NoError(t, err)
	o.options = ep.Options
	return o
}

// connect dials as the application's user; the connection closes with the test.
func (o *owner) connect() *unixsock.Client {
	o.Helper()
	if os.Getuid() != 0 {
		o.Skip("SKIPPED: only root can connect as another user")
	}
	c, err := o.tryConnect()
	require.NoError(o, err)
	o.Cleanup(func() { c.Close() })
	return c
}

// tryConnect dials as the application's user: the kernel reports to the daemon the uid of the
// connecting thread.
func (o *owner) tryConnect() (c *unixsock.Client, err error) {
	if err := os.Chmod(filepath.Dir(o.socket), 0o711); err != nil {
		return nil, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with its uid
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(o.uid),
			^uintptr(0)); errno != 0 {
			err = fmt.Errorf("become uid %d: %w", o.uid, errno)
			return
		}
		c, err = unixsock.Dialer{Name: "test", Wait: patience,
			HelloTimeout: patience}.Dial(context.Background(), o.socket)
	}()
	<-done
	if err == nil && int(c.Hello().Uid) != o.uid {
		err = errors.Join(fmt.Errorf("the daemon takes uid %d for %d", o.uid, c.Hello().Uid),
			c.Close())
	}
	return c, err
}

// acquire requests a model, showing its libraries.
func (o *owner) acquire(c *unixsock.Client, path string, miss wire.OnMiss,
	progress func(*wire.Progress)) (lease, error) {
	r := forModel(path, &wire.ExecutionProvider{Name: o.library.EP, Options: o.options})
	r.OnMiss, r.Embed = miss, o.embed
	fds := []*os.File{openFile(o, path)}
	show := func(path string) uint32 {
		fds = append(fds, openFile(o, path))
		return uint32(len(fds) - 1)
	}
	at := show(o.library.Path)
	library := &wire.EpLibrary{Ep: o.library.EP, Path: o.library.Path, Fd: &at}
	for _, file := range o.library.Files {
		if file == o.library.Path {
			continue
		}
		name, err := filepath.Rel(filepath.Dir(o.library.Path), file)
		require.NoError(o, err)
		library.Beside = append(library.Beside, &wire.ExternalFile{Location: name, Fd: show(file)})
	}
	r.Runtime = &wire.Runtime{OrtVersion: o.spec.ORTVersion,
		EpLibraries: []*wire.EpLibrary{library}}
	reply, view, err := c.Acquire(limited(o), r, fds, nil, progress)
	if view != nil {
		o.Cleanup(func() { view.Close() })
	}
	return lease{reply, view}, err
}

// compile does what a claim is for, in a worker of the application's own.
func (o *owner) compile(path string, claim lease) (*wire.Put, []*os.File) {
	o.Helper()
	dir := o.TempDir()
	result, err := o.worker.Compile(limited(o),
		compilers.Job{Runtime: o.spec, Model: path, Dir: dir, Output: claim.Claim.Output,
			Route: claim.Claim.Route,
			Session: compilers.Session{GraphOptimizationLevel: claim.GraphOptimizationLevel,
				SessionOptions: claim.SessionOptions}, Embed: o.embed,
			EPs: []compilers.EP{{Name: o.library.EP, Library: o.library.Path,
				Options: claim.ProviderOptions[o.library.EP].GetEntries()}}}, nil)
	require.NoError(o, err)
	put := &wire.Put{Claim: claim.Claim.Id, CompileSeconds: result.Seconds,
		OrtVersion: result.ORTVersion}
	for _, ep := range result.EPs {
		put.MadeBy = append(put.MadeBy, &wire.MadeBy{Ep: ep.Name, Version: ep.Version})
	}
	var fds []*os.File
	for i, name := range result.Files {
		put.Files = append(put.Files, &wire.PutFile{Name: name, Fd: uint32(i)})
		fds = append(fds, openFile(o, filepath.Join(dir, name)))
	}
	return put, fds
}

// An application with a runtime that the daemon lacks compiles with OpenVINO, and is given its
// own artefact from then on.
func TestRealArtefactUnderAClaim(t *testing.T) {
	t.Parallel()
	s := newSite(t) // no runtime at all
	d := s.start(t)
	o := newOwner(t, d, stranger)
	model := writeModel(t, t.TempDir(), 1)
	c := o.connect()
	_, err := o.acquire(c, model, wire.OnMiss_WAIT, nil)
	require.ErrorIs(t, err, unixsock.ErrUnavailable,
		"nobody compiles it, so there is nothing to wait for")

	claim, err := o.acquire(c, model, wire.OnMiss_CLAIM, nil)
	require.NoError(t, err)
	require.Equal(t, "claim", claim.Outcome)
	require.Positive(t, claim.Claim.DeadlineMs)
	waiting := make(chan lease, 1)
	queued := make(chan struct{}, 100)
	other := o.connect()
	go func() {
		a, err := o.acquire(other, model, wire.OnMiss_WAIT, whenClaimed(queued))
		if err != nil {
			a.AcquireReply = &wire.AcquireReply{Outcome: err.Error()}
		}
		waiting <- a
	}()
	<-queued
	jobs, err := unixsock.Ask[wire.JobsReply](limited(t), c, &wire.Jobs{}, nil)
	require.NoError(t, err)
	require.Equal(t, "claimed", jobs.Jobs[0].State)

	put, fds := o.compile(model, claim)
	reply, view, err := c.Put(limited(t), put, fds, nil)
	require.NoError(t, err)
	defer view.Close()
	got := lease{reply, view}
	require.Equal(t, "put", got.Outcome)
	got.requireRight(t)
	require.NotEmpty(t, got.SdkVersion)
	checked, err := o.worker.Check(limited(t),
		compilers.CheckJob{Runtime: o.spec, Graph: filepath.Join(got.View, got.Graph),
			EPs:     []compilers.EP{{Name: o.library.EP, Library: o.library.Path}},
			Session: compilers.Session{GraphOptimizationLevel: "all"}})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, checked.Outcome, checked.Text)
	waited := <-waiting
	require.Equal(t, "waited", waited.Outcome)
	require.Equal(t, got.Graph, waited.Graph)

	require.Equal(t, "uid 4242", d.list()[0].MadeBy)
	_, err = newOwner(t, d, stranger+1).acquire(newOwner(t, d, stranger+1).connect(), model,
		wire.OnMiss_FAIL, nil)
	require.ErrorIs(t, err, unixsock.ErrNotFound, "it is its user's own")
	d.stop()
	d = s.start(t)
	o.epcached = d
	hit, err := o.acquire(o.connect(), model, wire.OnMiss_CLAIM, nil)
	require.NoError(t, err)
	require.Equal(t, "hit", hit.Outcome)
	hit.requireRight(t)
	require.Contains(t, hit.Why, "uid 4242")
}

// A client of an earlier version sends `later` with its put, a field that is reserved now.
func TestPutsOfEarlierClientsAreTaken(t *testing.T) {
	t.Parallel()
	d := newSite(t).start(t)
	o := newOwner(t, d, stranger)
	model := writeModel(t, t.TempDir(), 1)
	c := o.connect()
	claim, err := o.acquire(c, model, wire.OnMiss_CLAIM, nil)
	require.NoError(t, err)
	put, fds := o.compile(model, claim)
	later := protowire.AppendVarint(protowire.AppendTag(nil, 7, protowire.VarintType), 1)
	put.ProtoReflect().SetUnknown(later)
	reply, view, err := c.Put(limited(t), put, fds, nil)
	require.NoError(t, err)
	require.NoError(t, view.Close())
	require.Equal(t, "put", reply.Outcome)
}

// whenClaimed signals when a request waits for the claimant; the phases before that are of reading.
func whenClaimed(queued chan<- struct{}) func(*wire.Progress) {
	return func(p *wire.Progress) {
		if p.GetPhase() == "claimed" {
			queued <- struct{}{}
		}
	}
}

// A claim ends with its connection, whichever end closes that, and the next request gets it.
func TestAClaimEndsWithItsConnection(t *testing.T) {
	d := newSite(t).start(t)
	o := newOwner(t, d, stranger)
	model := writeModel(t, t.TempDir(), 1)
	first := o.connect()
	claim, err := o.acquire(first, model, wire.OnMiss_CLAIM, nil)
	require.NoError(t, err)
	second := o.connect()
	next := make(chan lease, 1)
	queued := make(chan struct{}, 100)
	go func() {
		a, err := o.acquire(second, model, wire.OnMiss_CLAIM, whenClaimed(queued))
		if err != nil {
			a.AcquireReply = &wire.AcquireReply{Outcome: err.Error()}
		}
		next <- a
	}()
	<-queued
	require.NoError(t, first.Close())
	handed := <-next
	require.Equal(t, "claim", handed.Outcome)
	require.NotEqual(t, claim.Claim.Id, handed.Claim.Id)
	require.Contains(t, handed.Why, "its connection ended")
	_, err = unixsock.Ask[wire.GiveUpReply](limited(t), second,
		&wire.GiveUp{Claim: handed.Claim.Id, Text: "enough", Code: 1}, nil)
	require.NoError(t, err)
	_, err = unixsock.Ask[wire.GiveUpReply](limited(t), second,
		&wire.GiveUp{Claim: handed.Claim.Id}, nil)
	require.ErrorIs(t, err, unixsock.ErrNotFound)
	put := &wire.Put{Claim: claim.Claim.Id, Files: []*wire.PutFile{{Name: claim.Claim.Output}}}
	_, _, err = second.Put(limited(t), put, []*os.File{openFile(t, model)}, nil)
	require.ErrorIs(t, err, unixsock.ErrNotFound)
}

// Each execution provider's own artefacts, in both forms, pass for what they are.
func TestRealArtefactsThatArePut(t *testing.T) {
	t.Parallel()
	d := newSite(t).start(t)
	for name, o := range map[string]*owner{
		"OpenVINO": newOwner(t, d, stranger),
		"QNN":      newOwnerOf(t, d, stranger, qnn, qnnProvider()),
	} {
		for _, embed := range []bool{false, true} {
			o.embed = embed
			model := writeModel(t, t.TempDir(), 3)
			c := o.connect()
			claim, err := o.acquire(c, model, wire.OnMiss_CLAIM, nil)
			require.NoError(t, err, name)
			put, fds := o.compile(model, claim)
			reply, view, err := c.Put(limited(t), put, fds, nil)
			require.NoError(t, err, "%s, embed %v", name, embed)
			lease{reply, view}.requireRight(t)
			require.NoError(t, view.Close())
			require.NotEmpty(t, reply.SdkVersion, name)
			require.Equal(t, embed, len(reply.Files) == 1, name)
			hit, err := o.acquire(c, model, wire.OnMiss_FAIL, nil)
			require.NoError(t, err, name)
			require.Equal(t, reply.Graph, hit.Graph)
		}
	}
}
