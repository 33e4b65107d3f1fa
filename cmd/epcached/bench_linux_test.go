package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// BenchmarkHit measures a warm hit on the built daemon, in a process of its own, with a real
// runtime: the client sends the model and its EP library by descriptor, and gets the view's. Beside
// it, in the same run, a bare round trip with one descriptor each way to another process in Go,
// which is the least that a socket costs.
func BenchmarkHit(b *testing.B) {
	h := newHitBench(b, "")
	hit := h.hit
	raw := rawRoundTrip(b, h.fds[0])
	for range 300 {
		hit()
		raw()
	}
	var hits, raws []time.Duration
	for b.Loop() {
		hits = append(hits, timed(hit))
		raws = append(raws, timed(raw)) // in turn, so that both see the same machine
	}
	slices.Sort(hits)
	slices.Sort(raws)
	us := microseconds
	b.ReportMetric(us(hits, 50), "hit-p50-us")
	b.ReportMetric(us(hits, 99), "hit-p99-us")
	b.ReportMetric(us(raws, 50), "raw-p50-us")
	b.ReportMetric(us(raws, 99), "raw-p99-us")
	b.ReportMetric(us(hits, 50)/us(raws, 50), "hit/raw-p50")
	const many = 2000
	before := h.processorTime()
	for range many {
		hit()
	}
	b.ReportMetric(float64((h.processorTime()-before).Microseconds())/many, "cpu-us/hit")
}

// BenchmarkHitAlone measures a hit that comes 10 ms after the last one, when the caches of the
// processors have other contents, as applications see it; and a bare round trip that also comes
// alone.
func BenchmarkHitAlone(b *testing.B) {
	h := newHitBench(b, "")
	raw := rawRoundTrip(b, h.fds[0])
	for range 300 {
		h.hit()
		raw()
	}
	var hits, raws []time.Duration
	alone := func(f func()) time.Duration {
		time.Sleep(10 * time.Millisecond)
		return timed(f)
	}
	for b.Loop() {
		hits = append(hits, alone(h.hit))
		raws = append(raws, alone(raw))
	}
	slices.Sort(hits)
	slices.Sort(raws)
	b.ReportMetric(microseconds(hits, 50), "alone-p50-us")
	b.ReportMetric(microseconds(raws, 50), "raw-alone-p50-us")
	b.ReportMetric(microseconds(hits, 50)/microseconds(raws, 50), "alone/raw-p50")
}

func timed(f func()) time.Duration {
	start := time.Now()
	f()
	return time.Since(start)
}

// microseconds returns a quantile, in per cent, of sorted times.
func microseconds(d []time.Duration, q int) float64 {
	return float64(d[len(d)*q/100].Nanoseconds()) / 1000
}

// hitBench is a daemon with one compiled model, whose files are old enough to be believed, and a
// client that asks for it.
type hitBench struct {
	*testing.B
	client  *unixsock.Client
	request *wire.Acquire
	fds     []*os.File
	socket  string
	daemon  *os.Process
}

// processorTime is what this process and the daemon have used of the processors.
func (h *hitBench) processorTime() (sum time.Duration) {
	for _, pid := range []int{os.Getpid(), h.daemon.Pid} {
		var ts unix.Timespec
		// The clock of a process: clock_getcpuclockid(3).
		require.NoError(h, unix.ClockGettime(int32(^pid<<3|2), &ts))
		sum += time.Duration(ts.Nano())
	}
	return sum
}

// hit asks once.
func (h *hitBench) hit() {
	_, view, err := h.client.Acquire(context.Background(), h.request, h.fds, nil, nil)
	if err != nil {
		h.Fatal(err)
	}
	view.Close()
}

