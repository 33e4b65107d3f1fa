package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/unixsock/wire"
)

func background(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func TestAcquireGivesTheView(t *testing.T) {
	s := serve(t, &standIn{}, limits{})
	reply, view, err := dial(t, s).Acquire(background(t), acquireModel(), []*os.File{modelFile(t)},
		nil, nil)
	require.NoError(t, err)
	defer view.Close()
	require.Equal(t, "hit", reply.GetOutcome())
	want, err := os.Stat(s.backend.dir)
	require.NoError(t, err)
	got, err := view.Stat()
	require.NoError(t, err)
	require.True(t, os.SameFile(want, got))
	flags, err := unix.FcntlInt(view.Fd(), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.NotZero(t, flags&unix.FD_CLOEXEC, "a child must not inherit a lease")
}

func TestBackendSeesPeerAndFiles(t *testing.T) {
	backend := &standIn{}
	backend.acquire = func(_ context.Context, peer Peer, a *wire.Acquire, fds []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		require.EqualValues(t, os.Geteuid(), peer.UID)
		require.EqualValues(t, os.Getpid(), peer.PID)
		require.Len(t, fds, 1)
		text, err := io.ReadAll(fds[0])
		require.NoError(t, err)
		require.Equal(t, "model", string(text))
		flags, err := unix.FcntlInt(fds[0].Fd(), unix.F_GETFD, 0)
		require.NoError(t, err)
		require.NotZero(t, flags&unix.FD_CLOEXEC, "a worker must not inherit a client's file")
		return Answer{}, nil
	}
	s := serve(t, backend, limits{})
	_, view, err := dial(t, s).Acquire(background(t), acquireModel(), []*os.File{modelFile(t)}, nil,
		nil)
	require.NoError(t, err)
	require.Nil(t, view)
}

func TestOtherRequests(t *testing.T) {
	c := dial(t, serve(t, &standIn{}, limits{}))
	ctx := background(t)
	list, err := Ask[wire.ListReply](ctx, c, &wire.List{}, nil)
	require.NoError(t, err)
	require.Equal(t, "one", list.GetBuilds()[0].GetBuild())
	show, err := Ask[wire.ShowReply](ctx, c, &wire.Show{}, nil)
	require.NoError(t, err)
	require.Equal(t, []string{"made"}, show.GetHistory())
	invalidated, err := Ask[wire.ChangeReply](ctx, c, &wire.Invalidate{}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 1, invalidated.GetFreedBytes())
	removed, err := Ask[wire.ChangeReply](ctx, c, &wire.Remove{}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 2, removed.GetFreedBytes())
	pinned, err := Ask[wire.ChangeReply](ctx, c, &wire.Pin{}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 3, pinned.GetFreedBytes())
	unpinned, err := Ask[wire.ChangeReply](ctx, c, &wire.Unpin{}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 4, unpinned.GetFreedBytes())
	var phases []string
	packed, err := Ask[wire.PackReply](ctx, c, &wire.Pack{Entries: []string{"a", "b"}},
		func(p *wire.Progress) { require.Equal(t, "packing", p.GetPhase()) })
	require.NoError(t, err)
	require.EqualValues(t, 2, packed.GetChanged())
	collected, err := Ask[wire.CollectReply](ctx, c, &wire.Collect{},
		func(p *wire.Progress) { phases = append(phases, p.GetPhase()) })
	require.NoError(t, err)
	require.EqualValues(t, 5, collected.GetRemoved())
	require.Equal(t, []string{"collecting"}, phases)
	saying := func(p *wire.Progress) { phases = append(phases, p.GetPhase()) }
	usage, err := Ask[wire.UsageReply](ctx, c, &wire.Usage{}, saying)
	require.NoError(t, err)
	require.EqualValues(t, 6, usage.GetSharedBytes())
	check, err := Ask[wire.CheckReply](ctx, c, &wire.Check{}, saying)
	require.NoError(t, err)
	require.EqualValues(t, 3, check.GetBlobs())
	require.Equal(t, []string{"collecting", "reading builds", "checking files"}, phases)
	_, err = Ask[wire.ProbeReply](ctx, c, &wire.Probe{}, nil)
	require.NoError(t, err)
	report, err := Ask[wire.ReportReply](ctx, c, &wire.Report{}, nil)
	require.NoError(t, err)
	require.Equal(t, "sound", report.GetDecision())
	why, err := Ask[wire.Explanation](ctx, c, &wire.Why{}, nil)
	require.NoError(t, err)
	require.Equal(t, "hit", why.GetDecision())
	events, err := Ask[wire.EventsReply](ctx, c, &wire.Events{}, nil)
	require.NoError(t, err)
	require.Equal(t, "compiled", events.GetEvents()[0].GetKind())
	doctor, err := Ask[wire.DoctorReply](ctx, c, &wire.Doctor{}, nil)
	require.NoError(t, err)
	require.Equal(t, "ok", doctor.GetAdvice()[0].GetSeverity())
	require.Equal(t, "epcached test", c.Hello().GetServer())
}

func TestListPagesFollowsPages(t *testing.T) {
	backend := &standIn{list: func(_ context.Context, l *wire.List) (*wire.ListReply, error) {
		next := map[string]string{"": "a", "a": "b", "b": ""}
		return &wire.ListReply{Builds: []*wire.Build{{Build: "after " + l.GetAfter()}},
			Next: next[l.GetAfter()]}, nil
	}}
	var builds []*wire.Build
	err := dial(t, serve(t, backend, limits{})).
		ListPages(background(t), &wire.List{}, nil, func(page []*wire.Build) error {
			builds = append(builds, page...)
			return nil
		})
	require.NoError(t, err)
	require.Len(t, builds, 3)
	require.Equal(t, "after b", builds[2].GetBuild())
}

func TestAnswersComeInAnyOrder(t *testing.T) {
	release := make(chan struct{})
	backend := &standIn{}
	backend.acquire = func(ctx context.Context, _ Peer, a *wire.Acquire, _ []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		if a.GetModel().GetName() == "slow" {
			<-release
		}
		return backend.hit()
	}
	c := dial(t, serve(t, backend, limits{}))
	model := modelFile(t)
	slow := make(chan error, 1)
	go func() {
		a := acquireModel()
		a.Model.Name = "slow"
		_, view, err := c.Acquire(context.Background(), a, []*os.File{model}, nil, nil)
		slow <- errors.Join(err, view.Close())
	}()
	for range 20 {
		_, view, err := c.Acquire(background(t), acquireModel(), []*os.File{model}, nil, nil)
		require.NoError(t, err)
		require.NoError(t, view.Close())
	}
	close(release)
	require.NoError(t, <-slow)
}

func TestManyCallersOnOneConnection(t *testing.T) {
	c := dial(t, serve(t, &standIn{}, limits{Requests: 256}))
	model := modelFile(t)
	var callers sync.WaitGroup
	failed := make(chan error, 16)
	for range 16 {
		callers.Go(func() {
			for range 50 {
				_, view, err := c.Acquire(context.Background(), acquireModel(), []*os.File{model},
					nil, nil)
				if err != nil {
					failed <- err
					return
				}
				view.Close()
			}
		})
	}
	callers.Wait()
	close(failed)
	require.NoError(t, <-failed)
}

func TestErrorsAreTheSameOnBothEnds(t *testing.T) {
	sentinels := map[wire.ErrorClass]error{
		wire.ErrorClass_NOT_FOUND: ErrNotFound, wire.ErrorClass_STALE: ErrStale,
		wire.ErrorClass_COMPILE_FAILED: ErrCompileFailed,
		wire.ErrorClass_BUSY:           ErrBusy, wire.ErrorClass_DEADLINE: ErrDeadline,
		wire.ErrorClass_BAD_MODEL:   ErrBadModel,
		wire.ErrorClass_BAD_REQUEST: ErrBadRequest, wire.ErrorClass_NOT_ALLOWED: ErrNotAllowed,
		wire.ErrorClass_NO_SPACE: ErrNoSpace,
		wire.ErrorClass_VERSION:  ErrVersion, wire.ErrorClass_UNAVAILABLE: ErrUnavailable,
		wire.ErrorClass_INTERNAL:  ErrInternal,
		wire.ErrorClass_CANCELLED: ErrCancelled,
	}
	require.Len(t, sentinels, len(wire.ErrorClass_name)-1, "every class has a sentinel")
	answers := make(chan error, 1)
	s := serve(t,
		&standIn{status: func(context.Context) (*wire.StatusReply, error) {
			return nil,
				<-answers
		}}, limits{})
	c := dial(t, s)
	for number, sentinel := range sentinels {
		sent := fmt.Errorf("status: %w",
			&Error{Class: number, Text: "no luck", Hint: "try",
				Facts: map[string]string{"code": "10"}})
		require.ErrorIs(t, sent, sentinel)
		answers <- sent
		_, err := Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
		require.ErrorIs(t, err, sentinel)
		for other, not := range sentinels {
			require.Equal(t, other == number, errors.Is(err, not))
		}
		var e *Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, "status: no luck", e.Text)
		require.Equal(t, "try", e.Hint)
		require.Equal(t, map[string]string{"code": "10"}, e.Facts)
	}
	answers <- fmt.Errorf("look it up: %w", ErrNotFound)
	_, err := Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
	require.ErrorIs(t, err, ErrNotFound, "a bare sentinel has a class too")
	require.EqualError(t, err, "look it up: not found")
}

func TestInternalErrorsStayInside(t *testing.T) {
	s := serve(t, &standIn{status: func(context.Context) (*wire.StatusReply, error) {
		return nil, errors.New("bbolt: page 7 of /secret/index.db")
	}}, limits{})
	_, err := Ask[wire.StatusReply](background(t), dial(t, s), &wire.Status{}, nil)
	require.ErrorIs(t, err, ErrInternal)
	require.NotContains(t, err.Error(), "secret")
}

func TestErrorTextOfACompiler(t *testing.T) {
	long := string(make([]byte, 2<<20)) + "\xff"
	s := serve(t, &standIn{status: func(context.Context) (*wire.StatusReply, error) {
		return nil,
			&Error{Class: wire.ErrorClass_COMPILE_FAILED, Text: "bad \xff byte " + long,
				Facts: map[string]string{"log": long}}
	}}, limits{})
	_, err := Ask[wire.StatusReply](background(t), dial(t, s), &wire.Status{}, nil)
	require.ErrorIs(t, err, ErrCompileFailed)
	require.Contains(t, err.Error(), "bad \uFFFD byte")
}

func TestAnswerTooLarge(t *testing.T) {
	s := serve(t, &standIn{list: func(context.Context, *wire.List) (*wire.ListReply, error) {
		return &wire.ListReply{Next: string(make([]byte, MaxFrame))}, nil
	}}, limits{})
	c := dial(t, s)
	_, err := Ask[wire.ListReply](background(t), c, &wire.List{}, nil)
	require.ErrorIs(t, err, ErrInternal)
	require.Contains(t, err.Error(), "does not fit into a frame")
	_, err = Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
}

func TestNeed(t *testing.T) {
	dir := t.TempDir()
	locations := []string{"weights.bin", "more/weights.bin"}
	backend := &standIn{}
	backend.acquire = func(_ context.Context, _ Peer, a *wire.Acquire, fds []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		if len(a.GetModel().GetExternal()) == 0 {
			return Answer{}, fmt.Errorf("acquire: %w", &NeedError{Locations: locations})
		}
		for i, x := range a.GetModel().GetExternal() {
			text, err := io.ReadAll(fds[x.GetFd()])
			require.NoError(t, err)
			require.Equal(t, locations[i], x.GetLocation())
			require.Equal(t, locations[i], string(text))
		}
		return backend.hit()
	}
	c := dial(t, serve(t, backend, limits{}))
	var opened []*os.File
	external := func(_ int, location string) (*os.File, error) {
		path := filepath.Join(dir, filepath.Base(filepath.Dir(location))+"x")
		require.NoError(t, os.WriteFile(path, []byte(location), 0o600))
		f, err := os.Open(path)
		opened = append(opened, f)
		return f, err
	}
	asked := acquireModel()
	_, view, err := c.Acquire(background(t), asked, []*os.File{modelFile(t)}, external, nil)
	require.NoError(t, err)
	require.NoError(t, view.Close())
	require.Len(t, opened, 2)
	for _, f := range opened {
		require.ErrorIs(t, f.Close(), os.ErrClosed, "the client closes what it had opened")
	}
	require.Empty(t, asked.GetModel().GetExternal(), "the caller's request is as it was")

	_, _, err = c.Acquire(background(t), acquireModel(), []*os.File{modelFile(t)}, nil, nil)
	require.ErrorIs(t, err, ErrBadModel, "no way to open external data")

	missing := func(int, string) (*os.File, error) { return os.Open(filepath.Join(dir, "missing")) }
	_, _, err = c.Acquire(background(t), acquireModel(), []*os.File{modelFile(t)}, missing, nil)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestNeedForEver(t *testing.T) {
	backend := &standIn{}
	backend.acquire = func(_ context.Context, _ Peer, a *wire.Acquire, _ []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		return Answer{},
			&NeedError{Locations: []string{fmt.Sprint("part ", len(a.GetModel().GetExternal()))}}
	}
	c := dial(t, serve(t, backend, limits{}))
	external := func(int, string) (*os.File, error) { return os.Open("/proc/self/cmdline") }
	_, _, err := c.Acquire(background(t), acquireModel(), []*os.File{modelFile(t)}, external, nil)
	require.ErrorIs(t, err, ErrBadRequest)
	require.LessOrEqual(t, backend.calls.Load(), int64(maxNeedReplies))
}

func TestManyDescriptors(t *testing.T) {
	const n = 151
	backend := &standIn{}
	backend.acquire = func(_ context.Context, _ Peer, a *wire.Acquire, fds []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		require.Len(t, fds, n)
		for i, f := range fds {
			text, err := io.ReadAll(io.NewSectionReader(f, 0, 100))
			require.NoError(t, err)
			require.Equal(t, fmt.Sprint(i), string(text),
				"descriptors keep their order over frames")
		}
		return backend.hit()
	}
	c := dial(t, serve(t, backend, limits{}))
	files := make([]*os.File, n)
	for i := range files {
		path := filepath.Join(t.TempDir(), "f")
		require.NoError(t, os.WriteFile(path, []byte(fmt.Sprint(i)), 0o600))
		f, err := os.Open(path)
		require.NoError(t, err)
		defer f.Close()
		files[i] = f
	}
	_, view, err := c.Acquire(background(t), acquireModel(), files, nil, nil)
	require.NoError(t, err)
	require.NoError(t, view.Close())
	_, _, err = c.Acquire(background(t), acquireModel(), make([]*os.File, MaxAttached+1), nil, nil)
	require.ErrorIs(t, err, ErrBadRequest)
}

func TestCancelReachesTheBackend(t *testing.T) {
	started, ended := make(chan struct{}), make(chan error, 1)
	cancelReaches(t, &standIn{acquire: func(ctx context.Context, _ Peer, _ *wire.Acquire,
		_ []*os.File, _ func(*wire.Progress)) (Answer, error) {
		close(started)
		<-ctx.Done()
		ended <- ctx.Err()
		return Answer{}, ctx.Err()
	}}, started, ended)
}

// An answer from memory is fast, unless the disk does not answer.
func TestCancelReachesAnAnswerFromMemory(t *testing.T) {
	started, ended := make(chan struct{}), make(chan error, 1)
	cancelReaches(t, &standIn{remembered: func(ctx context.Context) {
		close(started)
		<-ctx.Done()
		ended <- ctx.Err()
	}}, started, ended)
}

func cancelReaches(t *testing.T, backend *standIn, started <-chan struct{}, ended <-chan error) {
	c := dial(t, serve(t, backend, limits{}))
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-started; cancel() }()
	_, _, err := c.Acquire(ctx, acquireModel(), []*os.File{modelFile(t)}, nil, nil)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, <-ended, context.Canceled)
	_, err = Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
	require.NoError(t, err, "the connection goes on")
}

