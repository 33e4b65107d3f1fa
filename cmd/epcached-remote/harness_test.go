package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"encoding/xml"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// The test binary plays the helper, and ends as soon as it is idle.
func TestMain(m *testing.M) {
	if idle := os.Getenv("EPCACHED_REMOTE_TEST_IDLE"); idle != "" {
		idleExit, _ = time.ParseDuration(idle)
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
	}
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("internal/poll.runtime_pollWait"),
		goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"))
}

// client returns a client with a helper that trusts a test server.
func client(t testing.TB, env []string, remotes ...remote.Config) *remote.Client {
	return clientWith(t, remote.Options{Env: env}, remotes...)
}

func clientWith(t testing.TB, o remote.Options, remotes ...remote.Config) *remote.Client {
	program, err := os.Executable()
	require.NoError(t, err)
	o.Program = program
	o.Env = append([]string{"EPCACHED_REMOTE_TEST_IDLE=10s", "AWS_ACCESS_KEY_ID=user",
		"HOME=/nonexistent",
		"AWS_SECRET_ACCESS_KEY=secret-secret", "GOCOVERDIR=" + t.TempDir()}, o.Env...)
	c := remote.New(o)
	c.Configure(remotes)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// kinds are the engines, each as a remote that holds what was put at it.
var kinds = []string{"file", "https", "s3", "oci"}

// fixture is a remote for tests: of one of the kinds, in a directory or in memory.
type fixture struct {
	*remote.Client
	kind     string
	config   remote.Config
	env      []string
	dir      string        // file, https
	s3       *fakeS3       // s3
	registry *fakeRegistry // oci
	memory   interface {   // the one of the two that it is; nil: dir
		change(object string, to func([]byte) []byte) bool
		put(object string, data []byte, modified time.Time)
	}
	proxy *proxy // https, s3, oci
	fault atomic.Pointer[func(http.ResponseWriter, *http.Request) bool]
}

const name = "fleet"

// newFixture makes a remote. Faults come between the client and the server.
func newFixture(t testing.TB, kind string) *fixture {
	f := &fixture{kind: kind, dir: t.TempDir(),
		config: remote.Config{Name: name, Connect: 2 * time.Second}}
	var handler http.Handler
	switch kind {
	case "file":
		f.config.URL = "file://" + f.dir
	case "https":
		handler = http.FileServer(http.Dir(f.dir))
	case "s3":
		f.s3 = &fakeS3{objects: make(map[string]fakeObject)}
		handler, f.memory, f.config.URL = f.s3, f.s3, "s3://bucket/some/prefix"
	case "oci":
		f.registry = newFakeRegistry()
		handler, f.memory = f.registry, f.registry
	}
	if handler != nil {
		address := f.serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if fault := f.fault.Load(); fault == nil || *fault == nil || !(*fault)(w, r) {
				handler.ServeHTTP(w, r)
			}
		}))
		f.proxy = newProxy(t, strings.TrimPrefix(address, "https://"))
		host := f.proxy.listener.Addr().String()
		switch kind {
		case "https":
			f.config.URL = "https://" + host
		case "oci":
			f.config.URL = "oci://" + host + "/team/builds"
		default:
			f.config.Endpoint = "https://" + host
		}
	}
	f.Client = client(t, f.env, f.config)
	return f
}

// serve starts a server that the fixture's helper trusts, and returns its address.
func (f *fixture) serve(t testing.TB, handler http.Handler) string {
	server := httptest.NewTLSServer(handler)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(server.Close)
	cert := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
		Bytes: server.Certificate().Raw}), 0o600))
	f.env = append(f.env, "SSL_CERT_FILE="+cert) // all such servers have one certificate
	return server.URL
}

// writer returns a client that can write to the remote: for https that is one of its directory.
func (f *fixture) writer(t testing.TB) *remote.Client {
	if f.kind != "https" {
		return f.Client
	}
	return client(t, nil, remote.Config{Name: name, URL: "file://" + f.dir})
}

// change replaces an object by what the function makes of it; nil removes it.
func (f *fixture) change(t testing.TB, object string, to func([]byte) []byte) {
	if f.memory != nil {
		require.True(t, f.memory.change(object, to), object)
		return
	}
	at := filepath.Join(f.dir, object)
	old, err := os.ReadFile(at)
	require.NoError(t, err)
	next := to(old)
	if next == nil {
		require.NoError(t, os.Remove(at))
		return
	}
	require.NoError(t, os.WriteFile(at, next, 0o600))
}

