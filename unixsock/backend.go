package unixsock

import (
	"context"
	"fmt"
	"os"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/unixsock/wire"
)

// Peer is the process at the other end of a connection, as the kernel reported it at connect.
type Peer struct {
	UID, GID uint32 // effective, as seen from this process's user namespace
	PID      int32  // for logs only, because the pid may be reused

	Slow bool // set in a request with a file on a file system that may never answer

	// Connection is done when the peer's connection ends, whichever end closes it; all its requests
	// share it. context.AfterFunc releases a claim, which lasts as long as its peer.
	Connection context.Context
}

// Backend answers requests. Its methods are called at the same time from many goroutines. A context
// ends when the client cancels or disconnects, or its deadline passes. An error is sent unchanged
// if it is or wraps an *Error; other errors are logged and sent as class INTERNAL without their
// text.
type Backend interface {
	// Hello answers the first frame of a connection. The server sets version, uid and daemon uid if
	// they are zero.
	Hello(Peer, *wire.Hello) *wire.HelloReply

	// Acquire answers with a build, or with *NeedError if it wants descriptors for more locations.
	// The files are those of all Attach frames and of the request itself; every one has passed
	// checkFD, and every index in the request is within them. They are closed when Acquire returns:
	// work that outlives the call needs duplicates. Progress never blocks, may be called from any
	// goroutine, and does nothing after Acquire has returned.
	Acquire(ctx context.Context, peer Peer, request *wire.Acquire, files *Files,
		progress func(*wire.Progress)) (Answer, error)

	// Put stores the artefact that a claimant compiled. Files, progress and answer are as for
	// Acquire.
	Put(ctx context.Context, peer Peer, request *wire.Put, files *Files,
		progress func(*wire.Progress)) (Answer, error)

	// Import stores a build of another machine, or without files returns the outcome that it would
	// have. Files and progress are as for Acquire.
	Import(ctx context.Context, peer Peer, request *wire.Import, files *Files,
		progress func(*wire.Progress)) (*wire.ImportReply, error)

	// Export returns the description of a build, and its view's directory as Acquire does.
	Export(ctx context.Context, peer Peer, request *wire.Export) (*wire.ExportReply,
		*os.File, error)

	// Ask answers every other request with its reply, which has to fit into a frame; nil is for a
	// message that is no request. Progress is as for Acquire. The texts of Report and GiveUp have
	// at most 4096 bytes, and Report's runtime names libraries by path only.
	Ask(ctx context.Context, peer Peer, request proto.Message,
		progress func(*wire.Progress)) (proto.Message, error)

	// Stop begins to end the daemon, and returns the read end of a pipe whose write end closes with
	// the process.
	Stop(context.Context, Peer) (*os.File, error)

	// Subscribe calls send with each event that the peer may see, until the context ends or send
	// fails. Send blocks while the subscriber does not read, and does not keep the event: the
	// backend bounds its queue, and reports dropped events by one of the kind EventMissed.
	Subscribe(ctx context.Context, peer Peer, request *wire.Subscribe,
		send func(*wire.Event) error) error
}

// Files are the files of a request, whose descriptors are in its order.
type Files struct {
	r    *request
	slow func() // called before the backend decides the request
}

// Body returns the request's bytes, "" if it is large. Equal bytes are equal requests, up to the
// contents of the files.
func (f *Files) Body() string { return f.r.body }

// Descriptors returns the open descriptors, before Open is called.
func (f *Files) Descriptors() []int { return f.r.fds }

// Open returns the files.
func (f *Files) Open() []*os.File {
	if f.r.files == nil {
		f.slow()
		f.r.files, f.r.fds = toFiles(f.r.fds), nil
	}
	return f.r.files
}

// maxBody bounds a request with a Body, in bytes.
const maxBody = 4 << 10

// Answer is the build of Backend.Acquire or Backend.Put.
type Answer struct {
	Reply *wire.AcquireReply // without the descriptor's index, which the server sets
	// the view's directory: sent as descriptor 0, then closed by the server; nil if there is none
	View *os.File
}

// NeedError is returned by Backend.Acquire for a model that refers to external data which the
// client has not sent.
type NeedError struct {
	Locations []string // as the model spells them
	Members   []uint32 // in a group, each location's model: 0 is Acquire.model; nil: all 0
}

// Error counts the locations and names the first.
func (e *NeedError) Error() string {
	return fmt.Sprintf("%d files of external data are needed, the first is %q", len(e.Locations),
		firstOf(e.Locations))
}

func firstOf(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}
