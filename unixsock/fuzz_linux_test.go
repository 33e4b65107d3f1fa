package unixsock

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/epcached/epcached/unixsock/wire"
)

func pair(t require.TestingT) [2]*net.UnixConn {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK,
		0)
	require.NoError(t, err)
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		conn, err := net.FileConn(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		ends[i] = conn.(*net.UnixConn)
	}
	return ends
}

// All frames that were sent arrive: the same envelopes in order, each with as many descriptors, and
// of the same files.
func TestRoundTripOfAnyFrames(t *testing.T) {
	files := make([]*os.File, 3)
	for i := range files {
		files[i] = modelFile(t)
	}
	rapid.Check(t, func(t *rapid.T) {
		ends := pair(t)
		defer ends[1].Close()
		sent := rapid.SliceOfN(rapid.Custom(anyFrame), 1, 12).Draw(t, "frames")
		failed := make(chan error, 1)
		go func() { failed <- errors.Join(sendAll(ends[0], sent, files), ends[0].Close()) }()
		s, err := newStream(ends[1])
		require.NoError(t, err)
		for _, want := range sent {
			payload, at, err := s.frame(0)
			require.NoError(t, err)
			got, err := decode(payload)
			require.NoError(t, err)
			fds, err := s.takeDescriptors(at, int(got.GetDescriptors()))
			require.NoError(t, err)
			require.Len(t, fds, int(want.GetDescriptors()))
			for i, fd := range fds {
				require.True(t, sameFile(fd, files[i%len(files)]))
			}
			closeAll(fds)
			require.True(t, proto.Equal(want, got))
		}
		_, _, err = s.frame(0)
		require.ErrorIs(t, err, io.EOF)
		require.NoError(t, <-failed)
	})
}

func anyFrame(t *rapid.T) *wire.Envelope {
	size := rapid.SampledFrom([]int{0, 1, 100, 4 << 10, 70 << 10, 900 << 10}).Draw(t, "size")
	return &wire.Envelope{
		Request:     rapid.Uint64Range(1, 1<<63).Draw(t, "request"),
		Descriptors: rapid.Uint32Range(0, MaxDescriptors).Draw(t, "descriptors"),
		Body: &wire.Envelope_Show{
			Show: &wire.Show{Entry: string(bytes.Repeat([]byte{'x'}, size))}},
	}
}

func sendAll(conn *net.UnixConn, envelopes []*wire.Envelope, files []*os.File) error {
	s, err := newStream(conn)
	if err != nil {
		return err
	}
	for _, e := range envelopes {
		frame, err := encode(e)
		if err != nil {
			return err
		}
		fds := make([]int, e.GetDescriptors())
		for i := range fds {
			fds[i] = int(files[i%len(files)].Fd())
		}
		if err := s.write(context.Background(), *frame, fds, 10*time.Second); err != nil {
			return err
		}
		putBuffer(frame)
	}
	return nil
}

func sameFile(fd int, f *os.File) bool {
	var a, b unix.Stat_t
	return unix.Fstat(fd, &a) == nil && unix.Fstat(int(f.Fd()), &b) == nil && a.Ino == b.Ino &&
		a.Dev == b.Dev
}

// FuzzEnvelope: what is accepted can be sent again, and is then the same.
func FuzzEnvelope(f *testing.F) {
	f.Add(acquireFrame(1, 1)[4:])
	f.Add(statusFrame(2)[4:])
	f.Add([]byte{0x08, 3, 0xa2, 0x3f, 0})
	f.Add(putFrame(3, 1)[4:])
	f.Fuzz(func(t *testing.T, payload []byte) {
		e, err := decode(payload)
		if err != nil {
			require.ErrorIs(t, err, ErrBadRequest)
			return
		}
		// must not panic
		_, _ = checkAcquire(e.GetAcquire(), slices.Repeat([]int{-1}, int(e.GetDescriptors())))
		_, _ = checkPut(e.GetPut(), make([]int, e.GetDescriptors()))
		frame, err := encode(e)
		if err != nil {
			require.True(t, len(payload) == 0 || proto.Size(e) == 0 ||
				errors.Is(err, errTooLarge), err)
			return
		}
		again, err := decode((*frame)[4:])
		require.NoError(t, err)
		require.True(t, proto.Equal(e, again))
		putBuffer(frame)
	})
}

// FuzzConnection: whatever a client writes, in two pieces and with a descriptor at the front, the
// daemon answers or closes, keeps no descriptor, and serves the next one.
func FuzzConnection(f *testing.F) {
	f.Add([]byte{}, 0, false)
	f.Add(acquireFrame(1, 1), 3, true)
	f.Add(append(statusFrame(1), acquireFrame(2, 0)...), 9, false)
	f.Add(append(subscribeFrame(1), cancelFrame(1)...), 12, false)
	f.Add(append(subscribeFrame(1), statusFrame(1)...), 0, false)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, 1, true)
	f.Add(append(putFrame(1, 1),
		framed(&wire.Envelope{Request: 2, Body: &wire.Envelope_Follow{Follow: &wire.Follow{}}})...),
		5, true)
	f.Fuzz(func(t *testing.T, data []byte, split int, descriptor bool) {
		s := serve(t, &standIn{}, limits{FrameTimeout: time.Second, WriteTimeout: time.Second})
		c := rawHello(t, s)
		if split < 0 || split > len(data) {
			split = len(data)
		}
		var fds []int
		if descriptor && split > 0 {
			fds = []int{int(modelFile(t).Fd())}
		}
		if split > 0 && c.tryWrite(data[:split], fds...) == nil && split < len(data) {
			_ = c.tryWrite(data[split:]) // it may have closed by now
		}
		_ = c.conn.CloseWrite()
		c.readEnd()
		_, err := Ask[wire.StatusReply](background(t), dial(t, s), &wire.Status{}, nil)
		require.NoError(t, err)
	})
}
