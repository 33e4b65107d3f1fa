package unixsock

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/unixsock/wire"
)

func putModel() *wire.Put {
	return &wire.Put{Claim: "claim", Files: []*wire.PutFile{{Name: "x_ctx.onnx"}}}
}

func putFrame(number uint64, descriptors int) []byte {
	return framed(&wire.Envelope{Request: number, Descriptors: uint32(descriptors),
		Body: &wire.Envelope_Put{Put: putModel()}})
}

func TestPutGivesFilesAndTheView(t *testing.T) {
	backend := &standIn{}
	backend.put = func(_ context.Context, _ Peer, p *wire.Put, fds []*os.File,
		progress func(*wire.Progress)) (Answer, error) {
		require.Equal(t, "claim", p.GetClaim())
		require.Len(t, fds, 1)
		text, err := io.ReadAll(fds[p.GetFiles()[0].GetFd()])
		require.NoError(t, err)
		require.Equal(t, "model", string(text))
		flags, err := unix.FcntlInt(fds[0].Fd(), unix.F_GETFD, 0)
		require.NoError(t, err)
		require.NotZero(t, flags&unix.FD_CLOEXEC, "a worker must not inherit a client's file")
		progress(&wire.Progress{Phase: "checking"})
		return backend.hit()
	}
	s := serve(t, backend, limits{})
	var seen []string
	reply, view, err := dial(t, s).Put(background(t), putModel(), []*os.File{modelFile(t)},
		func(p *wire.Progress) { seen = append(seen, p.GetPhase()) })
	require.NoError(t, err)
	defer view.Close()
	require.Equal(t, "b", reply.GetBuild())
	require.Equal(t, []string{"checking"}, seen)
	want, err := os.Stat(s.backend.dir)
	require.NoError(t, err)
	got, err := view.Stat()
	require.NoError(t, err)
	require.True(t, os.SameFile(want, got))
}

func TestPutWithManyDescriptors(t *testing.T) {
	const n = 130 // three frames
	backend := &standIn{}
	backend.put = func(_ context.Context, _ Peer, p *wire.Put, fds []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		require.Len(t, fds, n)
		for _, f := range p.GetFiles() {
			text, err := io.ReadAll(io.NewSectionReader(fds[f.GetFd()], 0, 100))
			require.NoError(t, err)
			require.Equal(t, f.GetName(), string(text), "descriptors keep their order over frames")
		}
		return backend.hit()
	}
	c := dial(t, serve(t, backend, limits{}))
	request, files := &wire.Put{}, make([]*os.File, n)
	for i := range files {
		name := fmt.Sprint("file", i)
		path := filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(path, []byte(name), 0o600))
		f, err := os.Open(path)
		require.NoError(t, err)
		defer f.Close()
		request.Files, files[i] = append(request.Files, &wire.PutFile{Name: name, Fd: uint32(i)}), f
	}
	_, view, err := c.Put(background(t), request, files, nil)
	require.NoError(t, err)
	require.NoError(t, view.Close())
	_, _, err = c.Put(background(t), request, make([]*os.File, MaxAttached+1), nil)
	require.ErrorIs(t, err, ErrBadRequest)
}

func TestPutThatIsRefused(t *testing.T) {
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	cases := map[string]struct {
		put   *wire.Put
		files []*os.File
		says  string
	}{
		"no files":       {&wire.Put{}, []*os.File{modelFile(t)}, "put: no files"},
		"no descriptors": {putModel(), nil, `put: file "x_ctx.onnx" is descriptor 0 of 0`},
		"beyond the end": {&wire.Put{Files: []*wire.PutFile{{Name: "g"},
			{Name: "x.bin", Fd: 1<<32 - 1}}}, []*os.File{modelFile(t)},
			`put: file "x.bin" is descriptor 4294967295 of 1`},
		"a directory": {&wire.Put{Files: []*wire.PutFile{{Name: "g"}, {Name: "x.bin", Fd: 1}}},
			[]*os.File{modelFile(t), dir}, `put: descriptor of file "x.bin" is a directory`},
		"not named": {putModel(), []*os.File{modelFile(t), dir},
			"put: descriptor 1 is a directory"},
		"too many graphs": {&wire.Put{Files: putModel().GetFiles(), Graphs: 2},
			[]*os.File{modelFile(t)}, "put: 2 graphs among 1 files"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			s := serve(t, &standIn{}, limits{})
			_, _, err := dial(t, s).Put(background(t), tc.put, tc.files, nil)
			require.ErrorIs(t, err, ErrBadRequest)
			require.ErrorContains(t, err, tc.says)
			require.Zero(t, s.backend.calls.Load(), "the backend never saw it")
		})
	}
}