// exported is a build as a publisher has it.
type exported struct {
	card     *portable.Card
	manifest []byte
	blobs    []remote.Blob
	files    map[string][]byte
	layers   []portable.Layer
}

var buildKey, otherKey = portable.Hash{1}, portable.Hash{9}

func randomBytes(seed byte, size int) []byte {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// export makes a build of a small graph and a large file.
func export(t testing.TB, large []byte) *exported { return exportOf(t, buildKey, large) }

func exportOf(t testing.TB, key portable.Hash, large []byte) *exported {
	e := &exported{files: map[string][]byte{"m.onnx": bytes.Repeat([]byte("graph "), 1000),
		"m.bin": large}}
	b := &portable.Build{Signer: signer(t), Config: portable.Config{BuildKey: key,
		Record: []byte("record"),
		EPs:    []portable.EP{{Name: "E"}}, ORTVersion: "1", Route: "compile_api", Graph: "m.onnx",
		IRVersion: 10}}
	for _, f := range []string{"m.onnx", "m.bin"} {
		b.Files = append(b.Files, portable.Source{Name: f, Size: int64(len(e.files[f])),
			From: bytes.NewReader(e.files[f])})
	}
	dir := t.TempDir()
	w, err := portable.Create(dir)
	require.NoError(t, err)
	e.card, err = w.Add(context.Background(), b)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	all, err := filepath.Glob(filepath.Join(dir, "blobs/sha256/*"))
	require.NoError(t, err)
	for _, at := range all {
		f, err := os.Open(at)
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Close() })
		info, err := f.Stat()
		require.NoError(t, err)
		blob := remote.Blob{File: f}
		blob.Size = info.Size()
		require.NoError(t, blob.Digest.UnmarshalText([]byte("sha256:"+filepath.Base(at))))
		e.blobs = append(e.blobs, blob)
		if blob.Digest == e.card.Digest {
			e.manifest, err = os.ReadFile(at)
			require.NoError(t, err)
		}
	}
	e.layers, err = portable.ParseLayers("manifest", e.manifest)
	require.NoError(t, err)
	return e
}

var signer = func() func(testing.TB) *portable.Signer {
	private, _, _, err := portable.GenerateKey(false)
	return func(t testing.TB) *portable.Signer {
		require.NoError(t, err)
		s, err := portable.ParseSigner("key", private)
		require.NoError(t, err)
		return s
	}
}()

// uploads returns how many blobs are uploaded. A registry gets the manifests with the card: those
// of the build and its signature, and the card.
func (e *exported) uploads(kind string) int {
	if kind == "oci" {
		return len(e.blobs) - 3
	}
	return len(e.blobs)
}

func (e *exported) publish(t testing.TB, c *remote.Client) (remote.Sent, remote.Put) {
	sent, err := c.PutBlobs(t.Context(), name, e.blobs, nil)
	require.NoError(t, err)
	put, err := c.PutCard(t.Context(), name, remote.CardKeys{Build: buildKey,
		Requests: []portable.Hash{otherKey}}, e.card.Raw)
	require.NoError(t, err)
	return sent, put
}

// fetch fetches a build, and returns what its files have then.
func (e *exported) fetch(t testing.TB, ctx context.Context, c *remote.Client,
	seeds ...[]byte) (got [][]byte, p remote.Progress, err error) {
	f := remote.Fetch{Manifest: e.manifest}
	for range e.layers {
		f.Files = append(f.Files, temporary(t, nil))
	}
	for _, s := range seeds {
		f.Seeds = append(f.Seeds, temporary(t, s))
	}
	p, err = c.Fetch(ctx, name, f)
	for _, file := range f.Files {
		text, bad := os.ReadFile(file.Name())
		require.NoError(t, bad)
		got = append(got, text)
	}
	return got, p, err
}

func (e *exported) requireEqual(t testing.TB, got [][]byte) {
	for i, l := range e.layers {
		require.True(t, bytes.Equal(e.files[l.File.Name], got[i]), "%s: %d bytes", l.File.Name,
			len(got[i]))
	}
}

