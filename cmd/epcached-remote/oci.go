package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	oras "oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/credentials"
	"oras.land/oras-go/v2/registry/remote/errcode"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// registry is a repository of an OCI registry. It shows the tree of store.go, without epochs:
//
//	blobs/<digest>                a blob; manifests are put with the card that names them
//	manifests/b-<build key>       card
//	manifests/r-<request key>     an index of the cards that answer a request
//	manifests/trust, check        a manifest with one layer: the trust document, or a text
//
// Registries have no create-only writes: the last writer of a tag wins, and there are no leases.
// The publisher of a card rebuilds the index of its requests, so that removed cards leave it.
type registry struct {
	*meter
	repo *oras.Repository
	base string // URL of the repository
}

// The tags of manifests with one layer, and what the artefacts are.
const (
	trustTag      = "trust"
	checkTag      = "check"
	artifactCards = "application/vnd.epcached.cards.v1"
	artifactFile  = "application/vnd.epcached.document.v1"
)

func newRegistry(c remote.Config, u *url.URL) (*registry, error) {
	at := &url.URL{Scheme: "https", Host: u.Host}
	if c.Endpoint != "" {
		var err error
		if at, err = url.Parse(c.Endpoint); err != nil {
			return nil, err
		}
	}
	repo, err := oras.NewRepository(at.Host + "/" + strings.Trim(u.Path, "/"))
	if err != nil {
		return nil, fail("unsupported", "%v", err)
	}
	credential, err := registryCredentials(c)
	if err != nil {
		return nil, fail("refused", "the credentials cannot be read: %v", err)
	}
	g := &registry{meter: newMeter(c), repo: repo}
	g.base = fmt.Sprintf("%s://%s/v2/%s/", at.Scheme, repo.Reference.Host(),
		repo.Reference.Repository)
	client := &auth.Client{Cache: auth.NewCache(), Credential: credential,
		Client: &http.Client{Transport: g.meter, CheckRedirect: redirects(at.Scheme)}}
	client.SetUserAgent("epcached/" + version)
	repo.Client, repo.PlainHTTP = client, at.Scheme == "http"
	repo.SkipReferrersGC = true // it needs the right to delete
	return g, nil
}

