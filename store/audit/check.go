package audit

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// checking is what Check has looked at, and what it has found.
type checking struct {
	*wire.CheckReply
	damages, leftovers int // found so far
}

// auditor looks at one store.
type auditor struct {
	st    *store.Store
	index *index.Index
	cas   *cas.Store
	forms *packing.Store
}

func newAuditor(st *store.Store) *auditor {
	return &auditor{st: st, index: st.Index(), cas: st.Blobs(), forms: st.Forms()}
}

// Check looks at the files of every build: with w.Deep by hashing every byte, else by their stamps.
// With w.Repair, damaged files are moved into the quarantine and their builds are withheld; the
// next request compiles them again. progress may be nil.
func Check(ctx context.Context, st *store.Store, w *wire.Check, progress func(*wire.Progress)) (*wire.CheckReply, error) {
	a, deep, repair := newAuditor(st), w.Deep, w.Repair
	out := &checking{CheckReply: &wire.CheckReply{}}
	found, err := a.index.Check(ctx, wire.FarThrough(progress, "checking"))
	if err != nil {
		return nil, checkError(ctx, err)
	}
	for _, f := range found {
		out.found(&wire.Finding{Kind: f.Kind, Object: f.Object, Detail: f.Detail})
	}
	space, err := a.index.Space()
	if err != nil {
		return nil, checkError(ctx, err)
	}
	out.Builds = space.Builds
	known := a.forms.Recipes.Complete()
	a.forms.Recipes.ReadAgain()
	for _, p := range a.forms.Recipes.Problems() {
		out.found(RecipeFinding(p))
		if d, err := cas.ParseDigest(filepath.Base(p.Path)); repair && p.Unread && err == nil && a.cas.Has(d) { // else it is found where the blob is looked at
			a.st.QuarantineRecipe(d, p.Detail)
		}
	}
	one := func(d cas.Digest, size int64) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		out.Blobs++
		out.Bytes += size
		if progress != nil && (deep || out.Blobs%wire.FarAfter == 0) {
			progress(&wire.Progress{Phase: "checking files", DoneBytes: min(out.Bytes, space.UniqueBytes), TotalBytes: space.UniqueBytes})
		}
		if f := a.checkBlob(ctx, d, size, deep); f != nil {
			out.found(f)
			if repair {
				a.st.Repair(ctx, d, f.Detail)
			}
		}
		return nil
	}
	var last cas.Digest
	err = a.index.EachNeed(ctx, func(n index.Need) error {
		if n.Blob == last {
			return nil
		}
		last = n.Blob
		return one(n.Blob, n.Size)
	})
	if err != nil {
		return nil, checkError(ctx, err)
	}
	containers, err := a.checkRecipes(ctx, out)
	for d, size := range containers {
		if err == nil {
			err = one(d, size)
		}
	}
	if err == nil {
		err = a.checkLeftovers(ctx, containers, out, progress)
	}
	if err == nil && repair && !known && a.forms.Recipes.Complete() {
		err = a.st.RemoveLeftovers(ctx) // what had to stay as long as nobody knew what recipes need
	}
	if err != nil {
		return nil, checkError(ctx, err)
	}
	out.Findings = slices.DeleteFunc(out.Findings, a.hasGone)
	out.cut(wire.MaxReply)
	return out.CheckReply, nil
}

// hasGone tells of a leftover that it was one only for as long as its build was being removed.
func (a *auditor) hasGone(f *wire.Finding) bool {
	if f.Kind != kindLeftover {
		return false
	}
	d, err := cas.ParseDigest(f.Object)
	if err != nil {
		return false // not of a blob
	}
	_, packed := a.forms.Recipes.Has(d)
	return !packed && !a.cas.Has(d)
}

// maxKeptFindings bounds the findings that are told, damage and leftovers each: a disk may have lost everything.
const maxKeptFindings = 4096

// found notes a finding.
func (r *checking) found(f *wire.Finding) {
	n := &r.damages
	if f.Kind == kindLeftover {
		n = &r.leftovers
	}
	if *n++; *n > maxKeptFindings {
		r.More++
		return
	}
	r.Findings = append(r.Findings, f)
}

// cut keeps the findings that fit into so many bytes, leftovers last: what is cut off must not be
// the damage.
func (r *checking) cut(limit int) {
	slices.SortStableFunc(r.Findings, func(a, b *wire.Finding) int {
		return leftover(a) - leftover(b)
	})
	left := wire.Left(limit)
	for i, f := range r.Findings {
		if f.Detail = wire.Clip(f.Detail); !left.Takes(f) {
			r.More += uint64(len(r.Findings) - i)
			r.Findings = r.Findings[:i]
			break
		}
	}
}

func leftover(f *wire.Finding) int {
	if f.Kind == kindLeftover {
		return 1
	}
	return 0
}

// The kinds of findings that are made differently, or not at all, where the store changes while it is checked.
const (
	kindLeftover = "leftover"
	kindMissing  = "missing"
)

