package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// asProgram makes the test binary epcachectl itself, for the tests that become another program.
const asProgram = "EPCACHECTL_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

// standIn is a daemon's backend that serves one view.
type standIn struct {
	t *testing.T

	mu       sync.Mutex // a socket orders nothing for the race detector; guards the rest
	folder   string     // of the view
	id       string
	files    []*wire.File
	asked    []*wire.Acquire
	external map[string]string
	acquire  func(a *wire.Acquire) (unixsock.Answer, error)
	err      error // of every other request
	changes  []string
	findings []*wire.Finding
	explain  *wire.Explanation
	advice   []*wire.Advice
	runtimes []*wire.RuntimeFacts // nil: one
	builds   []*wire.Build        // nil: one
	past     []*wire.Event
	lossy    bool // subscribers are not told
	tell     map[chan *wire.Event]bool
	jobs     []*wire.Job
	failures []*wire.Failure
	asks     int // for what has happened
}

func (b *standIn) Hello(unixsock.Peer, *wire.Hello) *wire.HelloReply {
	return &wire.HelloReply{Scope: "uid:0", Rights: []string{"administrator"}}
}

func (b *standIn) Acquire(_ context.Context, _ unixsock.Peer, a *wire.Acquire, fds []*os.File, progress func(*wire.Progress)) (unixsock.Answer, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = append(b.asked, a)
	if b.acquire != nil {
		return b.acquire(a)
	}
	var missing []string
	for location := range b.external {
		found := false
		for _, x := range a.GetModel().GetExternal() {
			if x.GetLocation() == location {
				text, err := io.ReadAll(fds[x.GetFd()])
				if err != nil || string(text) != b.external[location] {
					return unixsock.Answer{}, errors.New("wrong external data")
				}
				found = true
			}
		}
		if !found {
			missing = append(missing, location)
		}
	}
	if missing != nil {
		return unixsock.Answer{}, &unixsock.NeedError{Locations: missing}
	}
	progress(&wire.Progress{Phase: "compiling"})
	return b.hit()
}

func (b *standIn) hit() (unixsock.Answer, error) {
	view, err := os.Open(b.folder)
	return unixsock.Answer{View: view, Reply: &wire.AcquireReply{
		Outcome: "hit", RequestKey: strings.Repeat("ab", 32), Build: strings.Repeat("cd", 32), ModelDigest: strings.Repeat("ef", 32),
		Ep: "StandInExecutionProvider", SdkVersion: "1.0", HardwareArchitecture: "any", Compatibility: "optimal", Why: "same",
		View: b.folder, Graph: b.id + "/0123456789abcdef_ctx.onnx", Files: b.files, CompileSeconds: 2, Record: `{"version":1}`,
		ProviderOptions:        map[string]*wire.StringMap{"StandInExecutionProvider": {}},
		SessionOptions:         map[string]string{"ep.context_enable": "0"},
		GraphOptimizationLevel: "disable_all",
	}}, err
}

func (b *standIn) build() *wire.Build {
	return &wire.Build{Build: strings.Repeat("cd", 32), ModelName: "tiny.onnx", Ep: "StandInExecutionProvider", Files: b.files, State: "current", Hits: 3, CreatedMs: 1}
}

func (b *standIn) Release(context.Context, unixsock.Peer, *wire.Release) (*wire.ReleaseReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.ReleaseReply{}, b.err
}

func (b *standIn) List(_ context.Context, _ unixsock.Peer, l *wire.List) (*wire.ListReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.builds != nil {
		return &wire.ListReply{Builds: b.builds}, b.err
	}
	if l.GetAfter() == "" {
		return &wire.ListReply{Builds: []*wire.Build{b.build()}, Next: "2"}, b.err
	}
	return &wire.ListReply{Builds: []*wire.Build{b.build()}}, b.err
}

func (b *standIn) Show(_ context.Context, _ unixsock.Peer, s *wire.Show) (*wire.ShowReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changes = append(b.changes, "show "+s.GetEntry())
	if b.builds != nil {
		return &wire.ShowReply{Builds: b.builds}, b.err
	}
	return &wire.ShowReply{Builds: []*wire.Build{b.build()}, Records: []string{`{"version":1}`}, History: []string{"compiled"}}, b.err
}

func (b *standIn) Invalidate(_ context.Context, _ unixsock.Peer, i *wire.Invalidate) (*wire.ChangeReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !i.GetDryRun() {
		b.changes = append(b.changes, "invalidate "+strings.Join(i.GetEntries(), " ")+" "+i.GetReason())
	}
	return &wire.ChangeReply{Builds: []*wire.Build{b.build()}}, b.err
}

func (b *standIn) Pin(_ context.Context, _ unixsock.Peer, r *wire.Pin) (*wire.ChangeReply, error) {
	return b.changePin("pin", r.GetEntries(), r.GetDryRun())
}

func (b *standIn) Unpin(_ context.Context, _ unixsock.Peer, r *wire.Unpin) (*wire.ChangeReply, error) {
	return b.changePin("unpin", r.GetEntries(), r.GetDryRun())
}

func (b *standIn) changePin(verb string, entries []string, dryRun bool) (*wire.ChangeReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !dryRun {
		b.changes = append(b.changes, verb+" "+strings.Join(entries, " "))
	}
	build := b.build()
	build.Pinned = verb == "pin" && !dryRun
	return &wire.ChangeReply{Builds: []*wire.Build{build}}, b.err
}

