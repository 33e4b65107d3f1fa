package unixsock

import (
	"cmp"
	"time"
)

// What the protocol itself fixes; wire/epcached.proto says the same.
const (
	Version             = 1       // of the protocol
	MaxFrame            = 1 << 20 // bytes after the length
	MaxDescriptors      = 64      // in one frame
	MaxAttached         = 4096    // of one request, over all its frames
	MaxReportText       = 4096    // bytes of a report's text that are kept, and of what a claim is given up with
	attachedPerFrame    = 60      // what the client sends in one frame
	progressInterval    = time.Second
	maxProgressDetail   = 1 << 10
	minDrainPoll        = 200 * time.Microsecond
	maxDrainPoll        = 20 * time.Millisecond
	firstBufferCapacity = 4 << 10
	keepBufferCapacity  = 64 << 10 // larger buffers are given back once they are empty
)

// Limits bound what clients can take. A field that is zero has the value of DefaultLimits.
type Limits struct {
	Connections         int // in all
	ConnectionsPerUID   int // of one user
	Requests            int // in flight on one connection
	RequestBytesPerUID  int // of the frames of requests in flight
	DescriptorsPerUID   int // received and held for requests
	Unread              int // answers with descriptors that a connection has not read yet
	UnreadPerUID        int // and all of one user's connections
	Subscriptions       int // of one connection
	SubscriptionsPerUID int // and of one user's

	HelloTimeout time.Duration // from the connection to the end of its Hello
	FrameTimeout time.Duration // from the first byte of a frame to its last
	WriteTimeout time.Duration // for which a client may leave an answer unread that does not fit
}

// DefaultLimits serve a shared machine: a daemon with the usual limit of 524,288 descriptors never gets near it.
func DefaultLimits() Limits {
	return Limits{
		Connections:         4096,
		ConnectionsPerUID:   256,
		Requests:            64,
		RequestBytesPerUID:  16 << 20,
		DescriptorsPerUID:   2 * MaxAttached,
		Unread:              8,
		UnreadPerUID:        256,
		Subscriptions:       8,
		SubscriptionsPerUID: 64,
		HelloTimeout:        5 * time.Second,
		FrameTimeout:        30 * time.Second,
		WriteTimeout:        10 * time.Second,
	}
}

func (l Limits) withDefaults() Limits {
	d := DefaultLimits()
	return Limits{
		Connections:         cmp.Or(max(l.Connections, 0), d.Connections),
		ConnectionsPerUID:   cmp.Or(max(l.ConnectionsPerUID, 0), d.ConnectionsPerUID),
		Requests:            cmp.Or(max(l.Requests, 0), d.Requests),
		RequestBytesPerUID:  cmp.Or(max(l.RequestBytesPerUID, 0), d.RequestBytesPerUID),
		DescriptorsPerUID:   cmp.Or(max(l.DescriptorsPerUID, 0), d.DescriptorsPerUID),
		Unread:              cmp.Or(max(l.Unread, 0), d.Unread),
		UnreadPerUID:        cmp.Or(max(l.UnreadPerUID, 0), d.UnreadPerUID),
		Subscriptions:       cmp.Or(max(l.Subscriptions, 0), d.Subscriptions),
		SubscriptionsPerUID: cmp.Or(max(l.SubscriptionsPerUID, 0), d.SubscriptionsPerUID),
		HelloTimeout:        cmp.Or(max(l.HelloTimeout, 0), d.HelloTimeout),
		FrameTimeout:        cmp.Or(max(l.FrameTimeout, 0), d.FrameTimeout),
		WriteTimeout:        cmp.Or(max(l.WriteTimeout, 0), d.WriteTimeout),
	}
}
