package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// fakeRegistry is a repository in memory, which has the manners of distribution.
type fakeRegistry struct {
	auth func(w http.ResponseWriter, r *http.Request) bool // reports whether it may go on; nil: yes

	mu          sync.Mutex // guards the fields below
	blobs       map[digest.Digest][]byte
	manifests   map[digest.Digest][]byte
	tags        map[string]digest.Digest
	requests    []string
	noReferrers bool
	beforeTag   func(tag string) // another publisher is faster; called without mu
}

const repository = "/v2/team/builds/"

func newFakeRegistry() *fakeRegistry {
	return &fakeRegistry{blobs: map[digest.Digest][]byte{}, manifests: map[digest.Digest][]byte{},
		tags: map[string]digest.Digest{}}
}

// where returns the map that has an object of the tree, and its key.
func (g *fakeRegistry) where(object string) (in map[digest.Digest][]byte, key digest.Digest) {
	if hex, is := strings.CutPrefix(object, blobsName); is {
		return g.blobs, digest.Digest("sha256:" + hex)
	}
	return g.manifests, g.tags[strings.TrimPrefix(pathOf(object), "manifests/")]
}

func (g *fakeRegistry) change(object string, to func([]byte) []byte) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	in, key := g.where(object)
	old, ok := in[key]
	if ok {
		if in[key] = to(bytes.Clone(old)); in[key] == nil {
			delete(in, key)
		}
	}
	return ok
}

func (g *fakeRegistry) put(object string, data []byte, _ time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if object == trustName {
		g.blobs[digest.FromBytes(data)] = data
		data = encode(ocispec.Manifest{MediaType: portable.MediaManifest,
			Layers: []ocispec.Descriptor{described("text/plain", "", data)}})
		g.tags[trustTag] = digest.FromBytes(data)
		g.manifests[g.tags[trustTag]] = data
		return
	}
	in, key := g.where(object)
	if key == "" {
		key = digest.FromBytes(data)
		g.tags[strings.TrimPrefix(pathOf(object), "manifests/")] = key
	}
	in[key] = data
}