// newHitBench starts a daemon with that configuration.
func newHitBench(b *testing.B, config string) *hitBench {
	bin, runtimes := os.Getenv("EPCACHED_BIN"), os.Getenv("EPCACHED_RUNTIMES")
	if bin == "" || runtimes == "" {
		b.Skip("SKIPPED: EPCACHED_BIN and EPCACHED_RUNTIMES are not set; make bench sets them")
	}
	dir := b.TempDir()
	runtime, err := compilers.Find(filepath.Join(runtimes, "openvino-1.8.1"))
	require.NoError(b, err)
	lib, err := runtime.Library("OpenVINOExecutionProvider")
	require.NoError(b, err)
	h := &hitBench{B: b, socket: filepath.Join(dir, "s"), fds: make([]*os.File, 2)}
	settings := filepath.Join(dir, "epcached.toml")
	require.NoError(b, os.WriteFile(settings, []byte(config), 0o644))
	daemon := exec.Command(filepath.Join(bin, "epcached"), "--state", filepath.Join(dir, "state"),
		"--socket", h.socket, "--runtime", runtime.Directory, "--log-level", "warn", "--config",
		settings)
	daemon.Stderr = os.Stderr
	require.NoError(b, daemon.Start())
	h.daemon = daemon.Process
	b.Cleanup(func() {
		require.NoError(b, daemon.Process.Signal(unix.SIGTERM))
		require.NoError(b, daemon.Wait())
	})
	model := filepath.Join(dir, "model.onnx")
	require.NoError(b, os.WriteFile(model, compilertest.Dense(1, 256, 1), 0o644))
	time.Sleep(3 * time.Second) // fresh files are hashed at every request
	h.client, err = unixsock.Dialer{Wait: 10 * time.Second}.Dial(context.Background(), h.socket)
	require.NoError(b, err)
	b.Cleanup(func() { h.client.Close() })
	for i, path := range []string{model, lib.Path} {
		h.fds[i], err = os.Open(path)
		require.NoError(b, err)
		b.Cleanup(func() { h.fds[i].Close() })
	}
	one := uint32(1)
	h.request = &wire.Acquire{
		Model: &wire.Model{Name: "model.onnx"},
		Eps:   []*wire.ExecutionProvider{{Name: lib.EP, Devices: []*wire.Device{{Type: "CPU"}}}},
		Runtime: &wire.Runtime{OrtVersion: runtime.ORTVersion, OrtLibrary: runtime.ORTLibrary,
			EpLibraries: []*wire.EpLibrary{{Ep: lib.EP, Path: lib.Path, Fd: &one}}},
	}
	reply, view, err := h.client.Acquire(context.Background(), h.request, h.fds, nil, nil)
	require.NoError(b, err)
	view.Close()
	require.Equal(b, map[bool]string{true: "hit",
		false: "compiled"}[strings.Contains(config, "[[layer]]")], reply.Outcome)
	return h
}

// rawRoundTrip sends a descriptor to another process, which sends one back.
func rawRoundTrip(b testing.TB, f *os.File) func() {
	pair, err := unix.Socketpair(unix.AF_UNIX,
		unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	require.NoError(b, err)
	theirs := os.NewFile(uintptr(pair[1]), "")
	peer := exec.Command(os.Args[0], "-test.run", "^TestRawPeer$")
	peer.Env = append(os.Environ(), rawPeer+"=1")
	peer.ExtraFiles = []*os.File{theirs}
	require.NoError(b, peer.Start())
	require.NoError(b, theirs.Close())
	ours := unixConn(b, uintptr(pair[0]))
	b.Cleanup(func() {
		ours.Close()
		require.NoError(b, peer.Wait())
	})
	return func() {
		if err := sendDescriptor(ours, f); err != nil {
			b.Fatal(err)
		}
		if err := receiveDescriptor(ours); err != nil {
			b.Fatal(err)
		}
	}
}

// rawPeer marks the process that TestRawPeer is meant for.
const rawPeer = "EPCACHED_TEST_RAW_PEER"

// TestRawPeer is the other process of rawRoundTrip; without that there is nothing for it to do.
func TestRawPeer(t *testing.T) {
	if os.Getenv(rawPeer) == "" {
		return
	}
	conn := unixConn(t, 3)
	defer conn.Close()
	for receiveDescriptor(conn) == nil && sendDescriptor(conn, os.Stdin) == nil {
	}
}

func unixConn(t testing.TB, fd uintptr) *net.UnixConn {
	file := os.NewFile(fd, "")
	conn, err := net.FileConn(file)
	require.NoError(t, err)
	require.NoError(t, file.Close())
	return conn.(*net.UnixConn)
}

func sendDescriptor(c *net.UnixConn, f *os.File) error {
	_, _, err := c.WriteMsgUnix([]byte{1}, unix.UnixRights(int(f.Fd())), nil)
	return err
}

func receiveDescriptor(c *net.UnixConn) error {
	var data [16]byte
	var oob [64]byte
	_, n, _, _, err := c.ReadMsgUnix(data[:], oob[:])
	if err != nil {
		return err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return os.ErrClosed
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	for _, fd := range fds {
		unix.Close(fd)
	}
	return err
}
