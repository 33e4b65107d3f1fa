package unixsock

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// standIn answers what its functions say, and otherwise something plain.
type standIn struct {
	remembered func(ctx context.Context) // called before Acquire opens the files; may be nil
	acquire    func(ctx context.Context, peer Peer, a *wire.Acquire, fds []*os.File,
		progress func(*wire.Progress)) (Answer, error)
	list   func(ctx context.Context, l *wire.List) (*wire.ListReply, error)
	status func(ctx context.Context) (*wire.StatusReply, error)
	report func(ctx context.Context, r *wire.Report) (*wire.ReportReply, error)
	put    func(ctx context.Context, peer Peer, p *wire.Put, fds []*os.File,
		progress func(*wire.Progress)) (Answer, error)
	giveUp func(r *wire.GiveUp) (*wire.GiveUpReply, error)
	follow func(ctx context.Context, f *wire.Follow,
		progress func(*wire.Progress)) (*wire.JobsReply, error)

	subscribe  func(ctx context.Context, send func(*wire.Event) error) error
	dir        string // of the view
	calls      atomic.Int64
	subscribed atomic.Int64
}

func (b *standIn) Hello(Peer, *wire.Hello) *wire.HelloReply { return &wire.HelloReply{} }

func (b *standIn) Acquire(ctx context.Context, peer Peer, a *wire.Acquire, files *Files,
	progress func(*wire.Progress)) (Answer, error) {
	b.calls.Add(1)
	if b.remembered != nil {
		b.remembered(ctx)
	}
	if b.acquire != nil {
		return b.acquire(ctx, peer, a, files.Open(), progress)
	}
	return b.hit()
}

func (b *standIn) hit() (Answer, error) {
	view, err := os.Open(b.dir)
	return Answer{Reply: &wire.AcquireReply{Outcome: "hit", Build: "b", Graph: "id/x_ctx.onnx"},
		View: view}, err
}

