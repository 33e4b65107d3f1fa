package epcache_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/clients/epcache"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

const stale = "[ONNXRuntimeError] : 10 : INVALID_GRAPH : incompatible runtime requirements magic"

const patience = time.Minute

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// refusing is a backend that answers with a build, records reports and decides as its fields say.
// It has no answer to other requests.
type refusing struct {
	unixsock.Backend
	acquire  func() (unixsock.Answer, error) // nil: hit
	dir      string                          // of the view
	calls    atomic.Int64
	mu       sync.Mutex
	reports  []*wire.Report
	decision *wire.ReportReply
	err      error
}

func newRefusing(decision string) *refusing {
	return &refusing{decision: &wire.ReportReply{Decision: decision, Text: "checked"}}
}

func (r *refusing) Hello(unixsock.Peer, *wire.Hello) *wire.HelloReply { return &wire.HelloReply{} }

func (r *refusing) Acquire(context.Context, unixsock.Peer, *wire.Acquire, *unixsock.Files,
	func(*wire.Progress)) (unixsock.Answer, error) {
	r.calls.Add(1)
	if r.acquire != nil {
		return r.acquire()
	}
	return r.hit()
}

func (r *refusing) hit() (unixsock.Answer, error) {
	view, err := os.Open(r.dir)
	reply := &wire.AcquireReply{Outcome: "hit", Build: "b", Graph: "id/x_ctx.onnx"}
	return unixsock.Answer{Reply: reply, View: view}, err
}

func (r *refusing) Ask(_ context.Context, _ unixsock.Peer, request proto.Message,
	_ func(*wire.Progress)) (proto.Message, error) {
	report, is := request.(*wire.Report)
	if !is {
		return nil, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reports = append(r.reports, report)
	return r.decision, r.err
}

// connect serves the backend and connects to it.
func connect(t *testing.T, r *refusing) *unixsock.Client {
	dir, err := os.MkdirTemp("", "ec") // t.TempDir is too long for a socket
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	r.dir = dir
	path := filepath.Join(dir, "s")
	l, err := unixsock.Listen(path, 0o600)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- (&unixsock.Server{Backend: r, Name: "test"}).Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	c, err := unixsock.Dialer{Name: "test"}.Dial(background(t), path)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func background(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func openDescriptors(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

func request(t *testing.T) epcache.Request {
	path := filepath.Join(t.TempDir(), "model.onnx")
	require.NoError(t, os.WriteFile(path, []byte("model"), 0o600))
	model, err := os.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { model.Close() })
	return epcache.Request{Files: []*os.File{model}, Acquire: &wire.Acquire{
		Model: &wire.Model{Name: "model.onnx"},
		Eps:   []*wire.ExecutionProvider{{Name: "StandInExecutionProvider"}}}}
}

// seen takes the lock: a socket orders nothing for the race detector.
func (r *refusing) seen() []*wire.Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.reports)
}

// load loads a model, with a function that fails with each of the errors in turn and then succeeds.
func load(t *testing.T, b *refusing, errs ...error) (*epcache.Lease, int, error) {
	r := request(t)
	library := &wire.EpLibrary{Ep: "E", Path: "/e.so", Fd: proto.Uint32(0)}
	r.Acquire.Runtime = &wire.Runtime{OrtVersion: "1.31.1", EpLibraries: []*wire.EpLibrary{library}}
	loads := 0
	c := connect(t, b)
	before := openDescriptors(t)
	lease, err := epcache.Load(background(t), c, r, func(l *epcache.Lease) error {
		_, statErr := os.Stat(strings.TrimSuffix(l.Path(), l.Reply.GetGraph()))
		require.NoError(t, statErr, "the path leads into the view")
		if loads++; loads <= len(errs) {
			return errs[loads-1]
		}
		return nil
	})
	if err != nil {
		require.Nil(t, lease)
		require.Eventually(t, func() bool { return openDescriptors(t) <= before }, patience,
			time.Millisecond, "no lease is left")
	}
	return lease, loads, err
}

func TestLoadOfASoundBuild(t *testing.T) {
	b := newRefusing("retry")
	lease, loads, err := load(t, b)
	require.NoError(t, err)
	require.Equal(t, 1, loads)
	require.Empty(t, b.seen())
	require.NoError(t, lease.Close())
}

func TestRefusalIsReportedAndLoadTriedAgain(t *testing.T) {
	b := newRefusing("retry")
	lease, loads, err := load(t, b, errors.New(stale))
	require.NoError(t, err)
	require.Equal(t, 2, loads)
	require.NoError(t, lease.Close())
	require.Len(t, b.seen(), 1)
	report := b.seen()[0]
	require.Equal(t, "b", report.GetBuild())
	require.EqualValues(t, 10, report.GetCode())
	require.Equal(t, stale, report.GetText())
	require.Equal(t, "id/x_ctx.onnx", report.GetGraph())
	require.Equal(t, "1.31.1", report.GetOrtVersion())
	require.Equal(t, "/e.so", report.GetRuntime().GetEpLibraries()[0].GetPath())
	require.Nil(t, report.GetRuntime().GetEpLibraries()[0].Fd, "a report carries no descriptors")
}

func TestLoadGivesUp(t *testing.T) {
	refusal := errors.New(stale)
	cases := map[string]struct {
		decision string
		loads    int
		reports  int
	}{
		"after the second refusal":             {"retry", 2, 2},
		"when the build is sound":              {"sound", 1, 1},
		"when the daemon has nothing better":   {"compile_yourself", 1, 1},
		"when the decision is of a later time": {"something else", 1, 1},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newRefusing(tc.decision)
			_, loads, err := load(t, b, refusal, refusal)
			var refused *epcache.RefusedError
			require.ErrorAs(t, err, &refused)
			require.ErrorIs(t, err, refusal)
			require.Equal(t, tc.loads, loads)
			require.Len(t, b.seen(), tc.reports)
			require.Equal(t, tc.decision, refused.Decision[0].GetDecision())
			require.Equal(t, "b", refused.Build)
			require.Contains(t, err.Error(), tc.decision+": checked")
		})
	}
}

