package unixsock

import (
	"context"
	"errors"
	"os"

	"github.com/epcached/epcached/unixsock/wire"
)

// Client is one connection to a daemon. Its methods may be called at the same time.
type Client struct{ hello *wire.HelloReply }

// Dial connects to the daemon at path and exchanges the first frames.
func Dial(ctx context.Context, path string) (*Client, error) { return nil, errors.ErrUnsupported }

// Hello is what the daemon said about itself and the client.
func (c *Client) Hello() *wire.HelloReply { return c.hello }

// Acquire asks for a build.
func (c *Client) Acquire(ctx context.Context, request *wire.Acquire, fds []*os.File, external func(location string) (*os.File, error), progress func(*wire.Progress)) (*wire.AcquireReply, *os.File, error) {
	return nil, nil, errors.ErrUnsupported
}

// Release tells that the client is done with a build.
func (c *Client) Release(ctx context.Context, r *wire.Release) (*wire.ReleaseReply, error) {
	return nil, errors.ErrUnsupported
}

// Close ends the connection.
func (c *Client) Close() error { return nil }
