// Package audit checks a store: the bytes of its blobs, its recipes, leftovers, and its account of
// space against the file system.
package audit

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// checking has the counts and findings of a Check so far.
type checking struct {
	*wire.CheckReply
	damages, leftovers int // found so far
}

type auditor struct {
	st      *store.Store
	index   *index.Index
	cas     *cas.Store
	packing *packing.Store
}

func newAuditor(st *store.Store) *auditor {
	return &auditor{st: st, index: st.Index(), cas: st.Blobs(), packing: st.Packing()}
}

// Check checks the files of every build: with w.Deep by hashing every byte, otherwise by their
// stamps. Each finding says how a repair would handle it. With w.Repair it carries that out.
// progress may be nil.
func Check(ctx context.Context, st *store.Store, w *wire.Check,
	progress func(*wire.Progress)) (*wire.CheckReply, error) {
	a, deep, repair := newAuditor(st), w.Deep, w.Repair
	out := &checking{CheckReply: &wire.CheckReply{}}
	found, err := a.index.Check(ctx, wire.StoreProgress(progress, "checking"))
	if err != nil {
		return nil, checkError(ctx, err)
	}
	rebuild := w.RebuildIndex
	for _, f := range found {
		action, again, err := a.index.Repair(f, !repair)
		rebuild = rebuild || again
		out.found(&wire.Finding{Kind: f.Kind, Object: f.Object, Detail: f.Detail,
			Action: outcome(action, err)})
	}
	space, err := a.index.Space()
	if err != nil {
		return nil, checkError(ctx, err)
	}
	out.Builds = space.Builds
	a.packing.Recipes.RetryUnread()
	for _, p := range a.packing.Recipes.Problems() {
		f := RecipeFinding(p)
		// otherwise checking the blob finds it
		if d, err := cas.ParseDigest(filepath.Base(p.Path)); p.Unread && err == nil {
			if f.Action = "quarantine it"; repair && a.cas.Has(d) {
				f.Action = outcome(f.Action, a.st.QuarantineRecipe(d, p.Detail))
			}
		}
		out.found(f)
	}
	one := func(d cas.Digest, size int64) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		out.Blobs++
		out.Bytes += size
		if progress != nil && (deep || out.Blobs%wire.StoreProgressEvery == 0) {
			progress(&wire.Progress{Phase: "checking files",
				DoneBytes: min(out.Bytes, space.UniqueBytes), TotalBytes: space.UniqueBytes})
		}
		if f := a.checkBlob(ctx, d, size, deep); f != nil {
			f.Action = a.remedy(d, f.Kind)
			if repair {
				f.Action = outcome(f.Action, a.st.Repair(ctx, d, f.Detail))
			}
			out.found(f)
		}
		return nil
	}
	var last cas.Digest
	err = a.index.EachNeed(ctx, cas.Digest{}, func(n index.Need) error {
		if n.Blob == last {
			return nil
		}
		last = n.Blob
		return one(n.Blob, n.Size)
	})
	if err != nil {
		return nil, checkError(ctx, err)
	}
	if deep {
		if err := a.checkLayers(ctx, out, repair); err != nil {
			return nil, checkError(ctx, err)
		}
	}
	bases, err := a.checkRecipes(ctx, out)
	for d, size := range bases {
		if err == nil {
			err = one(d, size)
		}
	}
	if err == nil {
		err = a.checkLeftovers(ctx, bases, out, progress)
	}
	if err != nil {
		return nil, checkError(ctx, err)
	}
	out.Findings = slices.DeleteFunc(out.Findings, a.wasBeingRemoved)
	if repair && a.packing.Recipes.Complete() {
		// also those that were kept because some recipes were unreadable
		err = a.st.RemoveLeftovers(ctx)
	}
	if rebuild && err == nil {
		f := &wire.Finding{Kind: index.RebuildKind, Object: "index.db", Action: "rebuild it from " +
			"the manifests and the journal"}
		if repair {
			f.Action = outcome(f.Action, a.st.RebuildIndex("for a repair"))
		}
		out.found(f)
	}
	if err != nil {
		return nil, checkError(ctx, err)
	}
	out.truncate(wire.MaxReply)
	return out.CheckReply, nil
}