// A claim is its connection's: a backend must hear of the end, and know one connection from
// another.
func TestConnectionOfAPeer(t *testing.T) {
	peers := make(chan Peer, 3)
	backend := &standIn{}
	backend.acquire = func(_ context.Context, peer Peer, _ *wire.Acquire, _ []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		peers <- peer
		return Answer{}, nil
	}
	backend.put = func(_ context.Context, peer Peer, _ *wire.Put, _ []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		peers <- peer
		return Answer{}, nil
	}
	s := serve(t, backend, limits{})
	first, err := Dial(background(t), s.path)
	require.NoError(t, err)
	second := dial(t, s)
	_, _, err = first.Acquire(background(t), acquireModel(), []*os.File{modelFile(t)}, nil, nil)
	require.NoError(t, err)
	claimed := <-peers
	_, _, err = first.Put(background(t), putModel(), []*os.File{modelFile(t)}, nil)
	require.NoError(t, err)
	require.Equal(t, claimed.Connection, (<-peers).Connection)
	_, _, err = second.Put(background(t), putModel(), []*os.File{modelFile(t)}, nil)
	require.NoError(t, err)
	other := (<-peers).Connection
	require.NotSame(t, claimed.Connection, other)

	require.NoError(t, claimed.Connection.Err(),
		"the end of a request is not that of its connection")
	require.NoError(t, first.Close())
	select {
	case <-claimed.Connection.Done():
	case <-time.After(patience):
		t.Fatal("the backend does not hear of the connection's end")
	}
	require.NoError(t, other.Err())
}

func TestGroupOfModels(t *testing.T) {
	backend := &standIn{}
	backend.acquire = func(_ context.Context, _ Peer, a *wire.Acquire, fds []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		if len(a.GetGroup()[1].GetExternal()) == 0 {
			return Answer{},
				&NeedError{Locations: []string{"w.bin", "w.bin"}, Members: []uint32{0, 2}}
		}
		require.Empty(t, a.GetGroup()[0].GetExternal())
		for member, m := range map[string]*wire.Model{"0": a.GetModel(), "2": a.GetGroup()[1]} {
			require.Equal(t, "w.bin", m.GetExternal()[0].GetLocation())
			text, err := io.ReadAll(fds[m.GetExternal()[0].GetFd()])
			require.NoError(t, err)
			require.Equal(t, member, string(text), "each member has its own")
		}
		return backend.hit()
	}
	c := dial(t, serve(t, backend, limits{}))
	asked := acquireModel()
	asked.Group = []*wire.Model{{Name: "second.onnx", Fd: 1}, {Name: "third.onnx", Fd: 2}}
	dir := t.TempDir()
	external := func(member int, location string) (*os.File, error) {
		path := filepath.Join(dir, fmt.Sprint(member, location))
		require.NoError(t, os.WriteFile(path, []byte(fmt.Sprint(member)), 0o600))
		return os.Open(path)
	}
	models := []*os.File{modelFile(t), modelFile(t), modelFile(t)}
	_, view, err := c.Acquire(background(t), asked, models, external, nil)
	require.NoError(t, err)
	require.NoError(t, view.Close())
	require.Empty(t, asked.GetGroup()[1].GetExternal(), "the caller's request is as it was")
}