// registryCredentials reads the credentials of a remote from the files of other registry tools.
func registryCredentials(c remote.Config) (auth.CredentialFunc, error) {
	var store credentials.Store
	var err error
	file := filepath.Join(os.Getenv("CREDENTIALS_DIRECTORY"), c.Name)
	if os.Getenv("CREDENTIALS_DIRECTORY") == "" || !isFile(file) {
		file = os.Getenv("REGISTRY_AUTH_FILE")
	}
	switch text := os.Getenv("DOCKER_AUTH_CONFIG"); {
	case file != "":
		store, err = credentials.NewStore(file, credentials.StoreOptions{})
	case text != "":
		store, err = credentials.NewMemoryStoreFromDockerConfig([]byte(text))
	case os.Getenv("HOME") != "" || os.Getenv("DOCKER_CONFIG") != "":
		store, err = credentials.NewStoreFromDocker(credentials.StoreOptions{})
		if errors.Is(err, fs.ErrPermission) {
			return nil, nil // the file belongs to another user, that of the daemon
		}
	default:
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return credentials.Credential(store), nil
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

func (g *registry) can() remote.Can {
	return remote.Can{Read: true, Write: true, Range: true, List: true}
}

// pathOf returns the path of an object below the repository's URL, "" if registries do not have
// such objects.
func pathOf(name string) string {
	parts := strings.Split(name, "/")
	switch {
	case strings.HasPrefix(name, blobsName):
		return "blobs/sha256:" + parts[len(parts)-1]
	case len(parts) == 4 && parts[1] == "builds":
		return "manifests/b-" + parts[3]
	case len(parts) == 5 && parts[1] == "requests" && parts[4] == "":
		return "manifests/r-" + parts[3]
	}
	return ""
}

func (g *registry) get(ctx context.Context, name string, from, length int64) (*object, error) {
	if name == trustName {
		return g.document(ctx, trustTag)
	}
	at := pathOf(name)
	if at == "" {
		return nil, fail("missing", "registries have no such objects")
	}
	return g.ask(ctx, http.MethodGet, at, from, length)
}

// document reads the layer of a manifest that has one.
func (g *registry) document(ctx context.Context, tag string) (*object, error) {
	var m ocispec.Manifest
	if err := g.read(ctx, "manifests/"+tag, &m); err != nil {
		return nil, err
	}
	if len(m.Layers) != 1 || m.Layers[0].Digest.Validate() != nil {
		return nil, fail("damaged", "the manifest %s has %d layers, not 1", tag, len(m.Layers))
	}
	return g.ask(ctx, http.MethodGet, "blobs/"+m.Layers[0].Digest.String(), 0, -1)
}

// read reads a manifest.
func (g *registry) read(ctx context.Context, at string, to any) error {
	o, err := g.ask(ctx, http.MethodGet, at, 0, -1)
	if err != nil {
		return err
	}
	defer o.body.Close()
	raw, err := io.ReadAll(io.LimitReader(o.body, remote.MaxCard))
	if err == nil && json.Unmarshal(raw, to) != nil {
		err = fail("damaged", "the registry sent something else than a manifest")
	}
	return err
}

func (g *registry) stat(ctx context.Context, name string) (*object, error) {
	at := pathOf(name)
	if at == "" {
		return nil, fail("missing", "registries have no such objects")
	}
	o, err := g.ask(ctx, http.MethodHead, at, 0, -1)
	if err != nil {
		return nil, err
	}
	return o, o.body.Close()
}

// ask makes one request. The ETag of a manifest is its digest. Blobs have no age, because a
// registry keeps those that a manifest names.
func (g *registry) ask(ctx context.Context, method, at string, from, length int64) (*object,
	error) {
	ctx = auth.AppendRepositoryScope(ctx, g.repo.Reference, auth.ActionPull)
	r, err := http.NewRequestWithContext(ctx, method, g.base+at, nil)
	if err != nil {
		return nil, err
	}
	r.Header.Add("Accept", portable.MediaIndex)
	r.Header.Add("Accept", portable.MediaManifest)
	if strings.HasPrefix(at, "blobs/") {
		r.Header.Del("Accept")
	}
	o, err := answerOf(g.repo.Client, r, from, length)
	if err != nil {
		return nil, registryError(err)
	}
	o.modified = time.Time{}
	return o, nil
}

// registryError returns the error of a registry, without the URL, which has keys.
func registryError(err error) error {
	answer, is := errors.AsType[*errcode.ErrorResponse](err)
	switch {
	case err == nil:
		return nil
	case is && len(answer.Errors) > 0:
		return statusError(answer.StatusCode, answer.Errors[0].Code)
	case is:
		return statusError(answer.StatusCode, "")
	case errors.Is(err, auth.ErrBasicCredentialNotFound):
		return fail("refused", "the registry wants credentials, and there are none for it")
	}
	if c := classify(err); c.Class != "unreachable" || errors.As(err, new(*remote.Error)) {
		return err
	}
	for inner := errors.Unwrap(err); inner != nil && !errors.As(err, new(*url.Error)); {
		err, inner = inner, errors.Unwrap(inner)
	}
	return err
}

func (g *registry) put(ctx context.Context, name string, body *io.SectionReader, _ string,
	when condition) error {
	at := pathOf(name)
	if hex, is := strings.CutPrefix(name, blobsName); is {
		d := ocispec.Descriptor{MediaType: "application/octet-stream", Size: body.Size(),
			Digest: digest.NewDigestFromEncoded("sha256", hex)}
		return registryError(g.repo.Blobs().Push(ctx, d, body))
	}
	raw, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	if name == trustName {
		return g.putTrust(ctx, raw, when)
	}
	if tag, is := strings.CutPrefix(at, "manifests/b-"); is {
		return g.putCard(ctx, "b-"+tag, raw, when)
	}
	prefix, build := path.Split(name)
	if tag, is := strings.CutPrefix(pathOf(prefix), "manifests/r-"); is {
		return g.addCard(ctx, "r-"+tag, "b-"+build, raw)
	}
	return fail("unsupported", "registries have no such objects")
}

func described(media, artifact string, raw []byte) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: media, ArtifactType: artifact, Size: int64(len(raw)),
		Digest: digest.FromBytes(raw)}
}

