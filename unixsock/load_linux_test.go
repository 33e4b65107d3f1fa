package unixsock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

const stale = "[ONNXRuntimeError] : 10 : INVALID_GRAPH : incompatible runtime requirements magic"

// refusing is a backend that notes reports and decides as told.
type refusing struct {
	*standIn
	mu       sync.Mutex
	reports  []*wire.Report
	decision *wire.ReportReply
	err      error
}

func newRefusing(decision string) *refusing {
	r := &refusing{standIn: &standIn{}, decision: &wire.ReportReply{Decision: decision, Text: "checked"}}
	r.standIn.report = func(_ context.Context, report *wire.Report) (*wire.ReportReply, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.reports = append(r.reports, report)
		return r.decision, r.err
	}
	return r
}

// seen takes the lock: a socket orders nothing for the race detector.
func (r *refusing) seen() []*wire.Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.reports)
}

// load has the client load a model, with a function that fails with each of the errors in turn and then succeeds.
func load(t *testing.T, s *served, errs ...error) (*Lease, int, error) {
	request := acquireModel()
	request.Runtime = &wire.Runtime{OrtVersion: "1.31.1", EpLibraries: []*wire.EpLibrary{{Ep: "E", Path: "/e.so", Fd: proto.Uint32(0)}}}
	loads := 0
	c, model := dial(t, s), modelFile(t)
	before := openDescriptors(t)
	lease, err := c.Load(background(t), request, []*os.File{model}, nil, nil, func(l *Lease) error {
		_, statErr := os.Stat(strings.TrimSuffix(l.Path(), l.Reply.GetGraph()))
		require.NoError(t, statErr, "the path leads into the view")
		if loads++; loads <= len(errs) {
			return errs[loads-1]
		}
		return nil
	})
	if err != nil {
		require.Nil(t, lease)
		require.Eventually(t, func() bool { return openDescriptors(t) <= before }, patience, time.Millisecond, "no lease is left")
	}
	return lease, loads, err
}

func TestLoadOfASoundBuild(t *testing.T) {
	b := newRefusing("retry")
	lease, loads, err := load(t, serve(t, b.standIn, limits{}))
	require.NoError(t, err)
	require.Equal(t, 1, loads)
	require.Empty(t, b.seen())
	require.NoError(t, lease.Close())
}

func TestRefusalIsReportedAndLoadTriedAgain(t *testing.T) {
	b := newRefusing("retry")
	lease, loads, err := load(t, serve(t, b.standIn, limits{}), errors.New(stale))
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
			_, loads, err := load(t, serve(t, b.standIn, limits{}), refusal, refusal)
			var refused *RefusedError
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
	_, loads, err := load(t, serve(t, b.standIn, limits{}), own)
	require.ErrorIs(t, err, own)
	var refused *RefusedError
	require.False(t, errors.As(err, &refused))
	require.Equal(t, 1, loads)
	require.Empty(t, b.seen())
}

func TestReportThatFails(t *testing.T) {
	b := newRefusing("retry")
	b.err = &Error{Class: wire.ErrorClass_BUSY, Text: "too many reports"}
	_, loads, err := load(t, serve(t, b.standIn, limits{}), errors.New(stale))
	var refused *RefusedError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, []*wire.ReportReply{nil}, refused.Decision)
	require.Equal(t, 1, loads)
}

func TestSecondAcquireFails(t *testing.T) {
	b := newRefusing("retry")
	b.acquire = func(context.Context, Peer, *wire.Acquire, []*os.File, func(*wire.Progress)) (Answer, error) {
		if b.calls.Load() > 1 {
			return Answer{}, &Error{Class: wire.ErrorClass_COMPILE_FAILED, Text: "no luck"}
		}
		return b.hit()
	}
	_, _, err := load(t, serve(t, b.standIn, limits{}), errors.New(stale))
	var refused *RefusedError
	require.ErrorAs(t, err, &refused)
	require.ErrorIs(t, err, ErrCompileFailed)
}

func TestModelThatIsCompiledAlready(t *testing.T) {
	b := newRefusing("retry")
	b.acquire = func(context.Context, Peer, *wire.Acquire, []*os.File, func(*wire.Progress)) (Answer, error) {
		return Answer{Reply: &wire.AcquireReply{Outcome: "passthrough"}}, nil
	}
	c := dial(t, serve(t, b.standIn, limits{}))
	_, err := c.Load(background(t), acquireModel(), []*os.File{modelFile(t)}, nil, nil, func(l *Lease) error {
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
		"typed":              {fmt.Errorf("load: %w", &Refusal{Code: 9, Text: "x"}), 9},
		"typed, of no error": {(*Refusal)(nil), -1},
		"other error":        {os.ErrNotExist, -1},
		"no number":          {errors.New("[ONNXRuntimeError] : x : "), -1},
		"number too large":   {errors.New("[ONNXRuntimeError] : 99999999999999 : X : "), -1},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			r, ok := RefusalOf(tc.err)
			require.Equal(t, tc.code >= 0, ok)
			if ok {
				require.Equal(t, tc.code, r.Code)
			}
		})
	}
}