func TestDeadlineTravels(t *testing.T) {
	s := serve(t, &standIn{acquire: waitForEnd}, limits{})
	c := rawHello(t, s)
	a := acquireModel()
	a.DeadlineMs = 30
	c.write(framed(&wire.Envelope{Request: 1, Descriptors: 1,
		Body: &wire.Envelope_Acquire{Acquire: a}}), int(modelFile(t).Fd()))
	e, _ := c.read()
	require.Equal(t, wire.ErrorClass_DEADLINE, e.GetError().GetClass())

	c.write(framed(&wire.Envelope{Request: 2, Descriptors: 1, DeadlineMs: -5,
		Body: &wire.Envelope_Acquire{Acquire: acquireModel()}}), int(modelFile(t).Fd()))
	e, _ = c.read()
	require.Equal(t, wire.ErrorClass_DEADLINE, e.GetError().GetClass())

	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	_, _, err := dial(t, s).Acquire(ctx, acquireModel(), []*os.File{modelFile(t)}, nil, nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// A request's end stays what it is, whatever a backend took it for.
func TestTheEndOfARequestKeepsItsClass(t *testing.T) {
	for _, class := range []wire.ErrorClass{wire.ErrorClass_UNAVAILABLE, wire.ErrorClass_INTERNAL,
		wire.ErrorClass_COMPILE_FAILED} {
		s := serve(t, &standIn{acquire: func(ctx context.Context, _ Peer, _ *wire.Acquire,
			_ []*os.File, _ func(*wire.Progress)) (Answer, error) {
			<-ctx.Done()
			return Answer{}, &Error{Class: class, Text: "it failed", Err: ctx.Err()}
		}}, limits{})
		c := rawHello(t, s)
		a := acquireModel()
		a.DeadlineMs = 30
		c.write(framed(&wire.Envelope{Request: 1, Descriptors: 1,
			Body: &wire.Envelope_Acquire{Acquire: a}}), int(modelFile(t).Fd()))
		e, _ := c.read()
		require.Equal(t, wire.ErrorClass_DEADLINE, e.GetError().GetClass(), class)
	}
}

func TestClientThatLeavesCancels(t *testing.T) {
	ended := make(chan error, 1)
	s := serve(t,
		&standIn{acquire: func(ctx context.Context, _ Peer, _ *wire.Acquire, _ []*os.File,
			_ func(*wire.Progress)) (Answer, error) {
			<-ctx.Done()
			ended <- ctx.Err()
			return Answer{}, ctx.Err()
		}}, limits{})
	c := rawHello(t, s)
	c.write(acquireFrame(1, 1), int(modelFile(t).Fd()))
	require.Eventually(t, func() bool { return s.backend.calls.Load() == 1 }, patience,
		time.Millisecond)
	require.NoError(t, c.conn.Close())
	require.ErrorIs(t, <-ended, context.Canceled)
}

func TestProgress(t *testing.T) {
	backend := &standIn{}
	kept := make(chan func(*wire.Progress), 1)
	backend.acquire = func(_ context.Context, _ Peer, _ *wire.Acquire, _ []*os.File,
		progress func(*wire.Progress)) (Answer, error) {
		kept <- progress
		m := &wire.Progress{Phase: "reading"}
		for i := range 1000 { // far more than once a second
			m.DoneBytes = int64(i)
			progress(m)
		}
		progress(&wire.Progress{Phase: "compiling"})
		progress(&wire.Progress{Phase: "storing"})
		return backend.hit()
	}
	c := dial(t, serve(t, backend, limits{}))
	var seen []string
	_, view, err := c.Acquire(background(t), acquireModel(), []*os.File{modelFile(t)}, nil,
		func(m *wire.Progress) { seen = append(seen, m.GetPhase()) })
	require.NoError(t, err)
	require.NoError(t, view.Close())
	(<-kept)(&wire.Progress{Phase: "too late"})
	// what was sent before has come before this answer
	_, err = Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	require.Less(t, len(seen), 100, "each second one of a phase")
	require.Equal(t, []string{"reading", "compiling", "storing"}, slices.Compact(seen))
}

func TestProgressDoesNotWaitForTheClient(t *testing.T) {
	done := make(chan struct{})
	s := serve(t,
		&standIn{acquire: func(ctx context.Context, _ Peer, _ *wire.Acquire, _ []*os.File,
			progress func(*wire.Progress)) (Answer, error) {
			detail := string(make([]byte, maxProgressDetail))
			for i := range 20000 { // some 20 MB, were it all sent
				progress(&wire.Progress{Phase: fmt.Sprint(i), Detail: detail})
			}
			close(done)
			return Answer{}, nil
		}}, limits{WriteTimeout: 100 * time.Millisecond})
	c := rawHello(t, s)
	c.write(acquireFrame(1, 1), int(modelFile(t).Fd()))
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("a client that does not read holds up the backend")
	}
}

func TestShutdown(t *testing.T) {
	release, started := make(chan struct{}), make(chan struct{})
	backend := &standIn{}
	backend.acquire = func(ctx context.Context, _ Peer, _ *wire.Acquire, _ []*os.File,
		_ func(*wire.Progress)) (Answer, error) {
		close(started)
		select {
		case <-release:
			return backend.hit()
		case <-ctx.Done():
			return Answer{}, ctx.Err()
		}
	}
	t.Run("lets requests finish", func(t *testing.T) {
		s := serve(t, backend, limits{})
		c, model := dial(t, s), modelFile(t)
		answered := make(chan error, 1)
		go func() {
			_, view, err := c.Acquire(context.Background(), acquireModel(), []*os.File{model}, nil,
				nil)
			answered <- errors.Join(err, view.Close())
		}()
		<-started
		stopped := make(chan error, 1)
		go func() { stopped <- s.Shutdown(background(t)) }()
		require.Eventually(t, func() bool {
			_, err := Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
			return errors.Is(err, ErrBusy)
		}, patience, time.Millisecond, "new requests are refused")
		_, err := Dial(background(t), s.path)
		require.ErrorIs(t, err, ErrNoDaemon)
		close(release)
		require.NoError(t, <-answered)
		require.NoError(t, <-stopped)
		_, err = Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
		require.ErrorIs(t, err, ErrConnectionLost)
	})
	t.Run("cancels at the end of its patience", func(t *testing.T) {
		s := serve(t, &standIn{acquire: waitForEnd}, limits{})
		c := rawHello(t, s)
		c.write(acquireFrame(1, 1), int(modelFile(t).Fd()))
		require.Eventually(t, func() bool { return s.backend.calls.Load() == 1 }, patience,
			time.Millisecond)
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, s.Shutdown(ctx), context.DeadlineExceeded)
	})
}

