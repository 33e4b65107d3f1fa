package cache

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/remote"
)

// fleetSize is how many machines a fleet has, and fleetCompile how long a compile takes.
// `make remotes` sets 50 and 20s.
func fleetSize() (n int, compile time.Duration) {
	n, compile = 6, 5*time.Second
	if text := os.Getenv("EPCACHED_FLEET"); text != "" {
		n, _ = strconv.Atoi(text)
		compile = 20 * time.Second
	}
	return n, compile
}

// fleet is machines with stand-in compilers, each with its own helper process, and one remote.
type fleet struct {
	machines []*bench
	clients  []*mortal
	compile  time.Duration
}

// mortal is the network of a machine that loses power at a step: from then on no call arrives.
type mortal struct {
	remotes.Client
	diesAt string
	once   *atomic.Bool // one machine of the fleet died
	dead   atomic.Bool
}

// Steps of a machine that compiles for the fleet.
const (
	holdsLease = "it holds the lease"
	beginsPut  = "it begins to publish"
	putBlobs   = "the blobs are there"
	putCard    = "the card is there"
)

func (m *mortal) die(step string) error {
	if step != "" && step == m.diesAt && m.once.CompareAndSwap(false, true) {
		m.dead.Store(true)
	}
	if m.dead.Load() {
		return &remote.Error{Class: "unreachable", Remote: "fleet", Text: "the power is off"}
	}
	return nil
}

func (m *mortal) Look(ctx context.Context, r string, k remote.Key,
	b time.Duration) ([][]byte, error) {
	if err := m.die(""); err != nil {
		return nil, err
	}
	return m.Client.Look(ctx, r, k, b)
}

func (m *mortal) PutBlobs(ctx context.Context, r string, b []remote.Blob,
	progress func(remote.Progress)) (remote.Sent, error) {
	if err := m.die(beginsPut); err != nil {
		return remote.Sent{}, err
	}
	sent, err := m.Client.PutBlobs(ctx, r, b, progress)
	if why := m.die(putBlobs); why != nil {
		err = why
	}
	return sent, err
}

func (m *mortal) PutCard(ctx context.Context, r string, k remote.CardKeys,
	card []byte) (remote.Put, error) {
	if err := m.die(""); err != nil {
		return "", err
	}
	put, err := m.Client.PutCard(ctx, r, k, card)
	if why := m.die(putCard); why != nil {
		err = why
	}
	return put, err
}

func (m *mortal) Lease(ctx context.Context, r string, l remote.LeaseRequest) (remote.Lease, error) {
	if err := m.die(""); err != nil {
		return remote.Lease{}, err
	}
	got, err := m.Client.Lease(ctx, r, l)
	if err == nil && got.State == remote.Granted {
		_ = m.die(holdsLease) // it still compiles, and no machine hears of it
	}
	return got, err
}

// helperProgram is epcached-remote.
var helperProgram = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("EPCACHED_BIN"); dir != "" {
		return filepath.Join(dir, "epcached-remote"), nil
	}
	dir, err := os.MkdirTemp("", "epcached-bin-")
	if err != nil {
		return "", err
	}
	build := exec.Command("go", "build", "-o", dir+"/", "../cmd/epcached-remote")
	out, err := build.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return filepath.Join(dir, "epcached-remote"), err
})

// fleetRemote is a directory; for a large fleet a real S3 server, where make deps-remote left one.
func fleetRemote(t testing.TB, n int) remote.Config {
	if _, err := os.Stat(fetchedServers + "versitygw"); n < 20 || err != nil {
		return remoteOn(t, "file")
	}
	return remoteOn(t, "s3")
}

const fetchedServers = "../.deps/remote/"

var serverKeys = credentials.NewStaticV4("user", "secret-secret", "")

// remoteOn is a remote on an engine: a directory, a registry or an S3 server.
func remoteOn(t testing.TB, engine string) remote.Config {
	return remoteIn(t, engine, memoryDir(t))
}

func remoteIn(t testing.TB, engine, dir string) remote.Config {
	config := remote.Config{Name: "fleet", URL: "file://" + dir, Connect: 2 * time.Second}
	if engine == "file" {
		return config
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address, port := l.Addr().String(), fmt.Sprint(l.Addr().(*net.TCPAddr).Port)
	require.NoError(t, l.Close())
	server := []string{"versitygw", "--access", "user", "--secret", "secret-secret", "--port",
		address, "posix", dir}
	if engine == "oci" {
		server = []string{"olareg", "serve", "--addr", "127.0.0.1", "--port", port, "--dir", dir}
	}
	program, err := filepath.Abs(fetchedServers + server[0])
	require.NoError(t, err)
	if _, err := os.Stat(program); err != nil {
		t.Skip("NOT TESTED: testdata/fetch-remote fetches " + server[0])
	}
	cmd := exec.Command(program, server[1:]...)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	config.Endpoint = "http://" + address
	if config.URL = "oci://" + address + "/team/builds"; engine == "oci" {
		require.Eventually(t, func() bool {
			c, err := net.Dial("tcp", address)
			return err == nil && c.Close() == nil
		}, 30*time.Second, 20*time.Millisecond)
		return config
	}
	admin, err := minio.New(address, &minio.Options{Creds: serverKeys, Region: "us-east-1"})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return admin.MakeBucket(t.Context(), "bucket", minio.MakeBucketOptions{}) == nil
	}, 30*time.Second, 50*time.Millisecond)
	config.URL = "s3://bucket/p"
	return config
}

