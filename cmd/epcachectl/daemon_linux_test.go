package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// asProgram makes the test binary epcachectl itself, for the tests that become another program.
const asProgram = "EPCACHECTL_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		compilertest.RemoveWorker()
		os.Exit(code)
	}))
}

// standIn is a daemon's backend that serves one view.
type standIn struct {
	t *testing.T

	mu          sync.Mutex // a socket orders nothing for the race detector; guards the rest
	dir         string     // of the view
	id          string
	files       []*wire.File
	asked       []*wire.Acquire
	external    map[string]string
	acquire     func(a *wire.Acquire) (unixsock.Answer, error)
	put         func(p *wire.Put) (unixsock.Answer, error)
	err         error          // of every other request
	hold        chan struct{}  // closed when models may be answered; nil: at once
	progress    *wire.Progress // sent before; nil: of a compile
	changes     []string
	findings    []*wire.Finding
	explain     *wire.Explanation
	advice      []*wire.Advice
	runtimes    []*wire.RuntimeFacts // nil: one
	builds      []*wire.Build        // nil: one
	past        []*wire.Event
	lossy       bool // subscribers get no event
	subscribers map[chan *wire.Event]bool
	jobs        []*wire.Job
	failures    []*wire.Failure
	asks        int // for what has happened

	ordinary  bool                     // the caller is no administrator
	startedBy string                   // for the status
	remotes   []*wire.Remote           // for the status
	stop      func() (*os.File, error) // nil: it does not stop

	second func() error // is called for the second page of a list or of usage; may be nil
}

func (b *standIn) Hello(unixsock.Peer, *wire.Hello) *wire.HelloReply {
	if b.ordinary {
		return &wire.HelloReply{Scope: "uid:1000"}
	}
	return &wire.HelloReply{Scope: "uid:0", Rights: []string{"administrator"}}
}

func (b *standIn) Acquire(ctx context.Context, _ unixsock.Peer, a *wire.Acquire,
	files *unixsock.Files, progress func(*wire.Progress)) (unixsock.Answer, error) {
	if b.progress != nil {
		progress(b.progress)
	}
	if b.hold != nil {
		select {
		case <-b.hold:
		case <-ctx.Done():
			return unixsock.Answer{}, ctx.Err()
		}
	}
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
				text, err := io.ReadAll(files.Open()[x.GetFd()])
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
	view, err := os.Open(b.dir)
	return unixsock.Answer{View: view, Reply: &wire.AcquireReply{
		Outcome: "hit", RequestKey: strings.Repeat("ab", 32), Build: strings.Repeat("cd", 32),
		ModelDigest: strings.Repeat("ef", 32),
		Ep:          "StandInExecutionProvider", SdkVersion: "1.0", HardwareArchitecture: "any",
		Compatibility: "optimal", Why: "same",
		View: b.dir, Graph: b.id + "/0123456789abcdef_ctx.onnx", Files: b.files,
		CompileSeconds: 2, Record: `{"version":1}`,
		ProviderOptions:        map[string]*wire.StringMap{"StandInExecutionProvider": {}},
		SessionOptions:         map[string]string{"ep.context_enable": "0"},
		GraphOptimizationLevel: "disable_all",
	}}, err
}

func (b *standIn) build() *wire.Build {
	return &wire.Build{Build: strings.Repeat("cd", 32), ModelName: "tiny.onnx",
		Ep: "StandInExecutionProvider", Files: b.files, State: "current", Hits: 3, CreatedMs: 1}
}

// Ask has the method that is called as the request is answer it.
func (b *standIn) Ask(ctx context.Context, p unixsock.Peer, request proto.Message,
	progress func(*wire.Progress)) (proto.Message, error) {
	method := reflect.ValueOf(b).MethodByName(string(request.ProtoReflect().Descriptor().Name()))
	if !method.IsValid() || method.Type().NumIn() < 3 {
		return nil, nil
	}
	args := []reflect.Value{reflect.ValueOf(ctx), reflect.ValueOf(p), reflect.ValueOf(request),
		reflect.ValueOf(progress)}
	out := method.Call(args[:method.Type().NumIn()])
	err, _ := out[1].Interface().(error)
	return out[0].Interface().(proto.Message), err
}

func (b *standIn) Release(context.Context, unixsock.Peer, *wire.Release) (*wire.ReleaseReply,
	error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.ReleaseReply{}, b.err
}