// A server that refuses answers requests under way, those that come, and new connections with its
// reason, until it serves again.
func TestRefusalAnswersEveryRequest(t *testing.T) {
	s := serve(t, &standIn{acquire: waitForEnd}, limits{})
	c, model := dial(t, s), modelFile(t)
	underWay := make(chan error, 1)
	go func() {
		_, _, err := c.Acquire(context.Background(), acquireModel(), []*os.File{model}, nil, nil)
		underWay <- err
	}()
	require.Eventually(t, func() bool { return s.backend.calls.Load() == 1 }, patience,
		time.Millisecond)
	s.RefuseAll(&Error{Class: wire.ErrorClass_UNAVAILABLE, Text: "the index is damaged",
		Hint: "wait"})
	status := func() error {
		_,
			err := Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
		return err
	}
	_, newcomer := Dial(background(t), s.path)
	for name, err := range map[string]error{"under way": <-underWay, "later": status(),
		"new connection": newcomer} {
		require.ErrorIs(t, err, ErrUnavailable, name)
		var refused *Error
		require.ErrorAs(t, err, &refused, name)
		require.Equal(t, "the index is damaged", refused.Text, name)
		require.Equal(t, "wait", refused.Hint, name)
	}
	s.RefuseAll(nil)
	require.NoError(t, status())
	_ = dial(t, s)
}