func (g *fakeRegistry) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	if g.auth != nil && !g.auth(w, r) {
		return
	}
	at, ok := strings.CutPrefix(r.URL.Path, repository)
	tag, manifest := strings.CutPrefix(at, "manifests/")
	if before := g.beforeTag; before != nil && manifest && r.Method == http.MethodPut {
		before(tag)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.requests = append(g.requests, r.Method+" "+at)
	failed := func(code int, text string) {
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"errors":[{"code":%q}]}`, text)
	}
	name, blob := strings.CutPrefix(at, "blobs/sha256:")
	_, referrers := strings.CutPrefix(at, "referrers/")
	switch {
	case !ok:
		failed(404, "NAME_UNKNOWN")
	case at == "blobs/uploads/" && r.Method == http.MethodPost:
		w.Header().Set("Location", repository+"upload?state=1")
		w.WriteHeader(202)
	case at == "upload" && r.Method == http.MethodPut:
		d := digest.Digest(r.URL.Query().Get("digest"))
		if digest.FromBytes(body) != d {
			failed(400, "DIGEST_INVALID")
			return
		}
		g.blobs[d] = body
		w.WriteHeader(201)
	case referrers && g.noReferrers:
		failed(404, "UNSUPPORTED")
	case referrers:
		w.Header().Set("Content-Type", portable.MediaIndex)
		fmt.Fprintf(w, `{"schemaVersion":2,"mediaType":%q,"manifests":[]}`, portable.MediaIndex)
	case manifest && r.Method == http.MethodPut:
		g.putManifest(w, tag, r.Header.Get("Content-Type"), body, failed)
	case manifest:
		d, there := g.tags[tag]
		if !there {
			d = digest.Digest(tag)
		}
		raw, there := g.manifests[d]
		if !there {
			failed(404, "MANIFEST_UNKNOWN")
			return
		}
		var media struct{ MediaType string }
		_ = json.Unmarshal(raw, &media) // damaged ones are served as well
		w.Header().Set("Content-Type", media.MediaType)
		w.Header().Set("Docker-Content-Digest", d.String())
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(raw))
	case blob:
		raw, there := g.blobs[digest.Digest("sha256:"+name)]
		if !there {
			failed(404, "BLOB_UNKNOWN")
			return
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		http.ServeContent(w, r, "", time.Now().Add(-400*24*time.Hour), bytes.NewReader(raw))
	default:
		failed(404, "UNSUPPORTED")
	}
}

func (g *fakeRegistry) putManifest(w http.ResponseWriter, tag, media string, raw []byte,
	failed func(int, string)) {
	var m struct {
		MediaType string
		Config    *ocispec.Descriptor
		Layers    []ocispec.Descriptor
		Manifests []ocispec.Descriptor
		Subject   *ocispec.Descriptor
	}
	if json.Unmarshal(raw, &m) != nil || m.MediaType != media {
		failed(400, "MANIFEST_INVALID")
		return
	}
	if m.Config != nil {
		m.Layers = append(m.Layers, *m.Config)
	}
	for _, d := range m.Layers {
		if _, there := g.blobs[d.Digest]; !there {
			failed(404, "MANIFEST_BLOB_UNKNOWN")
			return
		}
	}
	for _, d := range m.Manifests {
		if _, there := g.manifests[d.Digest]; !there {
			failed(404, "MANIFEST_BLOB_UNKNOWN")
			return
		}
	}
	d := digest.FromBytes(raw)
	if g.manifests[d] = raw; !strings.HasPrefix(tag, "sha256:") {
		g.tags[tag] = d
	}
	w.Header().Set("Docker-Content-Digest", d.String())
	if m.Subject != nil && !g.noReferrers {
		w.Header().Set("OCI-Subject", m.Subject.Digest.String())
	}
	w.WriteHeader(201)
}

// wait makes the fixture's helper begin again, with other files of credentials.
func (f *fixture) withEnv(t *testing.T, env ...string) *remote.Client {
	return client(t, append(env, f.env...), f.config)
}

func TestTheLastWriterOfATagWins(t *testing.T) {
	f := newFixture(t, "oci")
	e := export(t, randomBytes(1, 1000))
	e.publish(t, f.Client)
	other := export(t, randomBytes(2, 1000))
	_, put := other.publish(t, f.Client)
	require.Equal(t, remote.Created, put)
	for _, key := range []remote.Key{remote.BuildKey(buildKey), remote.RequestKey(otherKey)} {
		cards, err := f.Look(t.Context(), name, key, budget)
		require.NoError(t, err)
		require.Equal(t, [][]byte{other.card.Raw}, cards)
	}
	// A publisher that says which card it replaces is no exception.
	keys := remote.CardKeys{Build: buildKey, Requests: []portable.Hash{otherKey},
		Over: portable.DigestOf(other.card.Raw)}
	for _, want := range []remote.Put{remote.Created, remote.Exists} {
		put, err := f.PutCard(t.Context(), name, keys, e.card.Raw)
		require.NoError(t, err)
		require.Equal(t, want, put)
	}
	l, err := f.Lease(t.Context(), name, remote.LeaseRequest{Key: buildKey, Holder: "a",
		Estimate: time.Minute, TTL: time.Second})
	require.NoError(t, err)
	require.Equal(t, remote.NotOffered, l.State)
}

// keyed is a card of another build.
func cardOf(t *testing.T, key portable.Hash) *exported { return exportOf(t, key, []byte("m")) }

func TestPublishersRebuildTheIndexOfARequest(t *testing.T) {
	f := newFixture(t, "oci")
	publish := func(c *remote.Client, e *exported) {
		_, err := c.PutBlobs(t.Context(), name, e.blobs, nil)
		require.NoError(t, err)
		_, err = c.PutCard(t.Context(), name, remote.CardKeys{Build: e.card.Config.BuildKey,
			Requests: []portable.Hash{otherKey}}, e.card.Raw)
		require.NoError(t, err)
	}
	look := func() map[portable.Hash]bool {
		cards, err := f.Look(t.Context(), name, remote.RequestKey(otherKey), budget)
		require.NoError(t, err)
		found := make(map[portable.Hash]bool)
		for _, raw := range cards {
			c, err := portable.ParseCard("card", raw)
			require.NoError(t, err)
			found[c.Config.BuildKey] = true
		}
		return found
	}
	one, two, three := portable.Hash{1}, portable.Hash{2}, portable.Hash{3}
	publish(f.Client, cardOf(t, one))
	// A second publisher reads the index, and a third one is faster.
	once := true
	g := f.registry
	fast := f.withEnv(t)
	g.beforeTag = func(tag string) {
		if once && strings.HasPrefix(tag, "r-") {
			once = false
			publish(fast, cardOf(t, three))
		}
	}
	publish(f.Client, cardOf(t, two))
	g.beforeTag = nil
	// The second one has replaced the third one's card. Its next publisher puts it back.
	require.Equal(t, map[portable.Hash]bool{one: true, two: true}, look())
	publish(fast, cardOf(t, three))
	require.Equal(t, map[portable.Hash]bool{one: true, two: true, three: true}, look())

	// The registry's retention removes a card.
	g.mu.Lock()
	delete(g.manifests, g.tags["b-"+one.String()])
	delete(g.tags, "b-"+one.String())
	g.mu.Unlock()
	require.Equal(t, map[portable.Hash]bool{two: true, three: true}, look())
	publish(f.Client, cardOf(t, portable.Hash{4}))
	require.Equal(t, map[portable.Hash]bool{two: true, three: true, {4}: true}, look())
	g.change("v1/requests/0/"+otherKey.String()+"/", func([]byte) []byte { return []byte("{") })
	publish(f.Client, cardOf(t, one))
	require.Equal(t, map[portable.Hash]bool{one: true}, look())
}

func TestCheckSaysWhatFollowsFromARegistry(t *testing.T) {
	for _, referrers := range []bool{true, false} {
		f := newFixture(t, "oci")
		f.registry.noReferrers = !referrers
		for range 2 {
			found, err := f.Check(t.Context(), name)
			require.NoError(t, err)
			can := map[string]bool{}
			for _, one := range found {
				can[one.Name] = one.OK
			}
			require.Equal(t, map[string]bool{"read": true, "write": true, "create-only": false,
				"range": true, "referrers": referrers, "clock": true, "look-up": true},
				can, "%+v", found)
		}
		require.Len(t, f.registry.tags, 1, "it leaves one tag")
	}
}

func TestARegistryHasATrustDocument(t *testing.T) {
	f := newFixture(t, "oci")
	one, two := []byte("one"), []byte("two")
	put := func(doc []byte, over portable.Digest) remote.Put {
		p, err := f.PutTrust(t.Context(), name, doc, over)
		require.NoError(t, err)
		return p
	}
	require.Equal(t, remote.Created, put(one, portable.Digest{}))
	require.Equal(t, remote.Exists, put(two, portable.Digest{}))
	require.Equal(t, remote.Exists, put(two, portable.DigestOf(two)))
	require.Equal(t, remote.Replaced, put(two, portable.DigestOf(one)))
	got, err := f.Trust(t.Context(), name)
	require.NoError(t, err)
	require.Equal(t, two, got)
	_, err = f.Collect(t.Context(), name, true, nil)
	require.ErrorIs(t, err, remote.ErrUnsupported)
}

// Without a referrers API the client keeps a tag that names what refers to a manifest.
func TestSignaturesAreFoundWithoutAReferrersAPI(t *testing.T) {
	f := newFixture(t, "oci")
	f.registry.noReferrers = true
	e := export(t, randomBytes(1, 1000))
	e.publish(t, f.Client)
	_, put := e.publish(t, f.Client)
	require.Equal(t, remote.Exists, put)
	d := f.registry.tags["sha256-"+e.card.Digest.Hex()]
	var x ocispec.Index
	require.NoError(t, json.Unmarshal(f.registry.manifests[d], &x))
	require.Len(t, x.Manifests, 1)
	require.Equal(t, portable.MediaBundle, x.Manifests[0].ArtifactType)
}

// dockerConfig is what `docker login` writes.
func dockerConfig(host, user, password string) string {
	return fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, host,
		base64.StdEncoding.EncodeToString([]byte(user+":"+password)))
}

func TestCredentialsOfARegistryAreFoundWhereToolsKeepThem(t *testing.T) {
	f := newFixture(t, "oci")
	host := f.proxy.listener.Addr().String()
	var basic bool
	f.registry.auth = func(w http.ResponseWriter, r *http.Request) bool {
		user, password, ok := r.BasicAuth()
		good := ok && user == "user" && password == "secret"
		switch {
		case r.URL.Path == "/token" && (good || !ok):
			token := "anonymous"
			if good {
				token = "good " + strings.Join(r.URL.Query()["scope"], " ")
			}
			fmt.Fprintf(w, `{"token":%q}`, token)
			return false
		case r.URL.Path == "/token":
			w.WriteHeader(http.StatusUnauthorized)
			return false
		case basic && good || strings.HasPrefix(r.Header.Get("Authorization"),
			"Bearer good repository:team/builds:pull"):
			return true
		case basic:
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		default:
			w.Header().Set("WWW-Authenticate", `Bearer realm="https://`+host+
				`/token",service="x",scope="repository:team/builds:pull"`)
		}
		w.WriteHeader(http.StatusUnauthorized)
		return false
	}
	dir := t.TempDir()
	config := func(name, password string) string {
		at := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(at), 0o700))
		require.NoError(t, os.WriteFile(at, []byte(dockerConfig(host, "user", password)), 0o600))
		return at
	}
	config("credentials/"+name, "secret")
	config("docker/config.json", "secret")
	config("home/.docker/config.json", "secret")
	config("wrong/config.json", "wrong")
	places := map[string]bool{
		"CREDENTIALS_DIRECTORY=" + dir + "/credentials":                        true,
		"DOCKER_AUTH_CONFIG=" + dockerConfig(host, "user", "secret"):           true,
		"REGISTRY_AUTH_FILE=" + config("auth.json", "secret"):                  true,
		"DOCKER_CONFIG=" + dir + "/docker":                                     true,
		"HOME=" + dir + "/home":                                                true,
		"HOME=/nonexistent":                                                    false,
		"DOCKER_CONFIG=" + dir + "/wrong":                                      false,
		"DOCKER_AUTH_CONFIG=" + dockerConfig("other.test", "user", "secret"):   false,
		"DOCKER_AUTH_CONFIG={\"auths\":":                                       false,
		"DOCKER_AUTH_CONFIG=" + dockerConfig(host, "user", "another password"): false,
	}
	e := export(t, randomBytes(1, 1<<20))
	for _, basic = range []bool{true, false} {
		for env, good := range places {
			c := f.withEnv(t, env)
			_, err := c.Look(t.Context(), name, remote.RequestKey(buildKey), budget)
			if !good {
				require.ErrorIs(t, err, remote.ErrRefused, env)
				require.NotContains(t, err.Error(), "secret")
				require.NotContains(t, err.Error(), portable.Hash.String(buildKey))
				continue
			}
			require.ErrorIs(t, err, remote.ErrMissing, env)
			e.publish(t, c)
			got, _, err := e.fetch(t, t.Context(), c)
			require.NoError(t, err)
			e.requireEqual(t, got)
		}
	}
}