func (b *standIn) List(_ context.Context, _ unixsock.Peer, l *wire.List,
	_ func(*wire.Progress)) (*wire.ListReply, error) {
	if err := b.page(l.GetAfter()); err != nil {
		return nil, err
	}
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

func (b *standIn) page(after string) error {
	if after == "" || b.second == nil {
		return nil
	}
	return b.second()
}

func (b *standIn) Show(_ context.Context, _ unixsock.Peer, s *wire.Show) (*wire.ShowReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changes = append(b.changes, "show "+s.GetEntry())
	if b.builds != nil {
		return &wire.ShowReply{Builds: b.builds}, b.err
	}
	return &wire.ShowReply{Builds: []*wire.Build{b.build()}, Records: []string{`{"version":1}`},
		History: []string{"compiled"}}, b.err
}

func (b *standIn) Invalidate(_ context.Context, _ unixsock.Peer,
	i *wire.Invalidate) (*wire.ChangeReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !i.GetDryRun() {
		b.changes = append(b.changes, "invalidate "+strings.Join(i.GetEntries(), " ")+" "+
			i.GetReason())
	}
	return &wire.ChangeReply{Builds: []*wire.Build{b.build()}}, b.err
}

func (b *standIn) Pin(_ context.Context, _ unixsock.Peer, r *wire.Pin) (*wire.ChangeReply, error) {
	return b.changePin("pin", r.GetEntries(), r.GetDryRun())
}

func (b *standIn) Unpin(_ context.Context, _ unixsock.Peer, r *wire.Unpin) (*wire.ChangeReply,
	error) {
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

func (b *standIn) Pack(_ context.Context, _ unixsock.Peer, r *wire.Pack,
	_ func(*wire.Progress)) (*wire.PackReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	outcome, frees := "packed", int64(4096)
	if r.GetUnpack() {
		outcome, frees = "unpacked", -8192
	}
	if !r.GetDryRun() {
		b.changes = append(b.changes, fmt.Sprintf("%s %q %t", outcome, r.GetEntries(), r.GetAll()))
	}
	later, sum := int64(2048), int64(3072)
	if r.GetUnpack() {
		later, sum = 0, 0
	}
	return &wire.PackReply{Changed: 1, FreedBytes: frees, LaterBytes: sum, More: 3,
		Builds: []*wire.PackedBuild{
			{Build: "cdcdcdcdcdcdcdcd", ModelName: "tiny.onnx", Ep: "StandInExecutionProvider",
				Outcome: outcome, FreesBytes: frees},
			{Build: "efefefefefefefef", ModelName: "other.onnx", Ep: "StandInExecutionProvider",
				Outcome: "kept: in use", LaterBytes: later}}}, b.err
}

func (b *standIn) Collect(_ context.Context, _ unixsock.Peer, r *wire.Collect,
	_ func(*wire.Progress)) (*wire.CollectReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	outcome := "planned"
	if !r.GetDryRun() {
		to := "as configured"
		if r.ToBytes != nil {
			to = fmt.Sprint(r.GetToBytes())
		}
		b.changes, outcome = append(b.changes, "collect "+to), "removed"
	}
	return &wire.CollectReply{UsedBytes: 8192, FreedBytes: 4096, BudgetBytes: r.GetToBytes(),
		ShortBytes: 1024, Removed: 1,
		Steps: []*wire.CollectStep{{Action: "remove", Build: "cdcdcdcdcdcdcdcd",
			ModelName: "tiny.onnx", Ep: "StandInExecutionProvider", FreesBytes: 4096, Reason: "why",
			Outcome: outcome, Models: 2}},
		Kept: []*wire.Kept{{Reason: "pinned", Builds: 1, Bytes: 4096, Keys: []string{"ab"}},
			{Reason: "needed by builds outside the plan", Bytes: 1024}}}, b.err
}

// Usage returns two models of one name on two pages, and what two entries share.
func (b *standIn) Usage(_ context.Context, _ unixsock.Peer, r *wire.Usage,
	_ func(*wire.Progress)) (*wire.UsageReply, error) {
	if err := b.page(r.GetAfter()); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(r.GetEntries()) == 1 && r.GetAfter() == "" {
		b.changes = append(b.changes, "usage "+r.GetEntries()[0])
	}
	of := func(model, build string, own int64) *wire.BuildUsage {
		return &wire.BuildUsage{LogicalBytes: 8192, OwnBytes: own, SharedBytes: 4096,
			OnceBytes: map[bool]int64{true: 4096}[build != "a2"],
			Shapes:    "batch=" + strings.TrimLeft(build, "ab"),
			Build: &wire.Build{Build: build, ModelName: "tiny.onnx", ModelDigest: model,
				Ep: "StandInExecutionProvider", Scope: "shared",
				KeptAs: map[bool]string{true: "packed", false: "whole"}[build == "a2"]}}
	}
	if r.GetAfter() != "" {
		return &wire.UsageReply{Builds: []*wire.BuildUsage{of("bbbb", "b1", 0)}}, b.err
	}
	reply := &wire.UsageReply{Next: "more", Space: &wire.Space{DiskBytes: 8192, Builds: 3},
		Builds: []*wire.BuildUsage{of("aaaa", "a1", 4096), of("aaaa", "a2", 8192)}}
	if len(r.GetEntries()) == 2 {
		reply.SharedBytes = 2048
		reply.Shared = []*wire.SharedBlob{{Size: 4096, Bytes: 1536, FirstName: "a_ctx.bin",
			SecondName: "b_ctx.bin"},
			{Size: 800, Bytes: 512, FirstName: "a_ctx.onnx", SecondName: "b_ctx.onnx"}}
	} else {
		reply.PackableBytes = 3 << 20
		reply.Users = []*wire.UsageSum{{Name: "uid:1", Builds: 3, OwnBytes: 4096, DiskBytes: 8192,
			LogicalBytes: 24576, QuotaBytes: 1 << 20}}
	}
	return reply, b.err
}

func (b *standIn) Remove(_ context.Context, _ unixsock.Peer, r *wire.Remove) (*wire.ChangeReply,
	error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !r.GetDryRun() {
		b.changes = append(b.changes, "remove "+strings.Join(r.GetEntries(), " "))
	}
	if b.builds != nil {
		return &wire.ChangeReply{Builds: b.builds, FreedBytes: 7 * int64(min(len(b.builds), 1))},
			b.err
	}
	return &wire.ChangeReply{Builds: []*wire.Build{b.build()}, FreedBytes: 2048}, b.err
}

func (b *standIn) Status(context.Context, unixsock.Peer, *wire.Status) (*wire.StatusReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &wire.StatusReply{Version: "9", Pid: 77, Socket: "/run/s", StartedBy: b.startedBy,
		Space: &wire.Space{UniqueBytes: 7, ToLookAt: 3}, Remotes: b.remotes}, b.err
}

func (b *standIn) Probe(context.Context, unixsock.Peer, *wire.Probe) (*wire.ProbeReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.runtimes != nil {
		return &wire.ProbeReply{Runtimes: b.runtimes}, b.err
	}
	return &wire.ProbeReply{Runtimes: []*wire.RuntimeFacts{{Directory: "/opt/ort",
		OrtVersion: "1.31.1", Eps: []*wire.EpFacts{
			{Name: "StandInExecutionProvider",
				Devices: []*wire.DeviceFacts{{Type: "CPU", Vendor: "Some"}}}}}}}, b.err
}

func (b *standIn) Check(_ context.Context, _ unixsock.Peer, r *wire.Check,
	_ func(*wire.Progress)) (*wire.CheckReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.GetSpace() {
		return &wire.CheckReply{Space: []*wire.SpaceLine{{Name: "objects", Files: 2,
			DiskBytes: 8192}, {Name: "recipes", Files: 1, DiskBytes: 4096}}}, b.err
	}
	if r.GetRepair() {
		b.changes = append(b.changes, "repair")
	}
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
	b := &standIn{t: t, dir: t.TempDir(), id: "f00d"}
	require.NoError(t, os.MkdirAll(filepath.Join(b.dir, b.id, "sub"), 0o700))
	for name, text := range map[string]string{"0123456789abcdef_ctx.onnx": "graph",
		"sub/weights.bin": "weights"} {
		require.NoError(t, os.WriteFile(filepath.Join(b.dir, b.id, name), []byte(text), 0o400))
		digest, err := cas.Sum(context.Background(), strings.NewReader(text), 0, int64(len(text)))
		require.NoError(t, err)
		b.files = append(b.files,
			&wire.File{Name: b.id + "/" + name, Size: int64(len(text)), Digest: digest.String()})
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

// parseJSON parses the output of a call.
func parseJSON(t *testing.T, r result) (out any) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(r.out), &out), "%s", r.out)
	return out
}

// jsonAt returns the value at a path of keys and indices.
func jsonAt(t *testing.T, in any, path ...any) any {
	t.Helper()
	for _, step := range path {
		switch step := step.(type) {
		case string:
			require.Contains(t, in, step)
			in = in.(jsonout.Object)[step]
		case int:
			require.Greater(t, len(in.([]any)), step)
			in = in.([]any)[step]
		}
	}
	return in
}
