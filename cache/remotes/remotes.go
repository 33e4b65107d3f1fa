// Package remotes is the daemon's side of stores that machines share. It queries them for a build
// before that is compiled, publishes the daemon's builds to them, and lets one machine of a fleet
// compile for all.
//
// Package remote transfers the bytes, in a helper process that is not trusted. This package decides
// whether a remote is queried, how long a request waits, and which signatures count. Fetched builds
// are checked like imports. A remote never makes a request fail, because without it the request
// compiles. Start reading at Remotes.Begin and Remotes.NotePublished.
package remotes

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/trust"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// Remote is the configuration of one remote.
type Remote struct {
	remote.Config
	Trust      []string // files with the trusted keys
	Ask        bool     // query it before a compile
	Publish    bool     // publish shared builds to it
	Lease      bool     // use leases, so that one machine compiles for all
	LoseAtMost time.Duration
	SigningKey string // file with the key that signs published cards
}

// DefaultLoss is how much time a request loses to the remotes at most.
const DefaultLoss = 10 * time.Second

// Client makes calls to remotes. *remote.Client is one.
type Client interface {
	Configure([]remote.Config)
	Look(ctx context.Context, remote string, key remote.Key, budget time.Duration) ([][]byte, error)
	Fetch(ctx context.Context, remote string, f remote.Fetch) (remote.Progress, error)
	PutBlobs(ctx context.Context, remote string, blobs []remote.Blob,
		progress func(remote.Progress)) (remote.Sent, error)
	PutCard(ctx context.Context, remote string, keys remote.CardKeys,
		card []byte) (remote.Put, error)
	Renew(ctx context.Context, remote string, keys remote.CardKeys,
		card []byte) (remote.Put, error)
	Lease(ctx context.Context, remote string, l remote.LeaseRequest) (remote.Lease, error)
	Trust(ctx context.Context, remote string) ([]byte, error)
	PutTrust(ctx context.Context, remote string, document []byte,
		over portable.Digest) (remote.Put, error)
	Collect(ctx context.Context, remote string, dryRun bool,
		progress func(remote.Progress)) ([]remote.Kind, error)
	Check(ctx context.Context, remote string) ([]remote.Finding, error)
	Status() []remote.Status
	Close() error
}

// Options are the dependencies of Remotes.
type Options struct {
	Client  Client
	Remotes func() []Remote // the remotes in effect, in the order of queries
	UID     uint32          // the daemon's user
	Store   *store.Store
	Trust   *trust.Documents
	Now     func() time.Time
	Log     *slog.Logger

	// Import stores a fetched build. Without files it returns the outcome that it would have.
	Import func(context.Context, request.Peer, *claims.Import,
		func(request.Progress)) (*claims.Imported, error)
	// Export returns the description of a shared build, and a lease on its view.
	Export func(context.Context, *index.Build) (*wire.ExportReply, *os.File, error)
	// MayPublish reports whether shared builds that this user put may leave the machine.
	MayPublish func(uid uint32) bool
	// Busy reports whether a request waits for a compile.
	Busy func() bool
}

// Remotes has all remotes. If Client is nil there are never any.
type Remotes struct {
	Options

	fetching keyed.Locks[index.BuildKey]   // one fetch of a build at a time
	reading  keyed.Locks[string]           // one read of trust documents at a time, by remote
	looked   atomic.Pointer[outcomes]      // outcomes of look-ups
	partial  atomic.Pointer[partial]       // the last fetch that failed; nil: none
	mu       sync.Mutex                    // guards the fields below
	figures  map[string]*figures           // by remote
	leases   map[index.BuildKey]*heldLease // leases that this machine holds
	renewing sync.WaitGroup                // goroutines that renew leases
	queue    []index.BuildID               // builds to publish, the oldest first
	wake     chan struct{}
	reloaded chan struct{} // holds a token if other keys may be trusted now
}

// looked identifies a look-up at a remote, as a key of remembered results.
type looked struct {
	remote string
	build  index.BuildKey
}

type outcomes = memo.Table[looked, outcome]

// outcome is the result of a look-up, and until when it is not repeated.
type outcome struct {
	text  string
	at    time.Time
	until time.Time // the negative cache: no repetition before; zero: no wait
	bad   bool      // the remote has the build, but it cannot be used

	damaged bool // bad, because its bytes are wrong
}

// The negative cache: how long a remote is not queried again for a build that it does not have,
// plus or minus a quarter, and for how many builds.
const (
	missingFor  = time.Minute
	maxOutcomes = 1 << 14
)

// New returns Remotes. Nothing runs in the background before Run.
func New(o Options) *Remotes {
	rs := &Remotes{Options: o, figures: make(map[string]*figures),
		leases: make(map[index.BuildKey]*heldLease), wake: make(chan struct{}, 1),
		reloaded: make(chan struct{}, 1)}
	rs.looked.Store(new(outcomes))
	return rs
}