// checkRecipes gives the containers that only recipes need, with their sizes.
func (a *auditor) checkRecipes(ctx context.Context, out *checking) (map[cas.Digest]int64, error) {
	containers := make(map[cas.Digest]int64)
	err := a.forms.Recipes.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		_, needed, err := a.index.DiskBytes(d)
		if err != nil {
			return err
		}
		if !needed {
			out.found(&wire.Finding{Kind: kindLeftover, Object: d.String(),
				Detail: "a recipe that no build needs"})
			return nil
		}
		for _, container := range p.Containers {
			if _, needed, err = a.index.DiskBytes(container.Digest); err != nil {
				return err
			}
			if !needed {
				containers[container.Digest] = container.Size
			}
		}
		return nil
	})
	return containers, err
}

// checkLeftovers finds the blobs that nothing needs.
func (a *auditor) checkLeftovers(ctx context.Context, containers map[cas.Digest]int64, out *checking,
	progress func(*wire.Progress)) error {
	seen := uint64(0)
	var needed map[cas.Digest]int64 // of those that begin with the same byte: they come in order
	first := -1
	return a.cas.Walk(ctx, func(d cas.Digest, size, _ int64) (err error) {
		if seen++; seen%wire.FarAfter == 0 {
			wire.Far(progress, "looking for leftovers", "files", seen, 0)
		}
		if int(d[0]) != first {
			if needed, err = a.index.NeededIn(ctx, d[0]); err != nil {
				return err
			}
			first = int(d[0])
		}
		if _, ok := needed[d]; ok {
			return nil
		}
		if _, ok := containers[d]; ok {
			return nil
		}
		ids, err := a.index.Needs(d)
		if err != nil || len(ids) > 0 || len(a.forms.Recipes.Users(d)) > 0 {
			return err // published, or packed, meanwhile
		}
		out.found(&wire.Finding{Kind: kindLeftover, Object: d.String(),
			Detail: bytesize.Text(size) + " that no build needs"})
		return nil
	})
}

func checkError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return apierr.New(apierr.Cancelled, ctx.Err(), "check")
	}
	return apierr.New(apierr.Internal, err, "check")
}

// checkBlob gives what is wrong with one blob, nil if nothing is.
func (a *auditor) checkBlob(ctx context.Context, d cas.Digest, size int64, deep bool) *wire.Finding {
	f := a.lookAtBlob(ctx, d, size, deep)
	if f == nil {
		return nil
	}
	// It may have been taking another form just then, or have gone together with what needed it.
	leave, err := a.forms.TakeTurn(ctx)
	if err != nil {
		return nil // the check ends with the context
	}
	f = a.lookAtBlob(ctx, d, size, deep)
	leave()
	if f == nil || f.Kind == kindMissing && a.unneeded(d) {
		return nil
	}
	all, err := a.st.Needs(d)
	if err != nil {
		return f
	}
	for _, one := range all {
		b, err := a.index.Get(one.Build)
		switch {
		case err != nil:
		case len(f.Builds) == maxNeeding:
			f.Detail += fmt.Sprintf("; %d builds need it", len(all))
			return f
		case b.Serves(one.Blob):
			f.Builds = append(f.Builds, b.BuildKey.String())
		default:
			f.Detail += fmt.Sprintf("; it is of the copy of source model %q", b.ModelName)
		}
	}
	return f
}

// lookAtBlob is checkBlob for a store in which nothing changes meanwhile; it does not tell who needs the blob.
func (a *auditor) lookAtBlob(ctx context.Context, d cas.Digest, size int64, deep bool) *wire.Finding {
	f := &wire.Finding{Object: d.String()}
	have, err := a.forms.Size(d)
	switch {
	case errors.Is(err, cas.ErrNotFound):
		f.Kind, f.Detail = kindMissing, "the blob is not there"
	case err != nil:
		f.Kind, f.Detail = "damaged", err.Error()
	case have != size:
		f.Kind, f.Detail = "damaged", fmt.Sprintf("%d bytes long, not %d", have, size)
	case deep:
		err = a.forms.Check(ctx, d)
		a.forms.Copies.Check(ctx, d)
	default:
		err = a.forms.Verify(ctx, d) // hashes only where the stamp does not hold
	}
	if f.Kind == "" {
		if err == nil || ctx.Err() != nil {
			return nil
		}
		f.Kind, f.Detail = "damaged", err.Error()
		if errors.Is(err, cas.ErrNotFound) {
			f.Kind = kindMissing
		}
	}
	return f
}

// unneeded tells that neither a build nor a recipe needs a blob.
func (a *auditor) unneeded(d cas.Digest) bool {
	ids, err := a.index.Needs(d)
	return err == nil && len(ids) == 0 && len(a.forms.Recipes.Users(d)) == 0
}

// maxNeeding bounds the builds that are named which need a blob.
const maxNeeding = 64

// RecipeFinding tells of a recipe that could not be read.
func RecipeFinding(p dedupe.Problem) *wire.Finding {
	switch {
	case p.Newer:
		return &wire.Finding{Kind: "newer", Object: p.Path, Detail: p.Detail}
	case p.Unread:
		return &wire.Finding{Kind: "damaged", Object: p.Path,
			Detail: "it cannot be read: " + p.Detail}
	}
	return &wire.Finding{Kind: "damaged", Object: p.Path,
		Detail: p.Detail + "; it is in the quarantine"}
}
