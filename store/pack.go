package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
)

// What the collector may call: packBuild, packSaving and dropUnpacked. All of them look themselves
// whether they may: a build that is held, or was given out within the grace, is left alone, and so is a blob that other builds of
// that kind need. None may be called with a lock of the views held.

// packBuild packs what it can of a build, also where that frees little, and tells how many bytes on disk that freed: its views go, as far as nobody holds them, and
// blobs that share enough with others are replaced by recipes. What is not worth packing stays as it is, and is no error. An error
// that is forms.ErrInUse says that the build is held; nothing was done then. It takes as long as reading the blobs and what they
// share, a few times; ctx ends it between two steps, and leaves each blob in a form that serves it.
func (st *Store) PackBuild(ctx context.Context, id index.BuildID) (freed int64, err error) {
	return st.packBlobs(ctx, id, func(d cas.Digest) (int64, error) { return st.forms.Pack(ctx, d, packing.Little, nil) })
}

// packBuildWith is packBuild of only those blobs for which it is worth it though they may be asked for soon, from which nobody takes, and whose builds
// are all cold in the sense of when; gate is asked before each piece that is read.
func (st *Store) PackBuildWith(ctx context.Context, id index.BuildID, when Packing, gate packing.Gate) (freed int64, err error) {
	return st.packBlobs(ctx, id, func(d cas.Digest) (int64, error) {
		if ok, err := st.allCold(d, when); !ok || err != nil || len(st.forms.Recipes.Users(d)) > 0 {
			return 0, err
		}
		return st.forms.Pack(ctx, d, packing.Worth, gate)
	})
}

func (st *Store) packBlobs(ctx context.Context, id index.BuildID, pack func(cas.Digest) (int64, error)) (freed int64, err error) {
	b, err := st.index.Get(id)
	if err != nil {
		return 0, err
	}
	if why := st.Busy(&b); why != "" {
		return 0, fmt.Errorf("build %s: %w: %s", b.BuildKey, packing.ErrInUse, why)
	}
	for d := range DistinctBlobs(&b) {
		one, err := pack(d)
		freed += one
		if err != nil && !errors.Is(err, packing.ErrInUse) {
			return freed, fmt.Errorf("pack build %s: %w", b.BuildKey, err)
		}
	}
	return freed, nil
}

// packSaving tells how many bytes on disk packBuild would free of the build, as far as has been found out: 0 where nothing is known
// yet, nothing is worth packing, or the build is packed. It reads no blob.
func (st *Store) PackSaving(id index.BuildID) int64 {
	b, err := st.index.Get(id)
	if err != nil {
		return 0
	}
	sum := int64(0)
	for d := range DistinctBlobs(&b) {
		sum += st.forms.Sharing.Saving(d)
	}
	return sum
}

// dropUnpacked removes the unpacked forms of a build that nobody holds, with its view, and tells how many bytes on disk that freed. The
// next request for the build unpacks it again.
func (st *Store) DropCopies(id index.BuildID) (freed int64, err error) {
	b, err := st.index.Get(id)
	if err != nil {
		return 0, err
	}
	for d := range DistinctBlobs(&b) {
		_, _, disk := st.forms.Bytes(d)
		if disk == 0 {
			continue
		}
		if err := st.forms.DropCopy(d); err != nil {
			return freed, fmt.Errorf("build %s: %w", b.BuildKey, err)
		}
		freed += disk
	}
	return freed, nil
}

// busy says why a build's view may not be taken away, "" if it may.
func (st *Store) Busy(b *index.Build) string {
	v, done := st.views.LookAt(b)
	if v == nil {
		return ""
	}
	defer done()
	if held, err := v.Held(); held || err != nil {
		return KeptInUse // one that cannot be looked at is left alone
	}
	if until := v.ToldUntil(); st.now().Before(until) {
		until = until.Add(time.Second - 1) // a whole second, by which it is over
		return "it was given out lately, perhaps by path: it stays until " + until.UTC().Format(time.RFC3339)
	}
	return ""
}

// dropViews takes away the views of all builds that have the blob among their files: as long as one is there the blob's bytes are.
// It does nothing if somebody has one of them.
func (st *Store) dropViews(d cas.Digest) error {
	ids, err := st.index.Needs(d)
	if err != nil {
		return err
	}
	var builds []index.Build
	for _, id := range ids {
		b, err := st.index.Get(id)
		if err != nil {
			continue // retracted meanwhile
		}
		if why := st.Busy(&b); why != "" {
			return fmt.Errorf("%w: %s", packing.ErrInUse, why)
		}
		builds = append(builds, b)
	}
	for i := range builds {
		if v := st.views.Of(&builds[i]); v != nil {
			st.views.Drop(builds[i].ID, v, 0)
		}
	}
	st.views.Sweep()
	return nil
}
