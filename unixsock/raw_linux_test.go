package unixsock

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// rawClient writes any frame, right or wrong.
type rawClient struct {
	t      testing.TB
	conn   *net.UnixConn
	stream *stream
}

func rawDial(t testing.TB, s *served) *rawClient {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: s.path})
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	st, err := newStream(conn)
	require.NoError(t, err)
	t.Cleanup(st.closeDescriptors)
	return &rawClient{t: t, conn: conn, stream: st}
}

func rawHello(t testing.TB, s *served) *rawClient {
	t.Helper()
	c := rawDial(t, s)
	c.write(
		framed(&wire.Envelope{Body: &wire.Envelope_Hello{Hello: &wire.Hello{Version: Version}}}))
	e, _ := c.read()
	require.NotNil(t, e.GetHelloReply())
	return c
}

func framed(e *wire.Envelope) []byte {
	payload, err := proto.Marshal(e)
	if err != nil {
		panic(err)
	}
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(payload))), payload...)
}

func (c *rawClient) write(b []byte, fds ...int) {
	c.t.Helper()
	require.NoError(c.t, c.tryWrite(b, fds...))
}

func (c *rawClient) tryWrite(b []byte, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	n, _, err := c.conn.WriteMsgUnix(b, oob, nil)
	if err == nil && n < len(b) {
		_, err = c.conn.Write(b[n:])
	}
	return err
}

// read returns the next frame; its descriptors are the caller's.
func (c *rawClient) read() (*wire.Envelope, []int) {
	c.t.Helper()
	e, fds, err := c.tryRead(patience)
	require.NoError(c.t, err)
	return e, fds
}

func (c *rawClient) tryRead(limit time.Duration) (*wire.Envelope, []int, error) {
	if err := c.conn.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return nil, nil, err
	}
	payload, at, err := c.stream.frame(0)
	if err != nil {
		return nil, nil, err
	}
	e, err := decode(payload)
	if err != nil {
		return nil, nil, err
	}
	fds, err := c.stream.takeDescriptors(at, int(e.GetDescriptors()))
	return e, fds, err
}

// readEnd reads up to the connection's end and gives the error frame before it, if there was one.
func (c *rawClient) readEnd() *wire.Error {
	c.t.Helper()
	var last *wire.Error
	for {
		e, fds, err := c.tryRead(patience)
		if err != nil {
			require.Truef(c.t, errors.Is(err, io.EOF) ||
				errors.Is(err, unix.ECONNRESET), "the connection ends: %v", err)
			return last
		}
		closeAll(fds)
		if e.GetRequest() == 0 {
			last = e.GetError()
		}
	}
}

func acquireFrame(number uint64, descriptors int) []byte {
	return framed(&wire.Envelope{Request: number, Descriptors: uint32(descriptors),
		Body: &wire.Envelope_Acquire{Acquire: acquireModel()}})
}

func statusFrame(number uint64) []byte {
	return framed(&wire.Envelope{Request: number,
		Body: &wire.Envelope_Status{Status: &wire.Status{}}})
}

func many(f *os.File, n int) []int {
	fds := make([]int, n)
	for i := range fds {
		fds[i] = int(f.Fd())
	}
	return fds
}