func TestNeedOfNoMember(t *testing.T) {
	cases := map[string]*NeedError{
		"beyond the group":     {Locations: []string{"w.bin"}, Members: []uint32{1}},
		"not for each of them": {Locations: []string{"w.bin", "v.bin"}, Members: []uint32{0}},
	}
	for name, need := range cases {
		t.Run(name, func(t *testing.T) {
			backend := &standIn{acquire: func(context.Context, Peer, *wire.Acquire, []*os.File,
				func(*wire.Progress)) (Answer, error) {
				return Answer{}, need
			}}
			external := func(int, string) (*os.File, error) { return os.Open("/proc/self/cmdline") }
			_, _, err := dial(t, serve(t, backend, limits{})).
				Acquire(background(t), acquireModel(), []*os.File{modelFile(t)}, external, nil)
			require.ErrorIs(t, err, ErrBadRequest)
		})
	}
}

func TestFollow(t *testing.T) {
	backend := &standIn{}
	backend.follow = func(_ context.Context, f *wire.Follow,
		progress func(*wire.Progress)) (*wire.JobsReply, error) {
		progress(&wire.Progress{Phase: "compiling", Job: f.GetJob(), Waiting: 3, EstimateMs: 4000})
		return &wire.JobsReply{Jobs: []*wire.Job{{Id: f.GetJob(), State: "failed",
			Error: &wire.Error{Class: wire.ErrorClass_COMPILE_FAILED}}}}, nil
	}
	c := dial(t, serve(t, backend, limits{}))
	var seen []*wire.Progress
	job, err := c.Follow(background(t), &wire.Follow{Job: "j"},
		func(p *wire.Progress) { seen = append(seen, p) })
	require.NoError(t, err, "that the job failed is no failure to follow it")
	require.Equal(t, "failed", job.GetState())
	require.Len(t, seen, 1)
	require.Equal(t, "j", seen[0].GetJob())
	require.EqualValues(t, 3, seen[0].GetWaiting())
	require.EqualValues(t, 4000, seen[0].GetEstimateMs())
}

func TestFollowIsGivenUp(t *testing.T) {
	ended := make(chan error, 1)
	backend := &standIn{}
	started := make(chan struct{})
	backend.follow = func(ctx context.Context, _ *wire.Follow,
		_ func(*wire.Progress)) (*wire.JobsReply, error) {
		close(started)
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, ctx.Err()
	}
	c := dial(t, serve(t, backend, limits{}))
	ctx, cancel := context.WithCancel(background(t))
	go func() {
		<-started
		cancel()
	}()
	_, err := c.Follow(ctx, &wire.Follow{Job: "j"}, nil)
	require.ErrorIs(t, err, context.Canceled)
	select {
	case err := <-ended:
		require.ErrorIs(t, err, context.Canceled)
	case <-time.After(patience):
		t.Fatal("the backend goes on")
	}
}

func TestJobRequests(t *testing.T) {
	text := make(chan string, 1)
	backend := &standIn{giveUp: func(r *wire.GiveUp) (*wire.GiveUpReply, error) {
		text <- r.GetText()
		return &wire.GiveUpReply{}, nil
	}}
	c := dial(t, serve(t, backend, limits{}))
	ctx := background(t)
	jobs, err := Ask[wire.JobsReply](ctx, c, &wire.Jobs{}, nil)
	require.NoError(t, err)
	require.Equal(t, "job", jobs.GetJobs()[0].GetId())
	ended, err := Ask[wire.JobsReply](ctx, c, &wire.CancelJobs{Jobs: []string{"a"}}, nil)
	require.NoError(t, err)
	require.Equal(t, "a", ended.GetJobs()[0].GetId())
	forgotten, err := Ask[wire.JobsReply](ctx, c, &wire.RetryJobs{Entries: []string{"b"}}, nil)
	require.NoError(t, err)
	require.Equal(t, "b", forgotten.GetFailures()[0].GetBuild())
	_, err = Ask[wire.GiveUpReply](ctx, c,
		&wire.GiveUp{Claim: "c", Text: string(make([]byte, 2*MaxReportText))}, nil)
	require.NoError(t, err)
	require.Len(t, <-text, MaxReportText, "of a compiler's words only so many are kept")
}
