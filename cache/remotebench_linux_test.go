package cache

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/remote"
)

// BenchmarkPull has an empty machine fetch a build of 91 MB of random bytes from a real S3 server:
// a request, with everything but the load of the model, until the build is durable. Programs that
// copy the same bytes run beside it. make bench-remote fetches these.
func BenchmarkPull(b *testing.B) {
	store := newBucket()
	store.engine, store.helper = remoteOn(b, "s3"), newHelper(b)
	store.helper.Configure([]remote.Config{store.engine})
	b.Cleanup(func() { _ = store.helper.Close() }) // its process ends with the benchmark
	program, err := helperProgram()
	require.NoError(b, err)
	private, public := fleetKeys(b)
	model := largeModel(b, 91_000_000)
	loads := func(compilers.CheckJob) *compilers.CheckResult {
		return &compilers.CheckResult{Outcome: compilers.Passed}
	}
	a := machine(b, store, remotes.Remote{Publish: true, SigningKey: private,
		Trust: []string{public}})
	made := a.acquire(a.request(a.openFile(model)))
	store.built = [32]byte(made.Build.BuildKey)
	store.waitForCards(b, 1)
	address := strings.TrimPrefix(store.engine.Endpoint, "http://")
	admin, err := minio.New(address, &minio.Options{Creds: serverKeys, Region: "us-east-1"})
	require.NoError(b, err)
	_, err = admin.FPutObject(b.Context(), "bucket", "raw", model, minio.PutObjectOptions{})
	require.NoError(b, err)

	dir := b.TempDir()
	b.Setenv("MC_CONFIG_DIR", filepath.Join(dir, "mc"))
	b.Setenv("MC_HOST_s", "http://user:secret-secret@"+address)
	b.Setenv("AWS_ACCESS_KEY_ID", "user")
	b.Setenv("AWS_SECRET_ACCESS_KEY", "secret-secret")
	b.Setenv("AWS_DEFAULT_REGION", "us-east-1")
	out := filepath.Join(dir, "out")
	peers := map[string][]string{"mc": {fetchedServers + "mc", "cp", "-q", "s/bucket/raw", out},
		"aws": {fetchedServers + "aws/bin/aws", "s3", "cp", "--quiet", "--endpoint-url",
			store.engine.Endpoint, "s3://bucket/raw", out}}
	if oras, err := filepath.Abs(fetchedServers + "oras"); err == nil && exists(oras) &&
		exists(fetchedServers+"olareg") {
		at := strings.TrimPrefix(remoteOn(b, "oci").URL, "oci://") + ":raw"
		push := exec.Command(oras, "push", "--plain-http", at, filepath.Base(model))
		push.Dir = filepath.Dir(model)
		said, err := push.CombinedOutput()
		require.NoError(b, err, string(said))
		peers["oras"] = []string{oras, "pull", "--plain-http", "-o", out + "-oras", at}
	}
	took := make(map[string][]time.Duration)
	measure := func(what string, do func()) {
		unix.Sync()
		began := time.Now()
		do()
		took[what] = append(took[what], time.Since(began))
	}
	for range max(b.N, 5) { // one after the other, so that all have the same machine
		m := unopenedBench(b)
		m.state, m.compiler.CheckFault = filepath.Join(b.TempDir(), "state"), loads
		m.change = func(o *Options) {
			o.RemoteClient = remote.New(remote.Options{Program: program}) // on all processors
			o.Remotes = []remotes.Remote{{Config: store.engine, Ask: true,
				Trust: []string{public}, LoseAtMost: time.Minute}}
		}
		m.openSound()
		r := m.request(m.openFile(model))
		measure("pull", func() { require.Equal(b, request.Hit, m.acquire(r).Outcome) })
		for peer, args := range peers {
			if !exists(args[0]) {
				continue
			}
			measure(peer, func() {
				said, err := exec.Command(args[0], args[1:]...).CombinedOutput()
				require.NoError(b, err, string(said))
				if peer == "mc" {
					require.NoError(b, exec.Command("sync", out).Run())
				}
			})
		}
	}
	median := func(what string) time.Duration {
		slices.Sort(took[what])
		return took[what][len(took[what])/2]
	}
	b.ReportMetric(float64(median("pull").Milliseconds()), "pull-ms")
	for peer := range peers {
		if len(took[peer]) == 0 {
			b.Logf("NOT MEASURED: there is no %s", peer)
			continue
		}
		b.ReportMetric(float64(median(peer).Milliseconds()), peer+"-ms")
		b.ReportMetric(float64(median("pull"))/float64(median(peer)), "pull/"+peer)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// withRemote is a bench that reaches its remote by a real helper. The daemon publishes nothing.
func withRemote(t testing.TB, config remote.Config) *bench {
	program, err := helperProgram()
	require.NoError(t, err)
	_, public := fleetKeys(t)
	return newBenchWith(t, func(o *Options) {
		o.RemoteClient = remote.New(remote.Options{Program: program})
		o.Remotes = []remotes.Remote{{Config: config, Ask: true, Lease: true,
			Trust: []string{public}, LoseAtMost: 10 * time.Second}}
	})
}

// BenchmarkHitBesideRemote compares hits with a remote in the configuration and without.
func BenchmarkHitBesideRemote(b *testing.B) {
	with, without := withRemote(b, remote.Config{Name: "fleet", URL: "file://" + b.TempDir()}),
		newBench(b)
	took := make(map[*bench][]time.Duration)
	requests := make(map[*bench]*request.Request)
	for _, one := range []*bench{with, without} {
		requests[one] = one.request(one.model(1))
		one.acquire(requests[one])
	}
	for range max(b.N, 20_000) {
		for _, one := range []*bench{with, without} {
			began := time.Now()
			a, err := one.cache.Acquire(b.Context(), requests[one], nil)
			took[one] = append(took[one], time.Since(began))
			require.NoError(b, err)
			_ = a.View.Close() // it was only measured
		}
	}
	at := func(one *bench, percent int) float64 {
		slices.Sort(took[one])
		return float64(took[one][len(took[one])*percent/100])
	}
	b.ReportMetric(at(with, 50)/at(without, 50), "p50-ratio")
	b.ReportMetric(at(with, 99)/at(without, 99), "p99-ratio")
}

// BenchmarkMissBlackHole compares misses with a remote that accepts connections and never answers,
// and without a remote. A compile takes a second.
func BenchmarkMissBlackHole(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer l.Close()
	with := withRemote(b, remote.Config{Name: "fleet", URL: "https://" + l.Addr().String()})
	without := newBench(b)
	took := make(map[*bench][]time.Duration)
	for i := range uint64(12) {
		for _, one := range []*bench{with, without} {
			one.compiler.Delay = time.Second
			r := one.request(one.model(i))
			began := time.Now()
			require.Equal(b, request.Compiled, one.acquire(r).Outcome)
			took[one] = append(took[one], time.Since(began))
		}
	}
	b.ReportMetric((took[with][0] - took[without][0]).Seconds(), "first-more-s")
	later := func(one *bench) float64 {
		rest := slices.Sorted(slices.Values(took[one][3:]))
		return float64(rest[len(rest)/2])
	}
	b.ReportMetric(later(with)/later(without), "from-the-fourth")
}