func temporary(t testing.TB, data []byte) *os.File {
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	_, err = f.Write(data)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// fakeS3 is a bucket in memory, as far as the helper uses one. It checks no signature.
type fakeS3 struct {
	mu       sync.Mutex // guards the fields below
	objects  map[string]fakeObject
	requests []string
	ignore   bool // conditions are ignored, as by some stores
}

type fakeObject struct {
	data     []byte
	modified time.Time
}

func (o fakeObject) etag() string {
	sum := sha256.Sum256(append([]byte(o.modified.String()), o.data...))
	return `"` + hex.EncodeToString(sum[:16]) + `"`
}

func (s *fakeS3) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key, ok := strings.CutPrefix(r.URL.Path, "/bucket/")
	s.requests = append(s.requests, r.Method+" "+key)
	o, there := s.objects[key]
	switch {
	case !ok:
		w.WriteHeader(http.StatusNotFound)
	case r.URL.Query().Has("versioning"):
		fmt.Fprint(w, "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>")
	case r.URL.Query().Has("list-type"):
		s.list(w, r.URL.Query().Get("prefix"))
	case r.Method == http.MethodPut:
		match := r.Header.Get("If-Match")
		if !s.ignore && (there && r.Header.Get("If-None-Match") == "*" || match != "" &&
			match != o.etag()) {
			w.WriteHeader(http.StatusPreconditionFailed)
			return
		}
		from := r.Header.Get("X-Amz-Copy-Source")
		if sum := r.Header.Get("X-Amz-Content-Sha256"); from == "" && len(sum) == 64 &&
			sum != portable.DigestOf(body).Hex() {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		if from != "" {
			body = o.data
		}
		o = fakeObject{body, time.Now()}
		s.objects[key] = o
		w.Header().Set("ETag", o.etag())
		if from != "" {
			fmt.Fprintf(w,
				"<CopyObjectResult><ETag>%s</ETag><LastModified>%s</LastModified></"+
					"CopyObjectResult>",
				o.etag(), o.modified.UTC().Format(time.RFC3339))
		}
	case r.Method == http.MethodDelete:
		delete(s.objects, key)
		w.WriteHeader(http.StatusNoContent)
	case !there:
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, "<Error><Code>NoSuchKey</Code></Error>")
	default:
		w.Header().Set("ETag", o.etag())
		http.ServeContent(w, r, "", o.modified, bytes.NewReader(o.data))
	}
}

func (s *fakeS3) list(w http.ResponseWriter, prefix string) {
	type content struct {
		Key, LastModified string
		Size              int
	}
	var out struct {
		XMLName  xml.Name `xml:"ListBucketResult"`
		Contents []content
	}
	for key, o := range s.objects {
		if strings.HasPrefix(key, prefix) {
			out.Contents = append(out.Contents, content{key,
				o.modified.UTC().Format(time.RFC3339), len(o.data)})
		}
	}
	slices.SortFunc(out.Contents, func(a, b content) int { return strings.Compare(a.Key, b.Key) })
	_ = xml.NewEncoder(w).Encode(out)
}

func (s *fakeS3) change(object string, to func([]byte) []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	object = "some/prefix/" + object
	o, ok := s.objects[object]
	if o.data = to(bytes.Clone(o.data)); o.data == nil {
		delete(s.objects, object)
	} else {
		s.objects[object] = o
	}
	return ok
}

func (s *fakeS3) put(object string, data []byte, modified time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.objects["some/prefix/"+object] = fakeObject{data, modified}
}

// put makes an object of an age, as another tool would.
func (f *fixture) put(t testing.TB, object string, data []byte, modified time.Time) {
	if f.memory != nil {
		f.memory.put(object, data, modified)
		return
	}
	at := filepath.Join(f.dir, object)
	require.NoError(t, os.MkdirAll(filepath.Dir(at), 0o700))
	require.NoError(t, os.WriteFile(at, data, 0o600))
	require.NoError(t, os.Chtimes(at, modified, modified))
}

func (f *fixture) modified(t testing.TB, object string) time.Time {
	if f.kind == "s3" {
		f.s3.mu.Lock()
		defer f.s3.mu.Unlock()
		return f.s3.objects["some/prefix/"+object].modified
	}
	info, err := os.Stat(filepath.Join(f.dir, object))
	require.NoError(t, err)
	return info.ModTime()
}