// outcome returns the action, or why it failed.
func outcome(action string, err error) string {
	if err != nil {
		return "failed: " + err.Error()
	}
	return action
}

// remedy says how a repair handles a damaged or missing blob.
func (a *auditor) remedy(d cas.Digest, kind string) string {
	all, err := a.st.Needs(d)
	if err != nil {
		return "failed: " + err.Error()
	}
	var now, later int // number of builds that are recompiled at once, and on their next request
	none := "none: its builds are withheld until a request recompiles them"
	for _, one := range all {
		b, err := a.index.Get(one.Build)
		switch {
		case err != nil || !b.HasModel(one.Blob):
		case a.index.Journal.StateOf(b.ID).Name == index.Damaged:
			if b.Source.Kind != "" {
				none = "none: its builds are being recompiled"
			}
		case b.Source.Kind != "":
			now++
		default:
			later++
		}
	}
	var do []string
	if kind != kindMissing {
		do = append(do, "quarantine it")
	}
	if now > 0 {
		do = append(do, fmt.Sprintf("withhold and recompile builds: %d", now))
	}
	if later > 0 {
		do = append(do, fmt.Sprintf("withhold builds until a request recompiles them: %d", later))
	}
	if do == nil {
		return none
	}
	return strings.Join(do, "; ")
}

// wasBeingRemoved reports whether a finding is a leftover only because its build was being removed.
func (a *auditor) wasBeingRemoved(f *wire.Finding) bool {
	if f.Kind != kindLeftover {
		return false
	}
	d, err := cas.ParseDigest(f.Object)
	if err != nil {
		return false // not about a blob
	}
	_, packed := a.packing.Recipes.Has(d)
	return !packed && !a.cas.Has(d)
}

// maxKeptFindings bounds the reported findings of damage and of leftovers, because a disk may have
// lost all files.
const maxKeptFindings = 4096

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

// truncate keeps the findings that fit into limit bytes. It drops leftovers before damage.
func (r *checking) truncate(limit int) {
	slices.SortStableFunc(r.Findings, func(a, b *wire.Finding) int {
		return leftover(a) - leftover(b)
	})
	left := wire.SpaceLeft(limit)
	for i, f := range r.Findings {
		if f.Detail = wire.Clip(f.Detail); !left.Reserve(f) {
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

// Kinds of findings that must be checked again, because the store may have changed during the
// check.
const (
	kindLeftover = "leftover"
	kindMissing  = "missing"
)

const remedyRemove = "remove it"

// checkRecipes returns the bases that only recipes need, with their sizes.
func (a *auditor) checkRecipes(ctx context.Context, out *checking) (map[cas.Digest]int64, error) {
	bases := make(map[cas.Digest]int64)
	err := a.packing.Recipes.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		_, needed, err := a.index.DiskBytes(d)
		if err != nil {
			return err
		}
		if !needed {
			out.found(&wire.Finding{Kind: kindLeftover, Object: d.String(),
				Detail: "a recipe that no build needs", Action: remedyRemove})
			return nil
		}
		for _, base := range p.Bases {
			if _, needed, err = a.index.DiskBytes(base.Digest); err != nil {
				return err
			}
			if !needed {
				bases[base.Digest] = base.Size
			}
		}
		return nil
	})
	return bases, err
}

// checkLeftovers finds the blobs that no build or recipe needs.
func (a *auditor) checkLeftovers(ctx context.Context, bases map[cas.Digest]int64,
	out *checking,
	progress func(*wire.Progress)) error {
	seen := uint64(0)
	var needed map[cas.Digest]int64 // blobs with the same first byte, because the walk is in order
	first := -1
	return a.cas.Walk(ctx, func(d cas.Digest, size, _ int64) (err error) {
		if seen++; seen%wire.StoreProgressEvery == 0 {
			wire.ReportStoreProgress(progress, "looking for leftovers", "files", seen, 0)
		}
		if int(d[0]) != first {
			if needed, err = a.index.NeededIn(ctx, d[0]); err != nil {
				return err
			}
			first = int(d[0])
		}
		_, isNeeded := needed[d]
		if _, isBase := bases[d]; isNeeded || isBase {
			return nil
		}
		ids, err := a.index.Needs(d)
		if err != nil || len(ids) > 0 || len(a.packing.Recipes.Users(d)) > 0 {
			return err // published or packed in the meantime
		}
		out.found(&wire.Finding{Kind: kindLeftover, Object: d.String(),
			Detail: bytesize.Text(size) + " that no build needs", Action: remedyRemove})
		return nil
	})
}

func checkError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return apierr.FromContext(ctx, "check")
	}
	return apierr.New(apierr.Internal, err, "check")
}

