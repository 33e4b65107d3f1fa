package unixsock

import (
	"context"
	"fmt"
	"os"

	"github.com/epcached/epcached/unixsock/wire"
)

// Peer is who sits at the other end of a connection, as the kernel tells it: as of when it connected.
type Peer struct {
	UID, GID uint32 // effective, as seen from this process's user namespace
	PID      int32  // for logs: the number may be another process's by now

	// Connection is the peer's connection: it ends when that does, whoever ended it, and is the same for all requests
	// of one. What a peer holds as long as it stays, a claim, hangs on it by context.AfterFunc.
	Connection context.Context
}

// Backend answers requests. Its methods are called at the same time from many goroutines. A context ends when the
// client cancels, goes away or its deadline passes. An error is sent as it is if it is or wraps an *Error; other
// errors are logged and sent as class INTERNAL without their text.
type Backend interface {
	// Hello answers the first frame of a connection. Version, uid and daemon uid are filled in by the server
	// where they are zero.
	Hello(Peer, *wire.Hello) *wire.HelloReply

	// Acquire answers with a build, or with *NeedError if it wants descriptors for more locations. The fds are
	// those of all Attach frames and of the request itself; every one has passed checkFD, and every index
	// in the request is within them. They are closed when Acquire returns: work that outlives the call keeps
	// duplicates of its own. Progress never blocks, may be called from any goroutine, and does nothing after Acquire returned.
	Acquire(ctx context.Context, peer Peer, request *wire.Acquire, fds []*os.File, progress func(*wire.Progress)) (Answer, error)
	// Release hears that the client is done with a build. Closing the view's descriptor is what ends the lease.
	Release(context.Context, Peer, *wire.Release) (*wire.ReleaseReply, error)

	// Put takes what the holder of a claim compiled. Files and progress are as for Acquire, and so is the answer.
	Put(ctx context.Context, peer Peer, request *wire.Put, fds []*os.File, progress func(*wire.Progress)) (Answer, error)
	// GiveUp's text has at most 4096 bytes.
	GiveUp(context.Context, Peer, *wire.GiveUp) (*wire.GiveUpReply, error)

	// Jobs, like the other three that answer with a JobsReply, must keep it within a frame.
	Jobs(context.Context, Peer, *wire.Jobs) (*wire.JobsReply, error)
	// Follow answers when the job has ended, for whatever reason. Progress is as for Acquire.
	Follow(ctx context.Context, peer Peer, request *wire.Follow, progress func(*wire.Progress)) (*wire.JobsReply, error)
	// CancelJobs takes the peer's part out of the jobs, an administrator's everybody's.
	CancelJobs(context.Context, Peer, *wire.CancelJobs) (*wire.JobsReply, error)
	// RetryJobs forgets failures that are remembered, so that the next request tries again.
	RetryJobs(context.Context, Peer, *wire.RetryJobs) (*wire.JobsReply, error)

	// List gives a page of the builds that the peer may see. It must fit into a frame; what comes after has a token. Progress is as for Acquire.
	List(ctx context.Context, peer Peer, request *wire.List, progress func(*wire.Progress)) (*wire.ListReply, error)
	// Show tells everything about an entry, or a build of it.
	Show(context.Context, Peer, *wire.Show) (*wire.ShowReply, error)
	// Invalidate withholds builds; Remove deletes them. Both may be a dry run, and so may Pin and Unpin.
	Invalidate(context.Context, Peer, *wire.Invalidate) (*wire.ChangeReply, error)
	// Remove deletes builds. What is still open stays until it is closed, and is served to nobody else.
	Remove(context.Context, Peer, *wire.Remove) (*wire.ChangeReply, error)
	// Pin keeps builds from being collected, until Unpin.
	Pin(context.Context, Peer, *wire.Pin) (*wire.ChangeReply, error)
	// Unpin takes back what Pin did.
	Unpin(context.Context, Peer, *wire.Unpin) (*wire.ChangeReply, error)
	// Collect, like Usage, must keep its reply within a frame. Progress is as for Acquire.
	Collect(ctx context.Context, peer Peer, request *wire.Collect, progress func(*wire.Progress)) (*wire.CollectReply, error)
	// Pack is like Collect.
	Pack(ctx context.Context, peer Peer, request *wire.Pack, progress func(*wire.Progress)) (*wire.PackReply, error)
	// Usage tells what takes the space: builds that the peer may see, by user and by execution provider, and what they share.
	// Progress is as for Acquire.
	Usage(ctx context.Context, peer Peer, request *wire.Usage, progress func(*wire.Progress)) (*wire.UsageReply, error)
	// Layout tells where the bytes of builds' files stand, and which tensors those are. Its reply has to fit into a frame.
	Layout(context.Context, Peer, *wire.Layout) (*wire.LayoutReply, error)
	// Status tells how the daemon is.
	Status(context.Context, Peer, *wire.Status) (*wire.StatusReply, error)
	// Probe tells which runtimes, execution providers and devices there are.
	Probe(context.Context, Peer, *wire.Probe) (*wire.ProbeReply, error)
	// Check looks for damage, with request.deep in every byte. Progress is as for Acquire.
	Check(ctx context.Context, peer Peer, request *wire.Check, progress func(*wire.Progress)) (*wire.CheckReply, error)

	// Report's text has at most 4096 bytes. Its runtime names libraries by path only.
	Report(context.Context, Peer, *wire.Report) (*wire.ReportReply, error)
	// Why explains what is known of an entry; what a request would get explains Acquire, with on_miss EXPLAIN.
	Why(context.Context, Peer, *wire.Why) (*wire.Explanation, error)
	// Events gives what happened, oldest first; Subscribe what happens from now on.
	Events(context.Context, Peer, *wire.Events) (*wire.EventsReply, error)
	// Stop begins to end the daemon, and returns the read end of a pipe that ends with the process.
	Stop(context.Context, Peer) (*os.File, error)
	// Doctor tells what is wrong on this machine, and what to do.
	Doctor(context.Context, Peer, *wire.Doctor) (*wire.DoctorReply, error)

	// Subscribe calls send with each event that the peer may see, until the context ends or send fails. Send waits
	// for a subscriber that does not read, and keeps nothing of the event: what a backend keeps for it meanwhile it
	// has to bound, and tells with an event of the kind EventMissed what it dropped.
	Subscribe(ctx context.Context, peer Peer, request *wire.Subscribe, send func(*wire.Event) error) error
}

// Answer is what Backend.Acquire found, or Backend.Put made of what was put.
type Answer struct {
	Reply *wire.AcquireReply // without the descriptor's index, which the server fills in
	View  *os.File           // the view's folder: sent as descriptor 0, then closed by the server; nil if there is none
}

// NeedError is returned by Backend.Acquire for a model that refers to external data which did not come along.
type NeedError struct {
	Locations []string // as the model spells them
	Members   []uint32 // of a group: whose each location is, 0 is Acquire.model, 1 the first of Acquire.group; nil: all are model's
}

// Error counts the locations and names the first.
func (e *NeedError) Error() string {
	return fmt.Sprintf("%d files of external data are needed, the first is %q", len(e.Locations), first(e.Locations))
}

func first(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}