func (b *standIn) Collect(_ context.Context, _ unixsock.Peer, r *wire.Collect, _ func(*wire.Progress)) (*wire.CollectReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	outcome := "planned"
	if !r.GetDryRun() {
		b.changes, outcome = append(b.changes, fmt.Sprintf("collect %d", r.GetToBytes())), "removed"
	}
	return &wire.CollectReply{UsedBytes: 8192, FreedBytes: 4096, BudgetBytes: r.GetToBytes(), ShortBytes: 1024, Removed: 1,
		Removals: []*wire.Removal{{Build: "cdcdcdcdcdcdcdcd", ModelName: "tiny.onnx", Ep: "StandInExecutionProvider", FreesBytes: 4096, Reason: "why", Outcome: outcome, Models: 2}},
		Kept:     []*wire.Kept{{Reason: "pinned", Builds: 1, Bytes: 4096}}}, b.err
}

func (b *standIn) Usage(context.Context, unixsock.Peer, *wire.Usage) (*wire.UsageReply, error) {
	return &wire.UsageReply{}, nil
}

func (b *standIn) Remove(_ context.Context, _ unixsock.Peer, r *wire.Remove) (*wire.ChangeReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !r.GetDryRun() {
		b.changes = append(b.changes, "remove "+strings.Join(r.GetEntries(), " "))
	}
	if b.builds != nil {
		return &wire.ChangeReply{Builds: b.builds}, b.err
	}
	return &wire.ChangeReply{Builds: []*wire.Build{b.build()}, FreedBytes: 2048}, b.err
}

func (b *standIn) Status(context.Context, unixsock.Peer, *wire.Status) (*wire.StatusReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.StatusReply{Version: "9", Space: &wire.Space{StoredBytes: 7}}, b.err
}

func (b *standIn) Probe(context.Context, unixsock.Peer, *wire.Probe) (*wire.ProbeReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.runtimes != nil {
		return &wire.ProbeReply{Runtimes: b.runtimes}, b.err
	}
	return &wire.ProbeReply{Runtimes: []*wire.RuntimeFacts{{Directory: "/opt/ort", OrtVersion: "1.31.1", Eps: []*wire.EpFacts{
		{Name: "StandInExecutionProvider", Devices: []*wire.DeviceFacts{{Type: "CPU", Vendor: "Some"}}}}}}}, b.err
}

func (b *standIn) Check(context.Context, unixsock.Peer, *wire.Check) (*wire.CheckReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.CheckReply{Blobs: 2, Builds: 1, Findings: b.findings}, b.err
}

// set changes what is answered from now on.
func (b *standIn) set(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
}

// first is the first request that came.
func (b *standIn) first() *wire.Acquire {
	b.mu.Lock()
	defer b.mu.Unlock()
	require.NotEmpty(b.t, b.asked)
	return b.asked[0]
}

func (b *standIn) changed() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.changes)
}

// newStandIn makes a view of a graph and a sidecar.
func newStandIn(t *testing.T) *standIn {
	b := &standIn{t: t, folder: t.TempDir(), id: "f00d"}
	require.NoError(t, os.MkdirAll(filepath.Join(b.folder, b.id, "sub"), 0o700))
	for name, text := range map[string]string{"0123456789abcdef_ctx.onnx": "graph", "sub/weights.bin": "weights"} {
		require.NoError(t, os.WriteFile(filepath.Join(b.folder, b.id, name), []byte(text), 0o400))
		digest, err := cas.Sum(context.Background(), strings.NewReader(text), 0, int64(len(text)))
		require.NoError(t, err)
		b.files = append(b.files, &wire.File{Name: b.id + "/" + name, Size: int64(len(text)), Digest: digest.String()})
	}
	return b
}

// serve runs the backend and points this process's commands at it.
func (b *standIn) serve() string {
	dir, err := os.MkdirTemp("", "ectl") // short, for a socket
	require.NoError(b.t, err)
	path := filepath.Join(dir, "s")
	l, err := unixsock.Listen(path, 0o600)
	require.NoError(b.t, err)
	b.t.Cleanup(b.serveOn(l))
	b.t.Cleanup(func() { require.NoError(b.t, os.RemoveAll(dir)) })
	b.t.Setenv(unixsock.SocketVariable, path)
	return path
}

// serveOn runs the backend until stop is called, which may be twice.
func (b *standIn) serveOn(l net.Listener) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- (&unixsock.Server{Backend: b}).Serve(ctx, l) }()
	return sync.OnceFunc(func() {
		cancel()
		require.NoError(b.t, <-ended)
	})
}

// result is what a call left behind.
type result struct {
	code     int
	out, err string
}

func call(t *testing.T, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var out, err bytes.Buffer
	code := run(ctx, args, strings.NewReader(""), &out, &err)
	return result{code, out.String(), err.String()}
}

// tinyModel writes the smallest of ONNX files, and gives its path.
func tinyModel(t *testing.T, name string) string {
	t.Helper()
	var graph, opset, model []byte
	graph = protowire.AppendTag(graph, 2, protowire.BytesType)
	graph = protowire.AppendString(graph, "tiny")
	opset = protowire.AppendTag(opset, 2, protowire.VarintType)
	opset = protowire.AppendVarint(opset, 17)
	model = protowire.AppendTag(model, 1, protowire.VarintType)
	model = protowire.AppendVarint(model, 8)
	model = protowire.AppendTag(model, 7, protowire.BytesType)
	model = protowire.AppendBytes(model, graph)
	model = protowire.AppendTag(model, 8, protowire.BytesType)
	model = protowire.AppendBytes(model, opset)
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, model, 0o600))
	return path
}