// checkBlob returns the finding about one blob, nil if it is intact.
func (a *auditor) checkBlob(ctx context.Context, d cas.Digest, size int64,
	deep bool) *wire.Finding {
	f := a.checkBlobOnce(ctx, d, size, deep)
	if f == nil {
		return nil
	}
	// Check again under the lock, because it may have been packed or removed at that moment.
	leave, err := a.packing.LockRepresentation(ctx)
	if err != nil {
		return nil // the context has ended, and with it the check
	}
	f = a.checkBlobOnce(ctx, d, size, deep)
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
		case b.HasModel(one.Blob):
			f.Builds = append(f.Builds, b.BuildKey.String())
		default:
			f.Detail += fmt.Sprintf("; it belongs to the copy of source model %q", b.ModelName)
		}
	}
	return f
}

// checkLayers hashes the files of layers. Without --deep they are hashed before they are served. A
// repair lets builds be served again that are intact now.
func (a *auditor) checkLayers(ctx context.Context, out *checking, repair bool) error {
	return a.st.Layers.Each(func(b index.Build) error {
		err := a.st.Layers.Hash(ctx, &b)
		out.Builds, out.Blobs = out.Builds+1, out.Blobs+uint64(len(b.Files))
		for _, f := range b.Files {
			out.Bytes += f.Size
		}
		damaged := a.index.Journal.StateOf(b.ID).Name == index.Damaged
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			f := &wire.Finding{Kind: "damaged", Object: views.LayerDir(b.Layer, &b),
				Detail: err.Error(),
				Builds: []string{b.BuildKey.String()}, Action: "withhold the build"}
			if repair {
				a.st.WithholdDamaged(ctx, &b, err)
			}
			out.found(f)
		case repair && damaged:
			return a.st.Withhold(b.ID, index.Current, "its files in layer "+b.Layer+" are sound")
		}
		return nil
	})
}

