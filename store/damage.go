package store

import (
	"context"
	"errors"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
)

// WithholdDamaged withholds a build that failed its check, quarantines its damaged blobs, and
// returns the reason.
func (st *Store) WithholdDamaged(ctx context.Context, b *index.Build, cause error) string {
	if b.Layer != "" {
		why, damaged := st.Layers.WhyNot(b, cause)
		if damaged && st.index.Journal.StateOf(b.ID).Name == index.Current {
			st.log.Warn("build of a layer withheld", "build", b.BuildKey.String(), "why", why)
			st.Withhold(b.ID, index.Damaged, why)
		}
		return why
	}
	var found []packing.Damage
	// The cause may also be an error of the view's directories, which does not concern the build.
	if packing.IsMissingOrDamaged(cause) {
		found = st.damagedBlobs(ctx, b)
	}
	if len(found) == 0 && (!errors.Is(cause, cas.ErrNotFound) || st.nothingMissing(ctx, b)) {
		st.log.Error("build cannot be served", "build", b.BuildKey.String(), "error", cause)
		return "the build cannot be served: " + cause.Error()
	}
	reason := cause.Error()
	st.log.Warn("build withheld", "build", b.BuildKey.String(), "why", reason)
	_ = st.QuarantineAll(found)
	if st.index.Journal.StateOf(b.ID).Name == index.Current {
		st.Withhold(b.ID, index.Damaged, reason)
	}
	return "the stored build was damaged: " + reason
}

// nothingMissing reports whether all files exist after all, because only a copy was removed while a
// view was made.
func (st *Store) nothingMissing(ctx context.Context, b *index.Build) bool {
	return !slices.ContainsFunc(b.Files, func(f index.File) bool {
		return st.packing.Verify(ctx, f.Digest) != nil
	})
}

// damagedBlobs lists the damaged parts of a build. It does not hash blobs that were just verified.
func (st *Store) damagedBlobs(ctx context.Context, b *index.Build) (out []packing.Damage) {
	for _, f := range b.Files {
		for _, one := range st.packing.DamageOf(ctx, f.Digest) {
			if !slices.ContainsFunc(out, func(d packing.Damage) bool {
				return d.Digest == one.Digest && d.Recipe == one.Recipe
			}) {
				out = append(out, one)
			}
		}
	}
	return out
}

// QuarantineAll moves damaged blobs and recipes into the quarantine, and withholds the builds that
// need them. Its error says which files could not be moved.
func (st *Store) QuarantineAll(all []packing.Damage) (err error) {
	for _, one := range all {
		if one.Recipe {
			err = errors.Join(err, st.QuarantineRecipe(one.Digest, one.Why))
		} else {
			err = errors.Join(err, st.quarantine(one.Digest, one.Why))
		}
	}
	return err
}

// Withhold sets a state in which the build is not served, and drops its view, because a repaired
// build gets a new view. If the state cannot be stored, the error is logged and returned, and the
// build is withheld until the daemon ends.
func (st *Store) Withhold(id index.BuildID, state, reason string) error {
	failed := st.committer.mark(context.Background(), nil,
		&index.Mark{ID: id, State: &index.State{Name: state, Reason: reason, At: st.now()}})
	if failed != nil {
		st.log.Error("cannot record the state of a build", "build", id.String(), "error", failed)
	}
	st.views.DropCurrent(id, views.PathGrace)
	b, err := st.index.Get(id)
	if err != nil {
		return nil // removed in the meantime, so no event
	}
	st.RecordEvent(eventOf(&b, state, "%s", reason))
	st.options.OnWithheld(&b)
	return failed
}

// Repair moves the damaged parts of a blob into the quarantine. If the blob is only missing, it
// withholds the builds that need it. It logs and returns an error for files that could not be
// moved.
func (st *Store) Repair(ctx context.Context, d cas.Digest, why string) error {
	found := st.packing.DamageOf(ctx, d)
	if len(found) == 0 {
		return st.quarantine(d, why)
	}
	return st.QuarantineAll(found)
}

// quarantine moves a damaged blob into the quarantine, and withholds every build that needs it for
// its own files. A build is still served if only its kept source model is damaged.
func (st *Store) quarantine(d cas.Digest, why string) error {
	failed := st.logNotQuarantined(d, st.cas.Quarantine(d, why))
	if err := st.index.Remeasure(d); err != nil {
		st.log.Warn("cannot account for the space of a damaged "+
			"blob", "digest", d.String(), "error", err)
	}
	st.withholdNeeding(d, why)
	return failed
}

// QuarantineRecipe is quarantine for the recipe of a packed blob.
func (st *Store) QuarantineRecipe(d cas.Digest, why string) error {
	failed := st.logNotQuarantined(d, st.packing.QuarantineRecipe(d, why))
	if !st.cas.Has(d) {
		st.withholdNeeding(d, why)
	}
	return failed
}

// logNotQuarantined logs why a blob or recipe was not moved to the quarantine, unless it does not
// exist any more.
func (st *Store) logNotQuarantined(d cas.Digest, err error) error {
	if err == nil || errors.Is(err, cas.ErrNotFound) {
		return nil
	}
	st.log.Error("cannot quarantine a damaged blob", "digest", d.String(), "error", err)
	return err
}

func (st *Store) withholdNeeding(d cas.Digest, why string) {
	all, err := st.Needs(d)
	if err != nil {
		st.log.Error("cannot find the builds of a damaged blob", "digest", d.String(), "error", err)
	}
	for _, one := range all {
		b, err := st.index.Get(one.Build)
		if err == nil && b.HasModel(one.Blob) &&
			st.index.Journal.StateOf(b.ID).Name != index.Damaged {
			st.Withhold(one.Build, index.Damaged, why)
		}
	}
}
