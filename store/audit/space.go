package audit

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// The kinds, in the order in which a file with several names is counted. Views hold further names
// of objects; what they have for themselves is of removed builds.
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
	kindFolders    = "folders"
)

var spaceKinds = []string{kindObjects, kindRecipes, kindUnpacked, kindManifests, kindViews, kindUnkept, kindStaging, kindQuarantine, kindIndex, kindJournal, kindReserve, kindOthers, kindFolders}

// kindOf says what a path below the state folder is.
func kindOf(rel string) string {
	top, rest, _ := strings.Cut(rel, "/")
	switch {
	case (top == "objects" || top == "manifests") && strings.HasPrefix(rest, "incoming"):
		return kindStaging
	case (top == "recipes" || top == "unpacked") && strings.Contains("/"+rest, "/incoming"):
		return kindStaging
	case top == "unpacked":
		return kindUnpacked
	case top == "recipes":
		return kindRecipes
	case top == "objects":
		return kindObjects
	case top == "manifests":
		return kindManifests
	case top == "views" && strings.HasPrefix(rest+"/", views.Unkept+"/"):
		return kindUnkept
	case top == "views":
		return kindViews
	case top == "staging":
		return kindStaging
	case top == "quarantine":
		return kindQuarantine
	case strings.HasPrefix(top, "index.db"):
		return kindIndex
	case strings.HasPrefix(top, "journal"):
		return kindJournal
	case rel == kindReserve:
		return kindReserve
	}
	return kindOthers
}

// Space compares what is accounted with what the file system says, to the block, and names what
// makes a difference. What changes meanwhile is looked at again. progress may be nil.
func Space(ctx context.Context, st *store.Store, progress func(*wire.Progress)) (*wire.CheckReply, error) {
	a := newAuditor(st)
	out, lines := &wire.CheckReply{}, make(map[string]*wire.SpaceLine)
	for _, name := range spaceKinds {
		lines[name] = &wire.SpaceLine{Name: name}
		out.Space = append(out.Space, lines[name])
	}
	seen := make(map[store.FileID]bool)
	var blobs []cas.Digest
	looked := uint64(0)
	for _, name := range spaceKinds { // objects first: their other names count nothing
		err := a.eachFile(ctx, name, func(path string, folder bool) {
			if looked++; looked%wire.FarAfter == 0 {
				wire.Far(progress, "measuring files", "files", looked, 0)
			}
			line := lines[name]
			if folder {
				line = lines[kindFolders]
			}
			id, names, disk, ok := store.FileOnDisk(path)
			if !ok || names > 1 && seen[id] {
				return // it has just gone, or was counted
			}
			if names > 1 {
				seen[id] = true
			}
			line.Files++
			line.DiskBytes += disk
			if d, err := cas.ParseDigest(filepath.Base(path)); err == nil && name == kindObjects && !folder {
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
	packed, err := a.forms.Space(true)
	if err != nil {
		return nil, checkError(ctx, err)
	}
	for name, accounted := range map[string]int64{kindObjects: now.DiskBytes + packed.Containers,
		kindManifests: now.ManifestBytes, kindViews: a.st.Views().HeldBytes(),
		kindRecipes: packed.Recipes, kindUnpacked: packed.Copies} {
		lines[name].AccountedBytes = &accounted
	}
	out.Findings, err = a.misaccounted(ctx, blobs, progress)
	if err != nil {
		return nil, checkError(ctx, err)
	}
	return out, nil
}

// eachFile walks what is of one kind.
func (a *auditor) eachFile(ctx context.Context, kind string, fn func(path string, folder bool)) error {
	roots := []string{kind}
	switch kind {
	case kindUnkept, kindFolders:
		if kind == kindFolders {
			return nil // counted with what is in them
		}
		roots = []string{"views/" + views.Unkept}
	case kindStaging:
		roots = []string{"staging", "objects/incoming", "manifests/incoming", "recipes/incoming", "unpacked/objects/incoming"}
	case kindIndex, kindJournal, kindReserve, kindOthers:
		roots = []string{"."}
	}
	if kind == kindUnpacked || kind == kindStaging {
		if err := a.eachCopyFile(ctx, kind, fn); err != nil {
			return err
		}
	}
	for _, root := range roots {
		err := filepath.WalkDir(filepath.Join(a.st.Directory(), root), func(path string, d fs.DirEntry, err error) error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			rel, relErr := filepath.Rel(a.st.Directory(), path)
			if err != nil || relErr != nil {
				return nil // it has just gone
			}
			is := kindOf(filepath.ToSlash(rel))
			top := rel == "." && kind == kindOthers
			if d.IsDir() && rel != "." && (is != kind && kind != kindOthers || root == "." && slices.Contains(ownFolders, rel)) {
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

// eachCopyFile walks what is of one kind where unpacked forms have a folder of their own on the store's file system.
func (a *auditor) eachCopyFile(ctx context.Context, kind string, fn func(path string, folder bool)) error {
	copies, apart := a.forms.Copies.Folder()
	if apart || copies == filepath.Join(a.st.Directory(), "unpacked") {
		return nil
	}
	return filepath.WalkDir(copies, func(path string, d fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		rel, relErr := filepath.Rel(copies, path)
		if err == nil && relErr == nil && kindOf("unpacked/"+filepath.ToSlash(rel)) == kind { // else it has just gone
			fn(path, d.IsDir())
		}
		return nil
	})
}

// ownFolders have kinds of their own.
var ownFolders = []string{"objects", "recipes", "unpacked", "manifests", "views", "staging", "quarantine"}

// maxSpaceFindings bounds what is named; the lines have the sums.
const maxSpaceFindings = 1000

// misaccounted names the blobs that are not accounted for, or with another size.
func (a *auditor) misaccounted(ctx context.Context, blobs []cas.Digest,
	progress func(*wire.Progress)) ([]*wire.Finding, error) {
	var out []*wire.Finding
	for i, d := range blobs {
		if i%wire.FarAfter == 0 {
			wire.Far(progress, "comparing files", "files", uint64(i), uint64(len(blobs)))
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
				break // it has just gone, or all is well
			}
			if !again {
				continue // it may be just about to be published, or removed
			}
			detail := fmt.Sprintf("accounted with %d bytes on disk, and takes %d", accounted, disk)
			if !known && len(a.forms.Recipes.Users(d)) > 0 {
				break // a container
			}
			if !known {
				detail = fmt.Sprintf("%d bytes on disk that no build needs; the next start removes them", disk)
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
