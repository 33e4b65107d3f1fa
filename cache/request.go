package cache

import (
	"context"
	"encoding/json"
	"os"
	"sort"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// Peer is who asks.
type Peer struct {
	UID, GID uint32
	PID      int32
}

// OnMiss says what to do when there is no build.
type OnMiss int

// What a request may ask for.
const (
	Wait       OnMiss = iota // compile if nobody does, and wait
	Fail                     // answer NotFound
	Refresh                  // compile anew even if there is a build
	Bypass                   // neither look up nor keep: compile for this caller only
	KeyOnly                  // answer with the key and the record
	Explain                  // decide, compile nothing, and answer with the decision and its reasons
	Background               // have it compiled if nobody does, and answer at once with the job
	ForClaim                 // let the caller compile it, unless somebody does already: then wait
)

// Request is what an application asks for. The files stay the caller's to close.
type Request struct {
	Peer     Peer
	Name     string // of the model, for people; never part of identity
	Graph    *os.File
	External map[string]*os.File // by location

	// Group are further models, compiled together with the one above, after it and in this order, so that all share context binaries.
	Group []ModelFiles

	EPs                        []EP
	SessionOptions             map[string]string
	FreeDimensions             map[string]int64
	FreeDimensionsByDenotation map[string]int64
	GraphOptimizationLevel     string
	Embed                      bool
	Route                      string
	Output                     Output

	Runtime   RuntimeRef
	StrictORT bool
	OnMiss    OnMiss
	Store     string // "", "shared", "user", "none"

	// VerifyOutput, where it is not 0, has the build run once on zeros beside the model: a value may differ by so much, as it is or as a part
	// of the model's. No part of the identity.
	VerifyOutput float64
	KeepGoing    bool // finish the compile even if nobody waits any more
	HoldsView    bool // the caller keeps Answer.View for as long as it uses the files; else who has but the path is given some time

	// Connection ends with the client's connection, and with it a claim that was given on it; nil: the client has none.
	Connection context.Context

	foreign  bool         // the files came from another user than Peer
	group    []cas.Digest // of Group, once it is identified
	member   bool         // it is for a group that has the model among its members
	sums     *sums        // nil: nothing is remembered of external data
	mayGuard bool         // identify may guard the files, and leaves that to whoever allows it to end
	guard    *guard       // over them since before they were hashed; nil: there is none

	job    string // that it is to be called, for users know it so; "": they do not
	starts int    // of daemons that took up the job

	unserved []index.BuildID // builds that the look-up found and could not serve
}

// EP is one execution provider of a request, with its devices and options.
type EP struct {
	Name    string
	Devices []compilers.Device
	Options map[string]string
	Files   map[string]*os.File // options that name a file, by option
}

// RuntimeRef says what the caller will load the model with. The zero value means the default runtime.
type RuntimeRef struct {
	Directory   string
	ORTVersion  string
	ORTLibrary  string
	EPLibraries []EPLibraryRef
}

// EPLibraryRef names one execution provider's library as the caller sees it. File may be nil.
type EPLibraryRef struct {
	EP, Path string
	File     *os.File
	Beside   map[string]*os.File // other libraries that carry its SDK, by their paths from its folder
}

// canonical is a request in its one spelling: equal requests give equal canonical values.
type canonical struct {
	Version                    int               `json:"version"`
	Model                      cas.Digest        `json:"model"`
	EPs                        []canonicalEP     `json:"eps"`
	SessionOptions             map[string]string `json:"session_options"`
	FreeDimensions             map[string]int64  `json:"free_dimensions"`
	FreeDimensionsByDenotation map[string]int64  `json:"free_dimensions_by_denotation"`
	GraphOptimizationLevel     string            `json:"graph_optimization_level"`
	Embed                      bool              `json:"embed"`
	Route                      string            `json:"route"`
	Output                     *canonicalOutput  `json:"output,omitempty"`
	Group                      []cas.Digest      `json:"-"`                // further models of a group, in order
	Member                     bool              `json:"member,omitempty"` // a key by which a group is found for one of its models
}

type canonicalEP struct {
	Name    string            `json:"name"`
	Devices []canonicalDevice `json:"devices"`
	Options map[string]string `json:"options"`
	Files   map[string]string `json:"files,omitempty"` // option -> digest of the file
}

type canonicalDevice struct {
	Type     string            `json:"type"`
	VendorID uint32            `json:"vendor_id"`
	DeviceID uint32            `json:"device_id"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// recordVersion is the first field of every record, so that a later epcached can tell what it reads.
const recordVersion = 1

// encode gives the canonical record, protobuf's wire format with fields in ascending order and maps sorted:
//
//	1 version (varint)              5 free dimension by name {1 name, 2 value}
//	2 model digest (32 bytes)       6 free dimension by denotation {1 denotation, 2 value}
//	3 execution provider, ordered   7 graph optimization level
//	  {1 name, 2 device {1 type,    8 embed (varint)
//	  2 vendor id, 3 device id,     9 route
//	  4 metadata {1, 2}},
//	  3 option {1, 2}, 4 file option {1 name, 2 digest}}
//	4 session config entry {1 key, 2 value}
//	10 output, see canonicalOutput.encode
//	20 digest of a further model of a group, ordered (32 bytes)
//	21 one of a group (varint)
//
// A field is never used again for something else; a new one is left out at its default, so that old keys hold.
func (c *canonical) encode() []byte {
	b := make([]byte, 0, 512)
	b = protowire.AppendTag(b, 1, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(c.Version))
	b = appendBytes(b, 2, c.Model[:])
	for _, ep := range c.EPs {
		b = appendBytes(b, 3, ep.encode())
	}
	b = appendStrings(b, 4, c.SessionOptions)
	b = appendInts(b, 5, c.FreeDimensions)
	b = appendInts(b, 6, c.FreeDimensionsByDenotation)
	b = appendBytes(b, 7, []byte(c.GraphOptimizationLevel))
	b = protowire.AppendTag(b, 8, protowire.VarintType)
	b = protowire.AppendVarint(b, protowire.EncodeBool(c.Embed))
	b = appendBytes(b, 9, []byte(c.Route))
	if c.Output != nil {
		b = appendBytes(b, 10, c.Output.encode())
	}
	for i := range c.Group {
		b = appendBytes(b, 20, c.Group[i][:])
	}
	if c.Member {
		b = protowire.AppendTag(b, 21, protowire.VarintType)
		b = protowire.AppendVarint(b, 1)
	}
	return b
}

func (ep *canonicalEP) encode() []byte {
	b := appendBytes(nil, 1, []byte(ep.Name))
	for _, d := range ep.Devices {
		m := appendBytes(nil, 1, []byte(d.Type))
		m = protowire.AppendTag(m, 2, protowire.VarintType)
		m = protowire.AppendVarint(m, uint64(d.VendorID))
		m = protowire.AppendTag(m, 3, protowire.VarintType)
		m = protowire.AppendVarint(m, uint64(d.DeviceID))
		b = appendBytes(b, 2, appendStrings(m, 4, d.Metadata))
	}
	b = appendStrings(b, 3, ep.Options)
	return appendStrings(b, 4, ep.Files)
}

// key is the request key: the digest of the record.
func (c *canonical) key() (index.RequestKey, []byte) {
	record := c.encode()
	return index.RequestKey(digestOf(record)), record
}

// json is the record for people and for epcachectl key.
func (c *canonical) json() string {
	type plain canonical // without this method
	var group []string
	for i := range c.Group {
		group = append(group, c.Group[i].String())
	}
	b, err := json.Marshal(struct {
		*plain
		Model string   `json:"model"` // hides the digest's bytes
		Group []string `json:"group,omitempty"`
	}{(*plain)(c), c.Model.String(), group})
	if err != nil {
		return "{}" // cannot happen: strings, numbers and maps of them only
	}
	return string(b)
}

func appendBytes(b []byte, field protowire.Number, v []byte) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	return protowire.AppendBytes(b, v)
}

func appendStrings(b []byte, field protowire.Number, m map[string]string) []byte {
	for _, k := range sortedKeys(m) {
		b = appendBytes(b, field, appendBytes(appendBytes(nil, 1, []byte(k)), 2, []byte(m[k])))
	}
	return b
}

func appendInts(b []byte, field protowire.Number, m map[string]int64) []byte {
	for _, k := range sortedKeys(m) {
		kv := appendBytes(nil, 1, []byte(k))
		kv = protowire.AppendTag(kv, 2, protowire.VarintType)
		b = appendBytes(b, field, protowire.AppendVarint(kv, uint64(m[k])))
	}
	return b
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}
