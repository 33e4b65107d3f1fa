package cache

import (
	"encoding/json"
	"maps"
	"slices"

	"github.com/zeebo/blake3"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

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
	return index.RequestKey(blake3.Sum256(record)), record
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
	for _, k := range slices.Sorted(maps.Keys(m)) {
		b = appendBytes(b, field, appendBytes(appendBytes(nil, 1, []byte(k)), 2, []byte(m[k])))
	}
	return b
}

func appendInts(b []byte, field protowire.Number, m map[string]int64) []byte {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		kv := appendBytes(nil, 1, []byte(k))
		kv = protowire.AppendTag(kv, 2, protowire.VarintType)
		b = appendBytes(b, field, protowire.AppendVarint(kv, uint64(m[k])))
	}
	return b
}

// options lists what the execution providers were told, for people.
func (c *canonical) options() []string {
	var out []string
	for _, ep := range c.EPs {
		for _, name := range slices.Sorted(maps.Keys(ep.Options)) {
			out = append(out, name+"="+ep.Options[name])
		}
	}
	return out
}

// member gives the digest of one of the request's models.
func (c *canonical) member(i int) cas.Digest {
	if i == 0 {
		return c.Model
	}
	return c.Group[i-1]
}

// alone is the key under which a group is found by one who asks for a single of its models, with the same options.
func (c *canonical) alone(member int) index.RequestKey {
	one := c.ofMember(member)
	key, _ := one.key()
	return key
}

// ofMember is what one who asks for a single of a group's models asks for.
func (c *canonical) ofMember(member int) canonical {
	one := *c
	if member > 0 {
		one.Model = c.Group[member-1]
	}
	one.Group, one.Member = nil, true
	return one
}
