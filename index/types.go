package index

import (
	"encoding/hex"
	"errors"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
)

// RequestKey is the digest of a request's canonical record: all parts of a request that can change
// the artefact's bytes.
type RequestKey [32]byte

// String returns the key as 64 lower-case hexadecimal digits.
func (k RequestKey) String() string { return hex.EncodeToString(k[:]) }

// BuildKey is a digest of the request key and of what makes the build: EP library, SDK version,
// hardware architecture and route.
type BuildKey [32]byte

// String returns the key as 64 lower-case hexadecimal digits.
func (k BuildKey) String() string { return hex.EncodeToString(k[:]) }

// ParseBuildKey reads what BuildKey.String wrote.
func ParseBuildKey(s string) (k BuildKey, err error) {
	return k, cas.ParseHex("build key", s, k[:])
}

// BuildID names one published build. It is random, made for one Publish and
// never used again; it is the name of the build's manifest.
type BuildID [16]byte

// String returns the id as 32 lower-case hexadecimal digits.
func (id BuildID) String() string { return hex.EncodeToString(id[:]) }

// IsZero reports whether id is the zero BuildID, which names no build.
func (id BuildID) IsZero() bool { return id == BuildID{} }

// ParseBuildID reads what BuildID.String wrote.
func ParseBuildID(s string) (id BuildID, err error) {
	return id, cas.ParseHex("build id", s, id[:])
}

// ErrNotFound says that the index has no such build.
var ErrNotFound = errors.New("build not found")

// File is one file of an artefact.
type File struct {
	Name   string // relative, slash-separated, below the view
	Size   int64  // bytes
	Digest cas.Digest
}

// EPFacts has the facts about one execution provider that made a build. SDK version, hardware and
// compatibility string are those that the build's own graphs state.
type EPFacts struct {
	Name, Version, Library string
	LibraryDigest          cas.Digest
	SDKVersion             string
	HardwareArchitecture   string
	CompatibilityString    string
	DriverVersion          string
	Devices                []string
	TookNone               bool // it took no node of the model, so it states no facts
}

// Build is one compiled result: the whole record that its manifest holds. A Build that the index
// returns is shared with other callers: read it, never write into its slices and maps.
type Build struct {
	ID          BuildID
	RequestKey  RequestKey
	BuildKey    BuildKey
	Scope       string // "shared" or "uid:1000"
	UID         uint32 // the user that requested the compile
	Put         bool   // UID compiled it with its own libraries and put it, or imported it
	ModelDigest cas.Digest
	ModelName   string // see package modelname
	ModelPath   string // where the client found it; "": not known
	Record      []byte // canonical request record
	RecordJSON  string
	EPs         []EPFacts
	ORTVersion  string
	Route       string
	Graph       string // the name of the graph among Files
	Files       []File

	ProviderOptions        map[string]map[string]string // by EP name
	SessionOptions         map[string]string
	GraphOptimizationLevel string

	CompileSeconds float64
	Created        time.Time // to the nanosecond, without a time zone
	LoadCheck      string
	IRVersion      int64
	Embed          bool
	Warnings       []string

	Source Source
	// Members has all models of a group in order, the first being the model above.
	Members []Member

	// Layer is the path of the layer that has the build; "": this store. It is not in manifests.
	Layer     string
	Imported  Imported // zero: made on this machine
	Converted Origin   // zero: not converted
	// VerifiedOutput is the tolerance within which its outputs equal the source model's; 0: not
	// compared.
	VerifiedOutput float64
}

// Imported is the origin of a build from another machine.
type Imported struct {
	Key      string   // id of the key that signed it
	Manifest [32]byte // SHA-256 of its OCI manifest
	Builder  string   // name of the machine that made it, in the signature
	Remote   string   // that the daemon fetched it from; "": a user imported it
}