// Under socket activation the listener comes as a descriptor, and its file is not ours to remove.
func TestActivatedListener(t *testing.T) {
	dir, err := os.MkdirTemp("", "us")
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	systemd, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	defer systemd.Close()
	passed, err := systemd.File()
	require.NoError(t, err)
	l, err := net.FileListener(passed)
	require.NoError(t, err)
	require.NoError(t, passed.Close())
	s := &Server{Backend: &standIn{dir: dir}}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	c, err := Dial(background(t), path)
	require.NoError(t, err)
	_, err = Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	require.NoError(t, c.Close())
	cancel()
	require.NoError(t, <-ended)
	require.FileExists(t, path)
}

// 64 KiB of requests cannot make the daemon take memory for a megabyte each.
func TestAnnouncedLengthTakesNoMemory(t *testing.T) {
	s := serve(t, &standIn{}, limits{})
	var before, after runtime.MemStats
	clients := make([]*rawClient, 64)
	for i := range clients {
		clients[i] = rawHello(t, s)
	}
	runtime.GC()
	runtime.ReadMemStats(&before)
	for _, c := range clients {
		c.write([]byte{0, 0, 0x10, 0, 1}) // 1 MiB follows, it says
	}
	time.Sleep(20 * time.Millisecond)
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4<<20))
}

