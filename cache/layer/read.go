// Package layer makes and reads layers: read-only stores below the daemon's own, in an image or on
// another disk. A layer is a directory with
//
// layer list of the manifests; written last
//
//	manifests/<2 digits>/<build id>        as in a store
//
// cards/<build id> the portable card, signed or unsigned
//
//	views/shared/<build id>/<build id>/... the files, to be served in place
//
// A build's id is derived from its manifest, and the manifest from the card, so two exports of the
// same builds write equal files. Start reading at Source and Writer.
package layer

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/store/layers"
)

const (
	listName = "layer"
	listHead = "epcached layer 1\n"
	maxList  = 4 << 20
	maxCard  = 1 << 20
)

// Source is a layer of the configuration.
type Source struct {
	Path string
	// Trust has files of public keys. One of the keys must have signed a build. If there are none,
	// the layer's owner is trusted.
	Trust []string
	// Revoked returns why a build is not served, "" if it is. If it is nil, no build is revoked.
	Revoked func(keys []*portable.Key, keyIDs string, m portable.Digest, b portable.Hash) string
}

// Same reports whether both are configured equally.
func (s Source) Same(other Source) bool {
	return s.Path == other.Path && slices.Equal(s.Trust, other.Trust)
}

// Layer converts the source to the store's type.
func (s Source) Layer() layers.Source {
	return layers.Source{Path: s.Path, List: listName, Read: s.read}
}

// read returns the builds of the layer, and for each build that is not used the reason.
func (s Source) read() (builds []index.Build, refused []string, err error) {
	ids, err := readList(s.Path)
	var trust *portable.Trust
	if err == nil && len(s.Trust) > 0 {
		trust, err = s.keys()
	}
	if err == nil && (trust == nil || !inImage(s.Path)) {
		if err = checkOwners(s.Path); err != nil {
			err = fmt.Errorf("%w; trust key files instead, or make the image with files of root",
				err)
		}
	}
	if err != nil {
		return nil, nil, err
	}
	manifest := index.Manifests(s.Path)
	for _, id := range ids {
		var b index.Build
		var err error
		if trust != nil {
			b, err = s.signed(id, trust, time.Now())
		} else {
			b, err = manifest(id)
		}
		if err == nil && b.Scope != "shared" {
			err = fmt.Errorf("its scope is %s, and layers are for all users", b.Scope)
		}
		if err != nil {
			refused = append(refused, fmt.Sprintf("build %.12s: %v", id, err))
			continue
		}
		b.Source, b.ModelPath, b.Put, b.Layer = index.Source{}, "", true, s.Path
		builds = append(builds, b)
	}
	return builds, refused, nil
}

