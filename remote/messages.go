package remote

import (
	"time"

	"github.com/epcached/epcached/portable"
)

// Version must be equal on both ends.
const Version = 1

// Bounds of what remotes and the helper may send.
const (
	MaxCard  = 256 << 10 // bytes of one card
	MaxCards = 64        // of one look-up
	MaxLook  = 4 << 20   // bytes of all cards of one look-up
	MaxTrust = 256 << 10 // bytes of the trust document
	maxFrame = 8 << 20
	maxText  = 500 // bytes of an error
	maxFiles = 250 // descriptors of one request: SCM_MAX_FD is 253
)

// EpochLength is the time after which cards are put under another name: see Epoch.
const EpochLength = 30 * 24 * time.Hour

// Epoch returns the number of the epoch of a time. Look-ups find cards of the current and the
// previous epoch.
func Epoch(t time.Time) int64 { return t.Unix() / int64(EpochLength/time.Second) }

// The requests.
const (
	DoHello    = "hello"
	DoLook     = "look"
	DoFetch    = "fetch"
	DoPutBlobs = "putblobs"
	DoPutCard  = "putcard"
	DoRenew    = "renew"
	DoLease    = "lease"
	DoTrust    = "trust"
	DoPutTrust = "puttrust"
	DoCollect  = "collect"
	DoCheck    = "check"
)

// Request is the first frame of a connection.
type Request struct {
	Version  int
	Do       string
	Remote   Config
	Budget   time.Duration // time for the answer; 0: no bound
	Key      Key           // look
	Manifest []byte        // fetch
	Writable int           // fetch: number of descriptors to write; the rest are seeds
	Slowly   bool          // fetch: the configured rate applies
	Blobs    []BlobName    // putblobs: one for each descriptor
	Card     []byte        // putcard, renew; puttrust: the document
	Keys     CardKeys      // putcard, renew; puttrust: Over
	DryRun   bool          // collect
	Lease    LeaseRequest  // lease
}

// Answer is each frame that the helper sends. All but the last have progress alone.
type Answer struct {
	Progress *Progress `json:",omitempty"`

	Err   *Error    `json:",omitempty"`
	Can   *Can      `json:",omitempty"`
	Cards [][]byte  `json:",omitempty"` // look: the cards; trust: the document
	Put   string    `json:",omitempty"` // putcard, puttrust
	Sent  *Sent     `json:",omitempty"` // putblobs
	Lease *Lease    `json:",omitempty"`
	Check []Finding `json:",omitempty"`
	Kinds []Kind    `json:",omitempty"` // collect
	Wire  Wire      // bytes that this call took
}

// Key is the key of a look-up.
type Key struct {
	Request bool // a request key; otherwise a build key
	Hash    portable.Hash
}

// BuildKey asks for the card of a build.
func BuildKey(h portable.Hash) Key { return Key{Hash: h} }

// RequestKey asks for the cards of all builds that answer a request.
func RequestKey(h portable.Hash) Key { return Key{Request: true, Hash: h} }

// String returns what is asked for, in messages.
func (k Key) String() string {
	if k.Request {
		return "request key " + k.Hash.String()
	}
	return "build key " + k.Hash.String()
}

// CardKeys are the keys under which a card is put.
type CardKeys struct {
	Build    portable.Hash
	Requests []portable.Hash // may be empty
	// Over is the SHA-256 of the only object that may be replaced; zero: none.
	Over portable.Digest
}

// Progress is how far a fetch or an upload is, in bytes of the plain files or of the blobs.
type Progress struct {
	Done, Total int64
	Wire        int64 // bytes that came or went over the network for it
	Seeds       int64 // bytes that were taken from seeds
}

// Wire is the bytes of a call as the network saw them, bodies only.
type Wire struct {
	In, Out  int64
	Requests int
}

// Can lists the operations that a kind of remote supports, as far as is known without trying.
type Can struct {
	Read, Write, CreateOnly, Range, List bool
}

// BlobName names a blob.
type BlobName struct {
	Digest portable.Digest
	Size   int64
	Again  bool // upload it even if there is one of this size, which may be damaged
}

// Sent is the result of an upload.
type Sent struct {
	Sent, Existed int   // blobs
	Bytes         int64 // of those sent
}

// Put is the result of putting a card.
type Put string

// The first card of an epoch is kept, unless the caller names it for replacement with
// CardKeys.Over.
const (
	Created  Put = "created"
	Replaced Put = "replaced"
	Exists   Put = "exists" // a card exists already
)

// LeaseRequest asks for the right to compile for all machines.
type LeaseRequest struct {
	Key      portable.Hash // build key
	Holder   string        // random for each attempt, and the same in its renewals
	Estimate time.Duration // of the compile
	TTL      time.Duration // interval of renewals; after two of them others may take over
	Release  bool          // the compile ended without a card: others may start
	Look     bool          // only say which daemon has it
}

// LeaseState is the result of a request for a lease.
type LeaseState string

// States of a lease.
const (
	Granted LeaseState = "granted" // taken, taken over, renewed or released
	Held    LeaseState = "held"
	// NotOffered: the remote has no create-only writes, or is read only. Of a look: no machine has
	// the lease.
	NotOffered LeaseState = "not offered"
)

// Lease is the answer. Ages are by the server's clock.
type Lease struct {
	State     LeaseState
	Age       time.Duration // Held: since it was taken
	Estimate  time.Duration // Held: the holder's estimate
	TakenOver bool          // Granted: the earlier holder did not renew it
}

// Kind is the result of a collection for one kind of objects.
type Kind struct {
	Name    string // "cards", "blobs", "leases", "checks"
	Kept    int
	Removed int   // or would be
	Bytes   int64 // of those removed
	Young   int   // kept only because they are too young
}

// Finding is the result of one operation of Check.
type Finding struct {
	// "read", "look-up", "versions", "write", "create-only", "if-match", "range", "list",
	// "referrers", "clock"
	Name string
	OK   bool
	Text string // the result and its consequence
}