// Ask has the method that is called as the request is answer it.
func (b *standIn) Ask(ctx context.Context, p Peer, request proto.Message,
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

func (b *standIn) Release(context.Context, Peer, *wire.Release) (*wire.ReleaseReply, error) {
	return &wire.ReleaseReply{}, nil
}

func (b *standIn) List(ctx context.Context, _ Peer, l *wire.List,
	_ func(*wire.Progress)) (*wire.ListReply, error) {
	if b.list != nil {
		return b.list(ctx, l)
	}
	return &wire.ListReply{Builds: []*wire.Build{{Build: "one"}}}, nil
}

func (b *standIn) Show(context.Context, Peer, *wire.Show) (*wire.ShowReply, error) {
	return &wire.ShowReply{History: []string{"made"}}, nil
}

func (b *standIn) Invalidate(context.Context, Peer, *wire.Invalidate) (*wire.ChangeReply, error) {
	return &wire.ChangeReply{FreedBytes: 1}, nil
}

func (b *standIn) Remove(context.Context, Peer, *wire.Remove) (*wire.ChangeReply, error) {
	return &wire.ChangeReply{FreedBytes: 2}, nil
}

func (b *standIn) Pin(context.Context, Peer, *wire.Pin) (*wire.ChangeReply, error) {
	return &wire.ChangeReply{FreedBytes: 3}, nil
}

func (b *standIn) Unpin(context.Context, Peer, *wire.Unpin) (*wire.ChangeReply, error) {
	return &wire.ChangeReply{FreedBytes: 4}, nil
}

func (b *standIn) Pack(_ context.Context, _ Peer, r *wire.Pack,
	progress func(*wire.Progress)) (*wire.PackReply, error) {
	progress(&wire.Progress{Phase: "packing"})
	return &wire.PackReply{Changed: uint64(len(r.Entries))}, nil
}

func (b *standIn) Collect(_ context.Context, _ Peer, _ *wire.Collect,
	progress func(*wire.Progress)) (*wire.CollectReply, error) {
	progress(&wire.Progress{Phase: "collecting"})
	return &wire.CollectReply{Removed: 5}, nil
}

func (b *standIn) Usage(_ context.Context, _ Peer, _ *wire.Usage,
	progress func(*wire.Progress)) (*wire.UsageReply, error) {
	progress(&wire.Progress{Phase: "reading builds"})
	return &wire.UsageReply{SharedBytes: 6}, nil
}

func (b *standIn) Status(ctx context.Context, _ Peer, _ *wire.Status) (*wire.StatusReply, error) {
	if b.status != nil {
		return b.status(ctx)
	}
	return &wire.StatusReply{Pid: 1}, nil
}

func (b *standIn) Probe(context.Context, Peer, *wire.Probe) (*wire.ProbeReply, error) {
	return &wire.ProbeReply{}, nil
}

func (b *standIn) Check(_ context.Context, _ Peer, _ *wire.Check,
	progress func(*wire.Progress)) (*wire.CheckReply, error) {
	progress(&wire.Progress{Phase: "checking files"})
	return &wire.CheckReply{Blobs: 3}, nil
}

func (b *standIn) Report(ctx context.Context, _ Peer, r *wire.Report) (*wire.ReportReply, error) {
	if b.report != nil {
		return b.report(ctx, r)
	}
	return &wire.ReportReply{Decision: "sound"}, nil
}

func (b *standIn) Why(context.Context, Peer, *wire.Why) (*wire.Explanation, error) {
	return &wire.Explanation{Decision: "hit"}, nil
}

func (b *standIn) Events(context.Context, Peer, *wire.Events) (*wire.EventsReply, error) {
	return &wire.EventsReply{Events: []*wire.Event{{Kind: "compiled"}}}, nil
}

func (b *standIn) Doctor(context.Context, Peer, *wire.Doctor) (*wire.DoctorReply, error) {
	return &wire.DoctorReply{Advice: []*wire.Advice{{Severity: "ok"}}}, nil
}

func (b *standIn) Put(ctx context.Context, peer Peer, p *wire.Put, files *Files,
	progress func(*wire.Progress)) (Answer, error) {
	b.calls.Add(1)
	if b.put != nil {
		return b.put(ctx, peer, p, files.Open(), progress)
	}
	return b.hit()
}

func (b *standIn) Import(_ context.Context, _ Peer, r *wire.Import, files *Files,
	_ func(*wire.Progress)) (*wire.ImportReply, error) {
	b.calls.Add(1)
	return &wire.ImportReply{Text: string(r.Card), Wanted: len(files.Open()) == 0}, nil
}

func (b *standIn) Export(_ context.Context, _ Peer, r *wire.Export) (*wire.ExportReply,
	*os.File, error) {
	b.calls.Add(1)
	a, err := b.hit()
	return &wire.ExportReply{ModelName: r.Build}, a.View, err
}

func (b *standIn) GiveUp(_ context.Context, _ Peer, r *wire.GiveUp) (*wire.GiveUpReply, error) {
	if b.giveUp != nil {
		return b.giveUp(r)
	}
	return &wire.GiveUpReply{}, nil
}

func (b *standIn) Jobs(context.Context, Peer, *wire.Jobs) (*wire.JobsReply, error) {
	return &wire.JobsReply{Jobs: []*wire.Job{{Id: "job"}}}, nil
}

func (b *standIn) Follow(ctx context.Context, _ Peer, f *wire.Follow,
	progress func(*wire.Progress)) (*wire.JobsReply, error) {
	if b.follow != nil {
		return b.follow(ctx, f, progress)
	}
	return &wire.JobsReply{Jobs: []*wire.Job{{Id: f.GetJob(), State: "done"}}}, nil
}

func (b *standIn) CancelJobs(_ context.Context, _ Peer, r *wire.CancelJobs) (*wire.JobsReply,
	error) {
	reply := &wire.JobsReply{}
	for _, id := range r.GetJobs() {
		reply.Jobs = append(reply.Jobs, &wire.Job{Id: id, State: "cancelled"})
	}
	return reply, nil
}

func (b *standIn) Stop(context.Context, Peer) (*os.File, error) {
	return nil, os.ErrInvalid // it does not stop
}

func (b *standIn) RetryJobs(_ context.Context, _ Peer, r *wire.RetryJobs) (*wire.JobsReply, error) {
	reply := &wire.JobsReply{}
	for _, entry := range r.GetEntries() {
		reply.Failures = append(reply.Failures, &wire.Failure{Build: entry})
	}
	return reply, nil
}

func (b *standIn) Subscribe(ctx context.Context, _ Peer, _ *wire.Subscribe,
	send func(*wire.Event) error) error {
	b.subscribed.Add(1)
	if b.subscribe != nil {
		return b.subscribe(ctx, send)
	}
	<-ctx.Done()
	return nil
}

// served is a server under test: at the end of the test it is stopped, and must leave no descriptor
// behind.
type served struct {
	*Server
	path    string
	backend *standIn
	stop    func()
}

// orDefault fills in what is zero.
func orDefault(own limits) limits {
	all, some := defaultLimits, reflect.ValueOf(&own).Elem()
	for i := range some.NumField() {
		if some.Field(i).IsZero() {
			some.Field(i).Set(reflect.ValueOf(all).Field(i))
		}
	}
	return own
}

func serve(t testing.TB, backend *standIn, own limits, prepare ...func(*Server)) *served {
	t.Helper()
	dir, err := os.MkdirTemp("", "us") // t.TempDir is too long for a socket
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	backend.dir = dir
	s := &served{Server: &Server{Backend: backend, limits: orDefault(own), Name: "epcached test"},
		path: filepath.Join(dir, "s"), backend: backend}
	for _, change := range prepare {
		change(s.Server)
	}
	l, err := Listen(s.path, 0o600)
	require.NoError(t, err)
	before := openDescriptors(t) - 1 // without the listener
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	s.stop = func() {
		cancel()
		select {
		case err := <-ended:
			require.NoError(t, err)
		case <-time.After(patience):
			t.Fatal("the server does not stop")
		}
		s.stop = func() {}
	}
	t.Cleanup(func() {
		s.stop()
		require.Eventually(t, func() bool { return openDescriptors(t) <= before }, patience,
			5*time.Millisecond,
			"descriptors leak: %d, %d before", openDescriptors(t), before)
	})
	return s
}

func openDescriptors(t testing.TB) int {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

func dial(t testing.TB, s *served) *Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := Dialer{Name: "test"}.Dial(ctx, s.path)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func modelFile(t testing.TB) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "model.onnx")
	require.NoError(t, os.WriteFile(path, []byte("model"), 0o600))
	f, err := os.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func acquireModel() *wire.Acquire {
	return &wire.Acquire{Model: &wire.Model{Name: "model.onnx"},
		Eps: []*wire.ExecutionProvider{{Name: "StandInExecutionProvider"}}}
}