// Configure applies the remotes that Options.Remotes returns now. It empties the negative cache,
// because other keys may be trusted.
func (rs *Remotes) Configure() {
	if rs.Client == nil {
		return
	}
	var all []remote.Config
	for _, r := range rs.Options.Remotes() {
		all = append(all, r.Config)
	}
	rs.Client.Configure(all)
	rs.looked.Store(new(outcomes))
	rs.mu.Lock()
	defer rs.mu.Unlock()
	// read trust documents again, because other keys need other documents
	for _, f := range rs.figures {
		f.trustNext.Store(0)
		f.damage = [maxDamage]time.Time{}
	}
	select {
	case rs.reloaded <- struct{}{}:
	default:
	}
}

// all returns the remotes in effect.
func (rs *Remotes) all() []Remote {
	if rs.Client == nil {
		return nil
	}
	return rs.Options.Remotes()
}

// Forget removes a build from the negative cache.
func (rs *Remotes) Forget(build index.BuildKey) {
	for _, r := range rs.all() {
		rs.looked.Load().Save(looked{r.Name, build}, outcome{}, maxOutcomes)
	}
}

// note records the outcome of a look-up. With negative it goes into the negative cache.
func (rs *Remotes) note(r *Remote, build index.BuildKey, o outcome, negative bool) {
	if o.at = rs.Now(); negative {
		jitter := time.Duration(rand.Int64N(int64(missingFor / 2)))
		o.until = o.at.Add(missingFor*3/4 + jitter)
	}
	rs.looked.Load().Save(looked{r.Name, build}, o, maxOutcomes)
}

// byName returns the remote of that name.
func (rs *Remotes) byName(name string) (Remote, error) {
	var names []string
	for _, r := range rs.all() {
		if r.Name == name {
			return r, nil
		}
		names = append(names, r.Name)
	}
	e := apierr.New(apierr.NotFound, nil, "no remote %.80q is configured", name)
	if len(names) > 0 {
		return Remote{}, e.WithHint("there are: %s", strings.Join(names, ", "))
	}
	return Remote{}, e.WithHint("add a table [remote.NAME] to the daemon's configuration")
}

// ToPublish returns the remotes that builds are copied to, or only the one of that name unless it
// is "".
func (rs *Remotes) ToPublish(name string) (out []Remote, err error) {
	all := rs.all()
	if name != "" {
		one, err := rs.byName(name)
		if err != nil {
			return nil, err
		}
		all = []Remote{one}
	}
	for _, r := range all {
		if r.Publish {
			out = append(out, r)
		}
	}
	if len(out) == 0 {
		return nil, apierr.New(apierr.NotAllowed, nil,
			"push: no remote is configured to be written to").
			WithHint(
				"write publish = \"shared\" into the table [remote.NAME] of the daemon's " +
					"configuration")
	}
	return out, nil
}

// Check tries each operation that the daemon needs on a remote.
func (rs *Remotes) Check(ctx context.Context, name string) (*wire.CheckRemoteReply, error) {
	if _, err := rs.byName(name); err != nil {
		return nil, err
	}
	found, err := rs.Client.Check(ctx, name)
	if err != nil {
		return nil, apierr.New(apierr.Unavailable, err, "remote check")
	}
	reply := &wire.CheckRemoteReply{}
	for _, f := range found {
		reply.Findings = append(reply.Findings,
			&wire.CheckRemoteReply_Finding{Name: f.Name, Ok: f.OK, Text: wire.Valid(f.Text)})
	}
	return reply, nil
}

// Collect removes builds from a remote that no look-up can find any more.
func (rs *Remotes) Collect(ctx context.Context, name string, dryRun bool,
	progress func(request.Progress)) (*wire.CollectRemoteReply, error) {
	if _, err := rs.byName(name); err != nil {
		return nil, err
	}
	kinds, err := rs.Client.Collect(ctx, name, dryRun, func(p remote.Progress) {
		progress(request.Progress{Phase: "collecting",
			Detail: fmt.Sprintf("%d of %d objects", p.Done, p.Total)})
	})
	if err != nil {
		return nil, apierr.New(apierr.Unavailable, err, "remote gc")
	}
	reply := &wire.CollectRemoteReply{}
	for _, k := range kinds {
		reply.Kinds = append(reply.Kinds, &wire.CollectRemoteReply_Kind{Name: wire.Valid(k.Name),
			Kept: uint64(k.Kept), Removed: uint64(k.Removed), Bytes: k.Bytes,
			Young: uint64(k.Young)})
	}
	return reply, nil
}

// Close releases all leases, and ends the helper process. Jobs and Run must have ended.
func (rs *Remotes) Close() error {
	if rs.Client == nil {
		return nil
	}
	rs.mu.Lock()
	for _, h := range rs.leases {
		h.stop()
	}
	rs.mu.Unlock()
	rs.renewing.Wait()
	rs.keepPartial(nil)
	return rs.Client.Close()
}