// An answer that crosses the Cancel brings a descriptor that no caller waits for any more.
func TestLateAnswerIsClosed(t *testing.T) {
	started, late := make(chan struct{}), make(chan struct{})
	backend := &standIn{}
	backend.acquire = func(context.Context, Peer, *wire.Acquire, []*os.File,
		func(*wire.Progress)) (Answer, error) {
		started <- struct{}{}
		<-late // and not the end of the context
		return backend.hit()
	}
	c, model := dial(t, serve(t, backend, limits{})), modelFile(t)
	before := openDescriptors(t)
	for range 5 {
		ctx, cancel := context.WithCancel(context.Background())
		go func() { <-started; cancel() }()
		_, _, err := c.Acquire(ctx, acquireModel(), []*os.File{model}, nil, nil)
		require.ErrorIs(t, err, context.Canceled)
		late <- struct{}{}
	}
	require.Eventually(t, func() bool { return openDescriptors(t) <= before }, patience,
		time.Millisecond)
}

// A late answer that is never read would keep its descriptor, which is the lease, on its way to the
// client.
func TestLateAnswerEndsItsLease(t *testing.T) {
	started, late := make(chan struct{}), make(chan *os.File)
	backend := &standIn{acquire: func(context.Context, Peer, *wire.Acquire, []*os.File,
		func(*wire.Progress)) (Answer, error) {
		started <- struct{}{}
		return Answer{View: <-late}, nil // whether or not the context has ended
	}}
	s, model := serve(t, backend, limits{}), modelFile(t)
	between := map[string]func(*Client) error{
		"no call follows": func(*Client) error { return nil },
		"the next call is answered before": func(c *Client) error {
			_, err := Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
			return err
		},
	}
	for name, follow := range between {
		t.Run(name, func(t *testing.T) {
			c := dial(t, s)
			ctx, cancel := context.WithCancel(context.Background())
			go func() { <-started; cancel() }()
			_, _, err := c.Acquire(ctx, acquireModel(), []*os.File{model}, nil, nil)
			require.ErrorIs(t, err, context.Canceled)
			require.NoError(t, follow(c))
			lease, view, err := os.Pipe()
			require.NoError(t, err)
			defer lease.Close()
			late <- view
			require.NoError(t, lease.SetReadDeadline(time.Now().Add(patience)))
			_, err = lease.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF, "the last copy of the descriptor is closed")
			_, err = Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
			require.NoError(t, err, "the connection goes on")
		})
	}
}
