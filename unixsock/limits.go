package unixsock

import (
	"runtime"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// The limits that the protocol itself fixes; wire/epcached.proto says the same.
const (
	Version             = 1 // of the protocol
	MaxFrame            = wire.MaxFrame
	MaxDescriptors      = 64   // in one frame
	MaxAttached         = 4096 // of one request, over all its frames
	MaxReportText       = 4096 // bytes that are kept of a report, or of a claim's failure
	attachedPerFrame    = 60   // descriptors that the client sends in one frame
	progressInterval    = time.Second
	maxProgressDetail   = 1 << 10
	minDrainPoll        = 200 * time.Microsecond
	maxDrainPoll        = 20 * time.Millisecond
	maxUnreadPoll       = 500 * time.Millisecond // of an answer that waits until others are read
	firstBufferCapacity = 4 << 10
	keepBufferCapacity  = 64 << 10 // larger buffers are given back once they are empty
	reservedShare       = 64
	// connections that wait for their refusal; others are refused at once
	maxRefusals = 1 << 10
	// one user may have as many connections as this part of those that are free
	freeShare    = 8
	requestBytes = 16 << 10 // that a request in flight takes besides its frame
)

type limits struct {
	Connections       int // in all; one in reservedShare is for administrators alone
	ConnectionsPerUID int // of one user
	Requests          int // in flight on one connection
	// of the frames of requests in flight, and requestBytes for each of them
	RequestBytesPerUID  int
	FrameBytesPerUID    int // of buffers for frames that are arriving
	RunningPerUID       int // requests of one user that have just begun; see requestslots.go
	DescriptorsPerUID   int // received and held for requests
	SlowPerUID          int // requests with files that may never answer
	Slow                int // and of all users
	Unread              int // answers with descriptors that a connection has not read yet
	UnreadPerUID        int // and all of one user's connections
	Subscriptions       int // of one connection
	SubscriptionsPerUID int // and of one user's

	RefusalDelay time.Duration // until a user with too many connections gets the refusal
	HelloTimeout time.Duration // from the connection to the end of its Hello
	FrameTimeout time.Duration // from the first byte of a frame to its last
	WriteTimeout time.Duration // for which a client may leave an answer unread that does not fit
}

// defaultLimits serve a shared machine: a daemon with the usual limit of 524,288 descriptors never
// gets near it.
var defaultLimits = limits{
	Connections: 4096, ConnectionsPerUID: 256, Requests: 64, RequestBytesPerUID: 16 << 20,
	FrameBytesPerUID: 32 << 20, RunningPerUID: 2 * runtime.GOMAXPROCS(0),
	DescriptorsPerUID: 2 * MaxAttached, SlowPerUID: 8, Slow: 128, Unread: 8, UnreadPerUID: 256,
	Subscriptions: 8, SubscriptionsPerUID: 64, RefusalDelay: 500 * time.Millisecond,
	HelloTimeout: 5 * time.Second, FrameTimeout: 30 * time.Second, WriteTimeout: 10 * time.Second,
}