func TestOwnErrorsAreNotReported(t *testing.T) {
	b := newRefusing("retry")
	own := errors.New("out of patience")
	_, loads, err := load(t, b, own)
	require.ErrorIs(t, err, own)
	var refused *epcache.RefusedError
	require.False(t, errors.As(err, &refused))
	require.Equal(t, 1, loads)
	require.Empty(t, b.seen())
}

func TestReportThatFails(t *testing.T) {
	b := newRefusing("retry")
	b.err = &unixsock.Error{Class: wire.ErrorClass_BUSY, Text: "too many reports"}
	_, loads, err := load(t, b, errors.New(stale))
	var refused *epcache.RefusedError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, []*wire.ReportReply{nil}, refused.Decision)
	require.Equal(t, 1, loads)
}

func TestSecondAcquireFails(t *testing.T) {
	b := newRefusing("retry")
	b.acquire = func() (unixsock.Answer, error) {
		if b.calls.Load() > 1 {
			return unixsock.Answer{},
				&unixsock.Error{Class: wire.ErrorClass_COMPILE_FAILED, Text: "no luck"}
		}
		return b.hit()
	}
	_, _, err := load(t, b, errors.New(stale))
	var refused *epcache.RefusedError
	require.ErrorAs(t, err, &refused)
	require.ErrorIs(t, err, unixsock.ErrCompileFailed)
}

func TestModelThatIsCompiledAlready(t *testing.T) {
	b := newRefusing("retry")
	b.acquire = func() (unixsock.Answer, error) {
		return unixsock.Answer{Reply: &wire.AcquireReply{Outcome: "passthrough"}}, nil
	}
	_, err := epcache.Load(background(t), connect(t, b), request(t), func(l *epcache.Lease) error {
		require.Empty(t, l.Path())
		return errors.New(stale)
	})
	require.EqualError(t, err, stale)
	require.Empty(t, b.seen(), "the daemon has no build that could be wrong")
}

func TestRefusalOf(t *testing.T) {
	cases := map[string]struct {
		err  error
		code int32 // -1: none
	}{
		"nothing":            {nil, -1},
		"message":            {errors.New(stale), 10},
		"inside another":     {fmt.Errorf("session: %w", errors.New(stale)), 10},
		"two digits":         {errors.New("[ONNXRuntimeError] : 11 : EP_FAIL : x"), 11},
		"typed":              {fmt.Errorf("load: %w", &epcache.Refusal{Code: 9, Text: "x"}), 9},
		"typed, of no error": {(*epcache.Refusal)(nil), -1},
		"other error":        {os.ErrNotExist, -1},
		"no number":          {errors.New("[ONNXRuntimeError] : x : "), -1},
		"number too large":   {errors.New("[ONNXRuntimeError] : 99999999999999 : X : "), -1},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			r, ok := epcache.ParseRefusal(tc.err)
			require.Equal(t, tc.code >= 0, ok)
			if ok {
				require.Equal(t, tc.code, r.Code)
			}
		})
	}
}
