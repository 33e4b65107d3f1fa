package unixsock

import (
	"context"
	"errors"
	"log/slog"
	"net"
)

// Server answers requests on a Unix socket. Fill in the fields, then call Serve; do not change them after.
type Server struct {
	Backend Backend
	Limits  Limits
	Name    string       // for HelloReply: "epcached 0.1.0"
	Log     *slog.Logger // nil: silent
}

// Serve accepts and answers until the context ends or Shutdown is called, then returns nil after the last
// goroutine is gone. The listener is closed. It may come from Listen or from socket activation.
func (s *Server) Serve(ctx context.Context, l net.Listener) error { return errors.ErrUnsupported }

// Shutdown stops accepting, lets requests in flight finish until the context ends, then cancels them, and returns
// after the last one.
func (s *Server) Shutdown(ctx context.Context) error { return errors.ErrUnsupported }

// Connections counts the clients.
func (s *Server) Connections() int { return 0 }