// Origin is the build that a build was converted from, from embedded to sidecar or back. It may not
// exist any more.
type Origin struct {
	ID       BuildID
	BuildKey BuildKey
	Created  time.Time
}

// Compiled returns when the compiler made the build, or the one it was converted from.
func (b *Build) Compiled() time.Time {
	if !b.Converted.ID.IsZero() {
		return b.Converted.Created
	}
	return b.Created
}

// Maker returns the first execution provider that took nodes of the model.
func (b *Build) Maker() *EPFacts {
	return &b.EPs[max(0, slices.IndexFunc(b.EPs, func(ep EPFacts) bool { return !ep.TookNone }))]
}

// Blobs returns every blob that the build refers to: its files, and those of its kept source, which
// are not files of the artefact.
func (b *Build) Blobs() []File { return slices.Concat(b.Files, b.sources()) }

// DistinctBlobs returns the blobs of a build, each once, with their sizes.
func (b *Build) DistinctBlobs() map[cas.Digest]int64 {
	out := make(map[cas.Digest]int64, len(b.Files))
	for _, f := range b.Blobs() {
		out[f.Digest] = f.Size
	}
	return out
}

// HasModel reports whether the blob is among the build's files.
func (b *Build) HasModel(d cas.Digest) bool {
	return slices.ContainsFunc(b.Files, func(f File) bool { return f.Digest == d })
}

// Source says where a build's source model is, for compiling it again.
type Source struct {
	Kind     string            // SourceReference, SourceCopy, or "": it is not kept
	Why      string            // it is not kept; "": not known
	Path     string            // of a reference: the graph's path, absolute
	External map[string]string // of a reference: absolute paths, by location
	// Files has, for a copy, the graph without a name, then external data with its location as
	// name.
	Files []File
}

// How a source model is kept.
const (
	SourceReference = "reference" // the user's file, which may change
	SourceCopy      = "copy"      // its bytes are blobs
)

// The states of a build.
const (
	Current  = "current"
	Withheld = "withheld" // not served, until it is judged again
	Damaged  = "damaged"  // not served: its bytes have changed
)

// State says whether a build may be served. A build without a problem is Current.
type State struct {
	Name   string
	Reason string
	At     time.Time
}

// Event is one line of history, of a request or of the machine. Samples of
// earlier versions lack the fields after Text.
type Event struct {
	At         time.Time
	Kind       string     // "compiled", "failed", "retracted", ...
	RequestKey RequestKey // zero: of the machine
	BuildID    BuildID    // zero: about no build
	Text       string

	BuildKey  BuildKey
	ModelName string
	Runtime   string // name of the runtime, in events of a runtime
	Scope     string // which users may see it; the same values as of a build
	By        string // the user that caused it, "uid:1000", where Scope does not say it

	Sequence uint64 // counts the events since Open, from 1; 0: an earlier event; not stored
}

// Space has the sums of sizes over all builds.
type Space struct {
	LogicalBytes int64  // every file of every build, copies of source models included
	UniqueBytes  int64  // every blob once, by its size
	Entries      uint64 // request keys
	Builds       uint64

	DiskBytes     int64 // every blob once, in whole blocks, as measured when it was stored
	ManifestBytes int64 // the same for the manifests
}

// Finding is one problem that Check found.
type Finding struct {
	Kind   string // "damaged", "newer", "missing", "leftover", "foreign"
	Object string // a path below the state directory, or a build id
	Detail string
}

// Why the source model of a build is not kept: the values of Source.Why.
const (
	WhySwitchedOff = `keep_source is "none"`
	WhyNoPath      = "the application sent bytes, or a file without a path that the daemon can open"
	WhyPrivate     = "other users may not read the model"
	WhyClosed      = "the daemon's user may not open the model"
	WhyElsewhere   = "the model is on FUSE or on a file system that does not respond"
	WhyAnothers    = "the build was converted from a build of another user"
	WhyFailed      = "the model could not be copied; the daemon's log says why"
)
