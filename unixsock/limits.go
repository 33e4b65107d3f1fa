package unixsock

import (
	"time"

	"github.com/epcached/epcached/internal/parallel"
	"github.com/epcached/epcached/unixsock/wire"
)

// The limits that the protocol itself fixes; wire/epcached.proto says the same.
const (
	Version             = 1 // of the protocol
	MaxFrame            = wire.MaxFrame
	MaxDescriptors      = 64   // in one frame
	MaxAttached         = 4096 // of one request, over all its frames
	MaxReportText       = 4096 // bytes kept of a report, or of a claim's failure
	attachedPerFrame    = 60   // descriptors that the client sends in one frame
	progressInterval    = time.Second
	maxProgressDetail   = 1 << 10
	minDrainPoll        = 200 * time.Microsecond
	maxDrainPoll        = 20 * time.Millisecond
	maxUnreadPoll       = 500 * time.Millisecond // interval of checks whether answers were read
	firstBufferCapacity = 4 << 10
	keepBufferCapacity  = 64 << 10 // larger buffers are released when they are empty
	reservedShare       = 64
	// maxRefusals bounds the connections that wait for their refusal; others are refused at once.
	maxRefusals = 1 << 10
	// freeShare is the divisor for the part of the free connections that one user may have.
	freeShare    = 8
	requestBytes = 16 << 10 // memory of a request in flight besides its frame
)

type limits struct {
	Connections       int // in all; one in reservedShare is reserved for administrators
	ConnectionsPerUID int // of one user
	Requests          int // in flight on one connection
	// RequestBytesPerUID bounds the frames of requests in flight, plus requestBytes for each.
	RequestBytesPerUID  int
	FrameBytesPerUID    int // buffers for incomplete frames
	RunningPerUID       int // running requests of one user; see requestslots.go
	DescriptorsPerUID   int // received and held for requests
	SlowPerUID          int // requests with files that may never answer
	Slow                int // the same for all users
	Unread              int // answers with descriptors that a connection has not read yet
	UnreadPerUID        int // the same for all connections of one user
	Subscriptions       int // of one connection
	SubscriptionsPerUID int // the same for one user

	// HelloInterval is the mean time between two answered Hellos of one user while other users are
	// served; HelloBurst of them are answered without it.
	HelloInterval time.Duration
	HelloBurst    int

	RefusalDelay time.Duration // until a user with too many connections gets the refusal
	HelloTimeout time.Duration // from the connection to the end of its Hello
	FrameTimeout time.Duration // from the first byte of a frame to its last
	// how long a client may not read an answer that does not fit into the buffer
	WriteTimeout time.Duration
}

// defaultLimits serve a shared machine: a daemon with the usual limit of 524,288 descriptors never
// gets near it.
var defaultLimits = limits{
	Connections: 4096, ConnectionsPerUID: 256, Requests: 64, RequestBytesPerUID: 16 << 20,
	FrameBytesPerUID: 32 << 20, RunningPerUID: parallel.Processors(),
	DescriptorsPerUID: 2 * MaxAttached, SlowPerUID: 8, Slow: 128, Unread: 8, UnreadPerUID: 256,
	Subscriptions: 8, SubscriptionsPerUID: 64, HelloInterval: 5 * time.Millisecond,
	HelloBurst: 32, RefusalDelay: 2 * time.Second, HelloTimeout: 5 * time.Second,
	FrameTimeout: 30 * time.Second, WriteTimeout: 10 * time.Second,
}