// putCard puts the manifests of a card and then the card, unless the tag has exactly this card
// already. With a match it puts them anyway, because the registry may have damaged them.
func (g *registry) putCard(ctx context.Context, tag string, raw []byte, when condition) error {
	switch o, err := g.ask(ctx, http.MethodHead, "manifests/"+tag, 0, -1); {
	case err == nil && when.match == "" && o.etag == digest.FromBytes(raw).String():
		return errExists
	case err != nil && !isClass(err, remote.ErrMissing):
		return err
	}
	var x ocispec.Index
	if err := json.Unmarshal(raw, &x); err != nil {
		return fail("local", "%v", err)
	}
	for _, d := range x.Manifests {
		if err := g.repo.Manifests().Push(ctx, d, bytes.NewReader(d.Data)); err != nil {
			return registryError(err)
		}
	}
	return g.tag(ctx, tag, portable.MediaIndex, raw)
}

func (g *registry) tag(ctx context.Context, tag, media string, raw []byte) error {
	return registryError(g.repo.Manifests().PushReference(ctx, described(media, "", raw),
		bytes.NewReader(raw), tag))
}

// addTries bounds the retries of adding a card to an index that other publishers replace at the
// same time. A card outside the index is found only by its build key.
const addTries = 3

// addCard adds an existing card to the index of a request.
func (g *registry) addCard(ctx context.Context, tag, build string, card []byte) error {
	own := described(portable.MediaIndex, portable.ArtifactCard, card)
	own.Annotations = map[string]string{ocispec.AnnotationRefName: build}
	for try := range addTries {
		x, err := g.cards(ctx, tag)
		if err != nil {
			return err
		}
		is := func(d ocispec.Descriptor) bool { return d.Digest == own.Digest }
		if slices.ContainsFunc(x, is) {
			if try == 0 {
				return errExists
			}
			return nil
		}
		if x, err = g.current(ctx, x, build); err != nil {
			return err
		}
		x = append(x[max(0, len(x)-remote.MaxCards+1):], own)
		err = g.tag(ctx, tag, portable.MediaIndex, encode(ocispec.Index{
			Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: portable.MediaIndex,
			ArtifactType: artifactCards, Manifests: x}))
		if err != nil {
			return err
		}
	}
	return nil
}

// cards returns the entries of the index of a request. One that is damaged is made again.
func (g *registry) cards(ctx context.Context, tag string) ([]ocispec.Descriptor, error) {
	var x ocispec.Index
	err := g.read(ctx, "manifests/"+tag, &x)
	if err != nil && !isClass(err, remote.ErrMissing) && !isClass(err, remote.ErrDamaged) {
		return nil, err
	}
	return x.Manifests[:min(len(x.Manifests), remote.MaxCards)], nil
}

// current returns the current manifests of the cards' tags, without the card of a build and without
// removed cards, because a registry refuses an index with missing manifests.
func (g *registry) current(ctx context.Context, old []ocispec.Descriptor, without string) (
	[]ocispec.Descriptor, error) {
	next := make([]ocispec.Descriptor, len(old))
	all, limited := errgroup.WithContext(ctx)
	all.SetLimit(8)
	for i, d := range old {
		tag := d.Annotations[ocispec.AnnotationRefName]
		if tag == without || buildOfTag(tag) == "" {
			continue
		}
		all.Go(func() error {
			o, err := g.ask(limited, http.MethodHead, "manifests/"+tag, 0, -1)
			if isClass(err, remote.ErrMissing) {
				return nil
			}
			if err == nil && digest.Digest(o.etag).Validate() == nil {
				next[i] = d
				next[i].Digest, next[i].Size = digest.Digest(o.etag), o.size
			}
			return err
		})
	}
	err := all.Wait()
	return slices.DeleteFunc(next, func(d ocispec.Descriptor) bool { return d.Size <= 0 }), err
}

// buildOfTag returns the build key of a card's tag, "" for another tag.
func buildOfTag(tag string) string {
	key, is := strings.CutPrefix(tag, "b-")
	if !is || new(portable.Hash).UnmarshalText([]byte(key)) != nil {
		return ""
	}
	return key
}

