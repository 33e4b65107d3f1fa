package index

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/modelname"
)

// The names that users give for builds. A look-up by a name reads only the matching builds.

// The kinds of names that bucketNames has rows for. Request keys and build ids
// have buckets of their own.
const (
	nameBuildKey byte = iota
	nameModelDigest
	nameModel
)

// nameBytes is how many bytes of a digest, or of a model name's BLAKE3, are in a row. They
// distinguish nearly all builds, and the record is compared then.
const nameBytes = 8

// MinPrefix is the least number of digits for a prefix of a key, id or digest.
const MinPrefix = 8

// Models lists the models of a build: one, or those of a group.
func (b *Build) Models() []Member {
	if len(b.Members) > 0 {
		return b.Members
	}
	return []Member{{ModelName: b.ModelName, ModelDigest: b.ModelDigest, Graph: b.Graph}}
}

// MatchesName reports whether the name means the build: its request key, build key, id or the
// digest of one of its models, the first MinPrefix or more digits of one, or the name or file of
// one of its models.
func (b *Build) MatchesName(name string) bool {
	ids := []string{b.RequestKey.String(), b.BuildKey.String(), b.ID.String()}
	for _, m := range b.Models() {
		if modelname.Matches(m.ModelName, name) {
			return true
		}
		ids = append(ids, m.ModelDigest.String())
	}
	return len(name) >= MinPrefix &&
		slices.ContainsFunc(ids, func(id string) bool { return strings.HasPrefix(id, name) })
}

// nameKey returns the key of a row, or with a shorter value the prefix of rows.
func nameKey(kind byte, value []byte, id []byte) []byte {
	value = value[:min(len(value), nameBytes)]
	return append(append(append(make([]byte, 0, 1+nameBytes+len(BuildID{})), kind), value...),
		id...)
}

func modelNameKey(name string, id []byte) []byte {
	sum := cas.SumBytes([]byte(name))
	return nameKey(nameModel, sum[:], id)
}

// nameRows returns the keys of the build's rows in bucketNames, each once.
func (b *Build) nameRows() [][]byte {
	rows := [][]byte{nameKey(nameBuildKey, b.BuildKey[:], b.ID[:])}
	for _, m := range b.Models() {
		rows = append(rows, nameKey(nameModelDigest, m.ModelDigest[:], b.ID[:]),
			modelNameKey(m.ModelName, b.ID[:]), modelNameKey(path.Base(m.ModelName), b.ID[:]))
	}
	slices.SortFunc(rows, bytes.Compare)
	return slices.CompactFunc(rows, bytes.Equal)
}

// EachNamed calls fn with every build that the name means, see MatchesName, in order of ids and
// then those of layers, and stops at fn's first error, which it returns. No transaction is open
// during fn.
func (x *Index) EachNamed(ctx context.Context, name string, fn func(Build) error) error {
	if err := x.eachNamed(ctx, name, x.prefixesOf(name), fn); err != nil || x.Lower == nil {
		return err
	}
	return x.Lower.Each(func(b Build) error {
		if !b.MatchesName(name) {
			return nil
		}
		return cmp.Or(ctx.Err(), fn(b))
	})
}

// EachOfModel is EachNamed for a model's digest and for its name.
func (x *Index) EachOfModel(ctx context.Context, d cas.Digest, name string,
	fn func(Build) error) error {
	rows := []rowPrefix{{bucketNames, nameKey(nameModelDigest, d[:], nil)}}
	if name != "" {
		rows = append(rows, rowPrefix{bucketNames, modelNameKey(name, nil)})
	}
	return x.eachNamed(ctx, "", rows, fn)
}

// rowPrefix is the prefix of keys of rows, which end with a build id.
type rowPrefix struct{ bucket, prefix []byte }

// prefixesOf lists the rows that builds of a name may have.
func (x *Index) prefixesOf(name string) []rowPrefix {
	rows := []rowPrefix{{bucketNames, modelNameKey(name, nil)}}
	value, err := hex.DecodeString(name[:len(name)&^1]) // the record decides about a half byte
	if err != nil || len(name) < MinPrefix || len(name) > 2*len(RequestKey{}) {
		return rows
	}
	return append(rows, rowPrefix{bucketNames, nameKey(nameBuildKey, value, nil)},
		rowPrefix{bucketNames, nameKey(nameModelDigest, value, nil)},
		rowPrefix{bucketRequests, value}, rowPrefix{bucketBuilds, value})
}

// eachNamed calls fn with the builds of these rows that the name means, or all of them if it is "".
func (x *Index) eachNamed(ctx context.Context, name string, rows []rowPrefix,
	fn func(Build) error) error {
	var ids []BuildID
	for _, r := range rows {
		more, err := x.idsOf(ctx, r.bucket, r.prefix)
		if err != nil {
			return fmt.Errorf("look for a name: %w", err)
		}
		ids = append(ids, more...)
	}
	slices.SortFunc(ids, func(a, b BuildID) int { return bytes.Compare(a[:], b[:]) })
	for _, id := range slices.Compact(ids) {
		if err := ctx.Err(); err != nil {
			return err
		}
		b, err := x.Get(id)
		if errors.Is(err, ErrNotFound) {
			continue // it was just removed
		}
		if err == nil && (name == "" || b.MatchesName(name)) {
			err = fn(b)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