// readList returns the ids of the builds of a layer.
func readList(dir string) (ids []index.BuildID, err error) {
	path := filepath.Join(dir, listName)
	list, err := readFile(path, maxList)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: not mounted, or not made by epcachectl export --layer", err)
	}
	if err != nil {
		return nil, err
	}
	rest, ok := strings.CutPrefix(string(list), listHead)
	if !ok {
		return nil, fmt.Errorf("%s: it does not begin with %q", path, strings.TrimSpace(listHead))
	}
	for line := range strings.Lines(rest) {
		id, err := index.ParseBuildID(strings.TrimSuffix(line, "\n"))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// readFile reads a small regular file.
func readFile(path string, most int64) ([]byte, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > most {
		return nil, fmt.Errorf("%s: not a regular file of at most %d bytes", path, most)
	}
	return os.ReadFile(path)
}

// keys reads the trusted keys.
func (s Source) keys() (*portable.Trust, error) {
	keys, err := portable.ReadKeys(s.Trust)
	out := &portable.Trust{Keys: keys}
	if s.Revoked != nil {
		out.Revoked = func(keyIDs string, m portable.Digest, b portable.Hash) string {
			return s.Revoked(keys, keyIDs, m, b)
		}
	}
	return out, err
}

// signed returns the build as a trusted key's signature states it, without using the manifest.
func (s Source) signed(id index.BuildID, trust *portable.Trust, now time.Time) (b index.Build,
	err error) {
	raw, err := readFile(filepath.Join(s.Path, "cards", id.String()), maxCard)
	if err != nil {
		return b, err
	}
	card, err := portable.ParseCard("card", raw)
	if err != nil {
		return b, err
	}
	says, key, err := trust.Verify(card, now)
	if err != nil {
		return b, err
	}
	for _, r := range says.Requests {
		one, _, err := buildOf(card, says, r, key)
		if err != nil || one.ID != id {
			continue
		}
		for i := range one.Members { // the id is that of a build for all members
			if m := &one.Members[i]; !says.Answers(portable.Hash(m.AloneKey)) {
				m.AloneKey = index.RequestKey{}
			}
		}
		return *one, nil
	}
	return b, errors.New("its manifest is not the one that was signed")
}

// buildOf returns the build that answers the request, and its manifest, both derived from the card.
func buildOf(card *portable.Card, says *portable.Predicate, r portable.Request, keyID string) (
	*index.Build, []byte, error) {
	c := card.Config
	record, err := identity.Decode(r.Record)
	if err != nil {
		return nil, nil, err
	}
	terms, err := record.Terms()
	if err != nil {
		return nil, nil, err
	}
	other := record.Model != cas.Digest(c.ModelDigest) ||
		len(terms.Group) != max(0, len(c.Members)-1)
	for i := range c.Members {
		other = other || record.ModelOf(i) != cas.Digest(c.Members[i].ModelDigest)
	}
	if other {
		return nil, nil, errors.New("the request is for another model")
	}
	// a key that is limited to some execution providers was compared with those of the card
	if !slices.EqualFunc(record.EPs, c.EPs, func(asked identity.RecordEP, made portable.EP) bool {
		return asked.Name == made.Name
	}) {
		return nil, nil, errors.New("the request is for other execution providers")
	}
	name := cmp.Or(c.ModelName, "imported "+c.ModelDigest.String()[:12])
	b := &index.Build{RequestKey: index.RequestKey(r.Key), Scope: "shared", Put: true,
		ModelDigest: cas.Digest(c.ModelDigest), ModelName: name, Record: r.Record,
		RecordJSON: record.JSON(),
		EPs:        identity.FactsOf(c), ORTVersion: c.ORTVersion, Route: c.Route, Graph: c.Graph,
		ProviderOptions: make(map[string]map[string]string), SessionOptions: terms.SessionOptions,
		GraphOptimizationLevel: c.Level, CompileSeconds: min(max(says.CompileSeconds, 0), 24*3600),
		Created: says.Issued.UTC().Truncate(time.Second), LoadCheck: compilers.NotCheckable,
		IRVersion: c.IRVersion, Embed: c.Embed}
	b.BuildKey = identity.BuildKey(b.RequestKey, b.EPs, c.Route)
	if keyID != "" {
		b.Imported = index.Imported{Key: keyID, Manifest: [32]byte(card.Digest),
			Builder: says.Builder}
	}
	for _, f := range c.Files {
		b.Files = append(b.Files,
			index.File{Name: f.Name, Size: f.Size, Digest: cas.Digest(f.Hash)})
	}
	for _, ep := range record.EPs {
		info, _ := compilers.EPByName(ep.Name)
		b.ProviderOptions[ep.Name] = identity.LibraryBaseNames(info, ep.Options)
	}
	for i, m := range c.Members {
		one := index.Member{ModelName: name, ModelDigest: cas.Digest(m.ModelDigest), Graph: m.Graph,
			SessionOptions: compilers.ShareOptions()}
		if m.Alone {
			one.AloneKey = record.MemberKey(i)
		}
		b.Members = append(b.Members, one)
	}
	manifest, err := index.LayerManifest(b)
	return b, manifest, err
}

// inImage reports whether a path is in an image that no user can write to.
func inImage(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil &&
		(st.Type == unix.SQUASHFS_MAGIC || st.Type == unix.EROFS_SUPER_MAGIC_V1)
}

// checkOwners refuses a layer that a user other than root and the daemon's own could change or
// replace, because its files run as code in every application.
func checkOwners(dir string) error {
	if err := cas.CheckPath(dir); err != nil {
		return err
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return err
	}
	return filepath.WalkDir(real, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err == nil && !info.IsDir() && !info.Mode().IsRegular() {
			err = fmt.Errorf("%s: neither a directory nor a regular file", path)
		}
		if err == nil {
			err = cas.CheckOwner(path, info)
		}
		return err
	})
}