// putTrust puts the trust document, unless there is one that the caller has not seen. Of concurrent
// writers the last one wins.
func (g *registry) putTrust(ctx context.Context, raw []byte, when condition) error {
	o, err := g.document(ctx, trustTag)
	switch {
	case err == nil:
		if err := o.body.Close(); when.create || when.match != o.etag {
			return errors.Join(errExists, err)
		}
	case !isClass(err, remote.ErrMissing):
		return err
	}
	_, err = g.putDocument(ctx, trustTag, raw)
	return err
}

func (g *registry) walk(context.Context, string, func(string, *object) error) error {
	return collectsItself()
}

func (g *registry) remove(context.Context, string) error { return collectsItself() }

func collectsItself() error {
	return fail("unsupported", "a registry removes tags by its retention, and then their blobs")
}

func (g *registry) touch(context.Context, string, int64) error { return nil }

// list returns the build keys of the cards that answer a request.
func (g *registry) list(ctx context.Context, prefix string, most int) (names []string, err error) {
	tag, is := strings.CutPrefix(pathOf(prefix), "manifests/")
	if !is {
		return nil, nil
	}
	x, err := g.cards(ctx, tag)
	for _, d := range x[:min(len(x), most)] {
		names = append(names, buildOfTag(d.Annotations[ocispec.AnnotationRefName]))
	}
	return names, err
}

// isManifest reports whether a blob that is uploaded is a manifest.
func isManifest(f *os.File, size int64) bool {
	if size > remote.MaxCard {
		return false
	}
	var is struct{ MediaType string }
	err := json.NewDecoder(io.NewSectionReader(f, 0, size)).Decode(&is)
	return err == nil &&
		(is.MediaType == portable.MediaManifest || is.MediaType == portable.MediaIndex)
}

// check tries the operations that the daemon needs on a registry. It leaves the tag "check" behind.
func (g *registry) check(ctx context.Context) (found findings, err error) {
	err = g.read(ctx, "manifests/"+checkTag, new(ocispec.Manifest))
	if isClass(err, remote.ErrUnreachable) {
		found.add("read", err, "", "every look-up is a miss")
		return found, err
	}
	if isClass(err, remote.ErrMissing) {
		err = nil // it is the first time
	}
	found.add("read", err, "manifests can be read", "every look-up is a miss")
	text := []byte("epcached remote check " + rand.Text())
	m, err := g.putDocument(ctx, checkTag, text)
	found.add("write", err, "blobs and tags can be written", "nothing can be published")
	if err != nil {
		return found, nil
	}
	found.add("create-only", errors.New("registries overwrite tags"), "", "the last writer of a "+
		"card wins, and there are no leases: machines that need a build at once all compile")
	blob := blobName(portable.DigestOf(text))
	found.add("range", checkRange(ctx, g, blob, text), "parts of blobs can be read",
		"builds are transferred whole")
	found.add("referrers", g.referrers(ctx, m), "the registry lists the signatures of a build",
		"oras and cosign find signatures by a tag, sha256-DIGEST, that each publisher rewrites")
	found.add("clock", clockError(time.Since(g.clock())), "the clocks agree",
		"expiry dates of signatures are judged by it")
	return found, nil
}

// referrers fails if the registry does not list what refers to a manifest.
func (g *registry) referrers(ctx context.Context, m digest.Digest) error {
	err := g.read(ctx, "referrers/"+m.String(), new(ocispec.Index))
	if isClass(err, remote.ErrMissing) {
		return errors.New("the registry has no referrers API")
	}
	return err
}

// putDocument puts a blob, and a manifest under the tag that keeps it. It returns the manifest's
// digest.
func (g *registry) putDocument(ctx context.Context, tag string, raw []byte) (digest.Digest, error) {
	layer := described("text/plain", "", raw)
	m := encode(ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2},
		MediaType: portable.MediaManifest, ArtifactType: artifactFile,
		Config: ocispec.DescriptorEmptyJSON, Layers: []ocispec.Descriptor{layer}})
	for d, blob := range map[*ocispec.Descriptor][]byte{&layer: raw,
		&ocispec.DescriptorEmptyJSON: ocispec.DescriptorEmptyJSON.Data} {
		if err := g.repo.Blobs().Push(ctx, *d, bytes.NewReader(blob)); err != nil {
			return "", registryError(err)
		}
	}
	return digest.FromBytes(m), g.tag(ctx, tag, portable.MediaManifest, m)
}