// Blobs are often elsewhere, and the credentials must not go there.
func TestBlobsAreReadWhereARegistryRedirectsTo(t *testing.T) {
	f := newFixture(t, "oci")
	e := export(t, randomBytes(1, 1<<20))
	e.publish(t, f.Client)
	f.registry.auth = func(w http.ResponseWriter, r *http.Request) bool {
		if _, _, ok := r.BasicAuth(); !ok && r.Header.Get("X-Elsewhere") == "" {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return false
		}
		return true
	}
	var mu sync.Mutex
	var ranges []string
	elsewhere := f.serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if r.Header.Get("Authorization") != "" {
			t.Error("the credentials are sent to another host")
		}
		ranges = append(ranges, r.Header.Get("Range"))
		r.Header.Set("X-Elsewhere", "yes")
		f.registry.ServeHTTP(w, r)
	}))
	redirect := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/sha256:") {
			return false
		}
		http.Redirect(w, r, elsewhere+r.URL.Path, http.StatusTemporaryRedirect)
		return true
	}
	f.fault.Store(&redirect)
	c := f.withEnv(t, "DOCKER_AUTH_CONFIG="+
		dockerConfig(f.proxy.listener.Addr().String(), "user", "secret"))
	got, p, err := e.fetch(t, t.Context(), c, e.files["m.bin"][500<<10:])
	require.NoError(t, err)
	e.requireEqual(t, got)
	require.Less(t, p.Wire, int64(900<<10))
	require.Contains(t, strings.Join(ranges, " "), "bytes=0-")
}

func TestAnUploadDoesNotLeadToAnotherHost(t *testing.T) {
	f := newFixture(t, "oci")
	e := export(t, randomBytes(1, 1000))
	upload := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost {
			return false
		}
		w.Header().Set("Location", "https://elsewhere.invalid/upload")
		w.WriteHeader(202)
		return true
	}
	f.fault.Store(&upload)
	ctx, cancel := context.WithTimeout(t.Context(), budget)
	defer cancel()
	_, err := f.PutBlobs(ctx, name, e.blobs, nil)
	require.ErrorContains(t, err, "different host")
	require.Empty(t, f.registry.blobs)
}