// checkBlobOnce is checkBlob without the second check and without listing the builds that need the
// blob.
func (a *auditor) checkBlobOnce(ctx context.Context, d cas.Digest, size int64,
	deep bool) *wire.Finding {
	f := &wire.Finding{Object: d.String()}
	have, err := a.packing.Size(d)
	switch {
	case errors.Is(err, cas.ErrNotFound):
		f.Kind, f.Detail = kindMissing, "the blob is missing"
	case err != nil:
		f.Kind, f.Detail = "damaged", err.Error()
	case have != size:
		f.Kind, f.Detail = "damaged", fmt.Sprintf("%d bytes long, not %d", have, size)
	case deep:
		err = a.packing.Check(ctx, d)
		a.packing.Copies.Check(ctx, d)
	default:
		err = a.packing.Verify(ctx, d) // hashes only if the stamp has changed
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

// unneeded reports whether neither a build nor a recipe needs a blob.
func (a *auditor) unneeded(d cas.Digest) bool {
	ids, err := a.index.Needs(d)
	return err == nil && len(ids) == 0 && len(a.packing.Recipes.Users(d)) == 0
}

// maxNeeding bounds the listed builds that need a blob.
const maxNeeding = 64

// RecipeFinding reports a recipe that could not be read.
func RecipeFinding(p dedupe.Problem) *wire.Finding {
	switch {
	case p.Newer:
		return &wire.Finding{Kind: "newer", Object: p.Path, Detail: p.Detail}
	case p.Foreign:
		return &wire.Finding{Kind: "foreign", Object: p.Path, Detail: p.Detail}
	case p.Unread:
		return &wire.Finding{Kind: "damaged", Object: p.Path,
			Detail: "it cannot be read: " + p.Detail}
	}
	return &wire.Finding{Kind: "damaged", Object: p.Path,
		Detail: p.Detail + "; it is in quarantine", Action: index.NothingToDo}
}

// The kinds of files. A file with several links is counted for the first of its kinds. Views have
// links to objects; files that only a view has belong to removed builds.
const (
	kindObjects    = "objects"
	kindRecipes    = "recipes"
	kindUnpacked   = "unpacked"
	kindManifests  = "manifests"
	kindViews      = "views"
	kindUnkept     = "unkept"
	kindStaging    = "staging"
	kindQuarantine = "quarantine"
	kindIndex      = "index"
	kindJournal    = "journal"
	kindReserve    = "reserve"
	kindOthers     = "others"
	kindDirs       = "folders"
)

var spaceKinds = []string{kindObjects, kindRecipes, kindUnpacked, kindManifests, kindQuarantine,
	kindViews, kindUnkept, kindStaging, kindIndex, kindJournal, kindReserve, kindOthers, kindDirs}

// kindOf returns the kind of a path below the state directory.
func kindOf(rel string) string {
	top, rest, _ := strings.Cut(rel, "/")
	switch {
	case (top == "objects" || top == "manifests") && strings.HasPrefix(rest, "incoming"),
		(top == "recipes" || top == "unpacked") && strings.Contains("/"+rest, "/incoming"):
		return kindStaging
	case top == "views" && strings.HasPrefix(rest+"/", views.Unkept+"/"):
		return kindUnkept
	case slices.Contains(dirsWithKinds, top):
		return top
	case strings.HasPrefix(top, "index.db"):
		return kindIndex
	case strings.HasPrefix(top, "journal"):
		return kindJournal
	case rel == kindReserve:
		return kindReserve
	}
	return kindOthers
}

// Space compares the account of space with the file system, to the block, and reports the
// differences. It checks files again that change in the meantime. progress may be nil.
func Space(ctx context.Context, st *store.Store,
	progress func(*wire.Progress)) (*wire.CheckReply, error) {
	a := newAuditor(st)
	out, lines := &wire.CheckReply{}, make(map[string]*wire.SpaceLine)
	for _, name := range spaceKinds {
		lines[name] = &wire.SpaceLine{Name: name}
		out.Space = append(out.Space, lines[name])
	}
	seen := make(map[store.FileID]bool)
	var blobs []cas.Digest
	looked := uint64(0)
	for _, name := range spaceKinds { // objects first, because each file is counted once
		err := a.eachFile(ctx, name, func(path string, dir bool) {
			if looked++; looked%wire.StoreProgressEvery == 0 {
				wire.ReportStoreProgress(progress, "measuring files", "files", looked, 0)
			}
			line := lines[name]
			if dir {
				line = lines[kindDirs]
			}
			id, names, disk, ok := store.FileOnDisk(path)
			if !ok || names > 1 && seen[id] {
				return // it was just removed, or was counted
			}
			if names > 1 {
				seen[id] = true
			}
			line.Files++
			line.DiskBytes += disk
			if d, err := cas.ParseDigest(filepath.Base(path)); err == nil &&
				name == kindObjects && !dir {
				blobs = append(blobs, d)
			}
		})
		if err != nil {
			return nil, checkError(ctx, err)
		}
	}
	now, err := a.index.Space()
	if err != nil {
		return nil, checkError(ctx, err)
	}
	packed, err := a.packing.Space(true)
	if err != nil {
		return nil, checkError(ctx, err)
	}
	for name, accounted := range map[string]int64{kindObjects: now.DiskBytes + packed.Bases,
		kindManifests: now.ManifestBytes, kindViews: a.st.Views().UnlinkedOpenBytes(),
		kindRecipes: packed.Recipes, kindUnpacked: packed.Copies} {
		lines[name].AccountedBytes = &accounted
	}
	out.Findings, err = a.misaccounted(ctx, blobs, progress)
	if err != nil {
		return nil, checkError(ctx, err)
	}
	return out, nil
}

func (a *auditor) eachFile(ctx context.Context, kind string, fn func(path string, dir bool)) error {
	roots := []string{kind}
	switch kind {
	case kindDirs:
		return nil // counted with their entries
	case kindUnkept:
		roots = []string{"views/" + views.Unkept}
	case kindStaging:
		roots = []string{"staging", "objects/incoming", "manifests/incoming", "recipes/incoming",
			"unpacked/objects/incoming"}
	case kindIndex, kindJournal, kindReserve, kindOthers:
		roots = []string{"."}
	}
	for _, root := range roots {
		err := filepath.WalkDir(filepath.Join(a.st.Directory(), root),
			func(path string, d fs.DirEntry, err error) error {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				rel, relErr := filepath.Rel(a.st.Directory(), path)
				if err != nil || relErr != nil {
					return nil // it was just removed
				}
				is := kindOf(filepath.ToSlash(rel))
				top := rel == "." && kind == kindOthers
				if d.IsDir() && rel != "." && (is != kind && kind != kindOthers || root == "." &&
					slices.Contains(dirsWithKinds, rel)) {
					return fs.SkipDir
				}
				if is == kind || top {
					fn(path, d.IsDir())
				}
				return nil
			})
		if err != nil {
			return err
		}
	}
	return nil
}

// dirsWithKinds are the directories with the same name as their kind.
var dirsWithKinds = []string{"objects", "recipes", "unpacked", "manifests", "views", "staging",
	"quarantine"}

// maxSpaceFindings bounds the reported differences; the lines have the sums.
const maxSpaceFindings = 1000

// misaccounted lists the blobs that the account lacks or has with another size.
func (a *auditor) misaccounted(ctx context.Context, blobs []cas.Digest,
	progress func(*wire.Progress)) ([]*wire.Finding, error) {
	var out []*wire.Finding
	for i, d := range blobs {
		if i%wire.StoreProgressEvery == 0 {
			wire.ReportStoreProgress(progress, "comparing files", "files", uint64(i),
				uint64(len(blobs)))
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		for again := false; ; again = true {
			accounted, known, err := a.index.DiskBytes(d)
			if err != nil {
				return nil, err
			}
			disk, err := cas.DiskBytesIn(a.st.Directory(), d)
			if err != nil || known && disk == accounted {
				break // it was just removed, or is correct
			}
			if !again {
				continue // it may be being published or removed at this moment
			}
			detail := fmt.Sprintf("accounted with %d bytes on disk, and takes %d", accounted, disk)
			if !known && len(a.packing.Recipes.Users(d)) > 0 {
				break // a base
			}
			if !known {
				detail = fmt.Sprintf(
					"%d bytes on disk that no build needs; the next start removes them", disk)
			}
			out = append(out, &wire.Finding{Kind: "space", Object: d.String(), Detail: detail})
			if len(out) == maxSpaceFindings {
				return out, nil
			}
			break
		}
	}
	return out, nil
}
