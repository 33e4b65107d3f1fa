//go:build !linux

package unixsock

import (
	"context"
	"errors"
	"net"
	"os"
	"time"
)

// ErrInUse says that a daemon answers at a socket, or is just being started there.
var ErrInUse = errors.New("another daemon answers there")

// DefaultSocketMode is that of a user's own socket.
func DefaultSocketMode() os.FileMode { return 0o600 }

// Listen answers errors.ErrUnsupported: descriptors travel as on Linux, so the daemon runs only there.
func Listen(string, os.FileMode) (net.Listener, error) { return nil, errors.ErrUnsupported }

// OwnFolder answers errors.ErrUnsupported: see Listen.
func OwnFolder(string) error { return errors.ErrUnsupported }

func foreign(string) bool { return false }

// CheckDescriptor answers errors.ErrUnsupported: see Listen.
func CheckDescriptor(*os.File) error { return errors.ErrUnsupported }

func checkFD(int) error { return errors.ErrUnsupported }

func closeAll([]int) {}

func peerOf(*net.UnixConn) (Peer, error) { return Peer{}, errors.ErrUnsupported }

var errPartial = errors.New("a frame was sent in part")

func tooManyInFlight(error) bool { return false }

func tryAgain(error) bool { return false }

func notConnected(error) bool { return false }

// stream is never made here; its methods exist so that the rest compiles.
type stream struct {
	conn    *net.UnixConn
	writing chan struct{}
}

func newStream(*net.UnixConn) (*stream, error) { return nil, errors.ErrUnsupported }

func (*stream) frame(time.Duration) ([]byte, int64, error) { return nil, 0, errors.ErrUnsupported }
func (*stream) take(int64, int) ([]int, error)             { return nil, errors.ErrUnsupported }
func (*stream) closeDescriptors()                          {}
func (*stream) lock(context.Context) error                 { return errors.ErrUnsupported }
func (*stream) unlock()                                    {}
func (*stream) drained() bool                              { return false }
func (*stream) unread() bool                               { return false }
func (*stream) write(context.Context, []byte, []int, time.Duration) error {
	return errors.ErrUnsupported
}
