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

// Epoch is the number of the epoch of a time. Cards of this epoch and of the one before are found.
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
	Budget   time.Duration // after which no answer is wanted; 0: no bound
	Key      Key           // look
	Manifest []byte        // fetch
	Writable int           // fetch: so many descriptors are to be written, the rest are seeds
	Slowly   bool          // fetch: the rate of the remote counts
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

// Key is what a look-up asks for.
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

// CardKeys is where a card is put.
type CardKeys struct {
	Build    portable.Hash
	Requests []portable.Hash // may be empty
	// Over is the SHA-256 of the object that is replaced, if it is that; zero: none is.
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

// Can is what a kind of remote is able to do, as far as it is known without trying.
type Can struct {
	Read, Write, CreateOnly, Range, List bool
}

// BlobName says what a blob is called.
type BlobName struct {
	Digest portable.Digest
	Size   int64
}

// Sent is what became of an upload.
type Sent struct {
	Sent, Existed int   // blobs
	Bytes         int64 // of those sent
}

// Put says whether a card was made.
type Put string

// The first card of an epoch stays, unless the caller has seen it and says that it does not count.
const (
	Created  Put = "created"
	Replaced Put = "replaced"
	Exists   Put = "exists" // another card, or the same one; a look-up has it
)

// LeaseRequest asks for the right to compile for all machines.
type LeaseRequest struct {
	Key      portable.Hash // build key
	Holder   string        // of this attempt: random, and the same in each renewal
	Estimate time.Duration // of the compile
	TTL      time.Duration // within which it is renewed; after two of them others take it over
	Release  bool          // the compile ended without a card: others may start
	Look     bool          // only say who has it
}

// LeaseState is what became of a request for a lease.
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
	Estimate  time.Duration // Held: what its holder expects
	TakenOver bool          // Granted: the earlier holder did not renew it
}

// Kind is what a collection found of one kind of objects.
type Kind struct {
	Name    string // "cards", "blobs", "leases", "checks"
	Kept    int
	Removed int   // or would be
	Bytes   int64 // of those removed
	Young   int   // of those kept: nothing needs them, and they are not old enough
}

// Finding is one thing that Check tried.
type Finding struct {
	Name string // "read", "write", "create-only", "if-match", "range", "list", "referrers", "clock"
	OK   bool
	Text string // what was seen, and what follows from it
}
