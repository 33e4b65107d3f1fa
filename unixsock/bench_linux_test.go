package unixsock

import (
	"context"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// BenchmarkHit asks for a build that is there, with a backend that only opens the view's directory,
// next to the least that a round trip with one descriptor each way can cost in Go. It reports the
// medians and their ratio.
func BenchmarkHit(b *testing.B) {
	s := serve(b, &standIn{}, limits{})
	c := dial(b, s)
	model := []*os.File{modelFile(b)}
	raw := rawLoop(b, model[0])
	hit := func() {
		_, view, err := c.Acquire(context.Background(), acquireModel(), model, nil, nil)
		if err != nil {
			b.Fatal(err)
		}
		view.Close()
	}
	for range 200 {
		hit()
		raw()
	}
	hits, raws := make([]time.Duration, 0, b.N), make([]time.Duration, 0, b.N)
	b.ReportAllocs()
	for b.Loop() {
		start := time.Now()
		hit()
		hits = append(hits, time.Since(start))
	}
	for range max(1000, b.N) {
		start := time.Now()
		raw()
		raws = append(raws, time.Since(start))
	}
	slices.Sort(hits)
	slices.Sort(raws)
	p := func(d []time.Duration, q int) float64 { return float64(d[len(d)*q/100].Nanoseconds()) }
	b.ReportMetric(p(hits, 50), "hit-p50-ns")
	b.ReportMetric(p(hits, 99), "hit-p99-ns")
	b.ReportMetric(p(raws, 50), "raw-p50-ns")
	b.ReportMetric(p(hits, 50)/p(raws, 50), "hit/raw-p50")
}

// rawLoop sends a descriptor to a goroutine that sends another one back.
func rawLoop(b *testing.B, f *os.File) func() {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK,
		0)
	require.NoError(b, err)
	ends := make([]*net.UnixConn, 2)
	for i, fd := range fds {
		file := os.NewFile(uintptr(fd), "")
		conn, err := net.FileConn(file)
		require.NoError(b, err)
		require.NoError(b, file.Close())
		ends[i] = conn.(*net.UnixConn)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for receiveOne(ends[1]) == nil {
			if _, _, err := ends[1].WriteMsgUnix([]byte{1}, unix.UnixRights(int(f.Fd())),
				nil); err != nil {
				return
			}
		}
	}()
	b.Cleanup(func() { ends[0].Close(); <-done; ends[1].Close() })
	return func() {
		if _, _, err := ends[0].WriteMsgUnix([]byte{1}, unix.UnixRights(int(f.Fd())),
			nil); err != nil {
			b.Fatal(err)
		}
		if err := receiveOne(ends[0]); err != nil {
			b.Fatal(err)
		}
	}
}

func receiveOne(conn *net.UnixConn) error {
	var data [512]byte
	var oob [64]byte
	n, oobn, _, _, err := conn.ReadMsgUnix(data[:], oob[:])
	if err != nil || n == 0 {
		return os.ErrClosed
	}
	fds, err := parseRights(oob[:oobn])
	closeAll(fds)
	return err
}