// newHelper is the client of a helper process.
func newHelper(t testing.TB, env ...string) *remote.Client {
	program, err := helperProgram()
	require.NoError(t, err)
	return remote.New(remote.Options{Program: program,
		Env: append(env, "AWS_ACCESS_KEY_ID=user", "AWS_SECRET_ACCESS_KEY=secret-secret",
			"HOME=/nonexistent", "GOMAXPROCS=1")})
}

// onEachEngine runs a test on a remote in memory and on each engine.
func onEachEngine(t *testing.T, test func(*testing.T, *bucket)) {
	for _, engine := range []string{"memory", "file", "https", "oci", "s3"} {
		t.Run(engine, func(t *testing.T) {
			store := newBucket()
			if engine != "memory" {
				store = newFront(t, engine).bucket
			}
			test(t, store)
		})
	}
}

// newFleet makes machines. Those that know the length of a compile have compiled something else.
func newFleet(t testing.TB, know bool) *fleet {
	n, compile := fleetSize()
	f := &fleet{compile: compile}
	private, public := fleetKeys(t)
	config := fleetRemote(t, n)
	for range n {
		m := &mortal{Client: newHelper(t)}
		b := newBenchWith(t, func(o *Options) {
			o.RemoteClient = m
			o.Remotes = []remotes.Remote{{Config: config, Ask: true, Publish: true, Lease: true,
				Trust: []string{public}, SigningKey: private, LoseAtMost: 10 * time.Second}}
		})
		b.compiler.Delay = compile
		f.machines, f.clients = append(f.machines, b), append(f.clients, m)
	}
	for _, b := range f.machines {
		if know {
			b.expects(b.request(b.model(7)), compile)
			require.Equal(t, compile, b.cache.askOf(b.planned(b.request(b.model(7))), nil).Estimate)
		}
	}
	return f
}

// expects has the machine believe that a compile for the request takes so long.
func (b *bench) expects(r *request.Request, compile time.Duration) {
	at, kind := b.planned(r), jobs.Kind{}
	for _, file := range at.Descriptors() {
		info, err := file.Stat()
		require.NoError(b, err)
		kind.Size += info.Size()
	}
	for _, ep := range at.Plan.EPs {
		kind.EPs = append(kind.EPs, ep.Name)
	}
	b.cache.jobs.Costs.Learn(kind, compile, 0, 0, false)
}

// ask has all machines ask for one model at the same time. It returns how long the slowest of those
// that live took, and how many compiles there were.
func (f *fleet) ask(t testing.TB) (slowest time.Duration, compiles int64) {
	took, errs := make([]time.Duration, len(f.machines)), make([]error, len(f.machines))
	before := f.compiles()
	var all sync.WaitGroup
	for i, b := range f.machines {
		r := b.request(b.model(7))
		all.Go(func() {
			began := time.Now()
			a, err := b.cache.Acquire(t.Context(), r, nil)
			if errs[i] = err; err == nil {
				_ = a.View.Close() // likewise
			}
			if took[i] = time.Since(began); f.clients[i].dead.Load() {
				took[i] = 0
			}
		})
	}
	all.Wait()
	for i, err := range errs {
		require.NoError(t, err, "machine %d", i)
	}
	return slices.Max(took), f.compiles() - before
}

func (f *fleet) compiles() (n int64) {
	for _, b := range f.machines {
		n += b.compiler.Compiles.Load()
	}
	return n
}

// one is how long a machine takes alone.
func (f *fleet) one(t testing.TB) time.Duration {
	b := newBench(t)
	b.compiler.Delay = f.compile
	began := time.Now()
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(7))).Outcome)
	return time.Since(began)
}

// Of a fleet that needs one model at the same time, one machine compiles, and the others wait
// hardly longer than they would have compiled.
func TestMachinesWithTheirOwnHelpersCompileOnce(t *testing.T) {
	t.Parallel()
	for name, know := range map[string]bool{"the length is known": true, "it is not": false} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, know)
			slowest, compiles := f.ask(t)
			one := f.one(t)
			t.Logf("%d machines: %d compiles, slowest %v, %.2f x one compile", len(f.machines),
				compiles, slowest.Round(time.Millisecond), float64(slowest)/float64(one))
			require.EqualValues(t, 1, compiles)
			require.LessOrEqual(t, float64(slowest), 1.35*float64(one))
		})
	}
}

// A machine that dies while it compiles for the fleet costs at most one compile more.
func TestTheHolderOfALeaseDies(t *testing.T) {
	t.Parallel()
	steps := []string{holdsLease, putBlobs, beginsPut, putCard}
	if n, _ := fleetSize(); n < 20 {
		steps = steps[:2]
	}
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			f := newFleet(t, true)
			var died atomic.Bool
			for _, m := range f.clients {
				m.diesAt = step
				m.once = &died
			}
			slowest, compiles := f.ask(t)
			t.Logf("%d machines: %d compiles, slowest %v", len(f.machines), compiles,
				slowest.Round(time.Millisecond))
			require.True(t, died.Load())
			require.LessOrEqual(t, compiles, int64(2))
		})
	}
}
