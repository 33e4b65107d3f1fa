package index

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/manifestpb"
)

// Member is one model of a weight-sharing group. Its graph is one of the build's files. Files that
// are not graphs belong to all members.
type Member struct {
	ModelName   string
	ModelDigest cas.Digest
	Graph       string // the name of its graph among Files
	// SessionOptions are needed in addition to the build's when one process loads several members.
	SessionOptions map[string]string
	AloneKey       RequestKey // another key by which Lookup finds the group; zero: none
	Source         Source     // unset for the first: it has the build's source
}

// MemberOf returns the index of a model among the build's members, -1 if it is not one, or if the
// build is no group.
func (b *Build) MemberOf(d cas.Digest) int {
	return slices.IndexFunc(b.Members, func(m Member) bool { return m.ModelDigest == d })
}

// Keys lists all keys that Lookup finds the build under, its own first.
func (b *Build) Keys() []RequestKey {
	keys := []RequestKey{b.RequestKey}
	for _, m := range b.Members {
		if m.AloneKey != (RequestKey{}) && !slices.Contains(keys, m.AloneKey) {
			keys = append(keys, m.AloneKey)
		}
	}
	return keys
}

// requestRow returns the key of the build's row in bucketRequests for one of its keys.
func requestRow(b *Build, k RequestKey) []byte {
	return append(requestPrefix(k, b.Scope), b.ID[:]...)
}

func marshalMembers(members []Member) []*manifestpb.Member {
	var out []*manifestpb.Member
	for i := range members {
		m := &members[i]
		one := &manifestpb.Member{ModelName: m.ModelName, ModelDigest: m.ModelDigest[:],
			Graph: m.Graph, SessionOptions: m.SessionOptions, Source: marshalSource(m.Source)}
		if m.AloneKey != (RequestKey{}) {
			one.AloneKey = m.AloneKey[:]
		}
		out = append(out, one)
	}
	return out
}

func unmarshalMembers(list []*manifestpb.Member) ([]Member, error) {
	var out []Member
	for _, m := range list {
		one := Member{ModelName: m.ModelName, Graph: m.Graph, SessionOptions: m.SessionOptions}
		err := fixed("members.model_digest", one.ModelDigest[:], m.ModelDigest)
		err = cmp.Or(err, optional("members.alone_key", one.AloneKey[:], m.AloneKey))
		var bad error
		one.Source, bad = unmarshalSource(m.Source)
		if err = cmp.Or(err, bad); err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

// maxMembers bounds a group.
const maxMembers = 256

// checkMembers refuses a group that could not be served member by member.
func checkMembers(b *Build, files map[string]bool) error {
	n := len(b.Members)
	switch {
	case n == 0:
		return nil
	case n == 1 || n > maxMembers:
		return fmt.Errorf("%d members, not 2 to %d", n, maxMembers)
	case b.Members[0].Graph != b.Graph || b.Members[0].ModelDigest != b.ModelDigest:
		return errors.New("the first member is not the build's model")
	}
	graphs, digests := make(map[string]bool, n), make(map[cas.Digest]bool, n)
	for i := range b.Members {
		m := &b.Members[i]
		switch {
		case !files[m.Graph] || graphs[m.Graph]:
			return fmt.Errorf("member %d: graph %.80q is not among the files, or another member's",
				i, m.Graph)
		case digests[m.ModelDigest]:
			return fmt.Errorf("member %d is the model of another", i)
		case i == 0 && m.Source.Kind != "":
			return errors.New("the first member has a source besides the build's")
		}
		if err := checkSource(m.Source); err != nil {
			return fmt.Errorf("member %d: source: %w", i, err)
		}
		graphs[m.Graph], digests[m.ModelDigest] = true, true
	}
	return nil
}

// sources lists the blobs of all kept sources, each file as often as it is needed.
func (b *Build) sources() []File {
	files := slices.Clone(b.Source.Files)
	for i := range b.Members {
		files = append(files, b.Members[i].Source.Files...)
	}
	return files
}
