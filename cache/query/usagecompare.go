package query

import (
	"cmp"
	"context"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/dedupe/match"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

const maxShared = 256

// compareEntries finds what the files of two entries share, by reading them: bytes count wherever they
// stand.
func (q *Queries) compareEntries(ctx context.Context, u *wire.UsageReply, entries []string,
	found []index.Build) error {
	var files [2][]index.File
	for i, entry := range entries {
		seen := make(map[cas.Digest]bool)
		for j := range found {
			if !found[j].Means(entry) {
				continue
			}
			for _, f := range found[j].Blobs() {
				if f.Name == "" {
					f.Name = "source model"
				}
				if !seen[f.Digest] {
					seen[f.Digest] = true
					files[i] = append(files[i], f)
				}
			}
		}
	}
	for _, f := range files[1] {
		if err := q.compareFile(ctx, u, f, files[0]); err != nil {
			return Error(ctx, err)
		}
	}
	slices.SortFunc(u.Shared, func(a, b *wire.SharedBlob) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Digest, b.Digest),
			cmp.Compare(a.FirstName, b.FirstName))
	})
	u.Shared = u.Shared[:min(len(u.Shared), maxShared)]
	return nil
}

func (q *Queries) compareFile(ctx context.Context, u *wire.UsageReply, f index.File,
	with []index.File) error {
	shares := func(with index.File, bytes int64) {
		u.SharedBytes += bytes
		u.Shared = append(u.Shared, &wire.SharedBlob{Digest: f.Digest.String(), Size: f.Size,
			Bytes: bytes, FirstName: wire.Clip(with.Name), SecondName: wire.Clip(f.Name)})
	}
	if i := slices.IndexFunc(with, func(other index.File) bool { return other.Digest == f.Digest }); i >= 0 {
		shares(with[i], f.Size)
		return nil
	}
	target, err := q.forms.Look(f.Digest)
	if err != nil {
		return err
	}
	defer target.Close() // read-only: nothing can be lost
	var candidates []match.Candidate
	for _, other := range with[:min(len(with), dedupe.MaxContainers-1)] {
		s, err := q.forms.Look(other.Digest)
		if err != nil {
			return err
		}
		defer s.Close() // read-only
		candidates = append(candidates, match.Candidate{Digest: other.Digest, Source: s})
	}
	all := func(context.Context, match.Sketch) ([]match.Candidate, error) { return candidates, nil }
	plan, err := match.Find(ctx, target, all)
	if err != nil {
		return err
	}
	bytes := make(map[cas.Digest]int64)
	for _, e := range plan.Extents {
		bytes[plan.Containers[e.Container].Digest] += e.Length
	}
	for _, other := range with {
		if n := bytes[other.Digest]; n > 0 {
			shares(other, n)
		}
	}
	return nil
}
