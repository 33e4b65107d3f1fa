package cache

import (
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/remote"
)

// withRemote is a bench whose remote is reached by a real helper. The daemon publishes nothing.
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
