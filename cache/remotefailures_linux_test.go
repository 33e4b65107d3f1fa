package cache

import (
	"bytes"
	"cmp"
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
	"github.com/epcached/epcached/store"
)

// front is a remote with two builds, and a server before it that fails as it is told. For https it
// is a web server over the directory that the publisher writes to.
type front struct {
	*bucket
	kind            string
	dir             string // in which the server keeps it
	private, public string
	model           string // path
	files           map[string]string
	card, other     *portable.Card // of the model's build, and of another one

	fault    atomic.Pointer[badServer]
	mu       sync.Mutex // guards the fields below
	objects  map[string][]byte
	requests []string
}

// badServer answers a request in the server's place; false: the server answers.
type badServer func(w http.ResponseWriter, r *http.Request, server http.Handler) bool

// newFront returns a front with an empty remote.
func newFront(t *testing.T, kind string) *front {
	f := &front{bucket: newBucket(), kind: kind, dir: memoryDir(t),
		objects: make(map[string][]byte)}
	engine := kind
	if kind == "https" {
		engine = "file"
	}
	f.engine, f.helper = remoteIn(t, engine, f.dir), newHelper(t)
	f.helper.Configure([]remote.Config{f.engine})
	t.Cleanup(func() { _ = f.helper.Close() }) // its process ends with the test
	if f.reads = f.engine; kind != "file" {
		f.listen(t)
	}
	return f
}

// fill has a machine publish two builds.
func (f *front) fill(t *testing.T) {
	f.private, f.public = fleetKeys(t)
	f.model = largeModel(t, 700_000)
	a := f.publisher(t, f.private)
	for _, model := range []*os.File{a.model(2), a.openFile(f.model)} {
		made := a.acquire(a.request(model))
		f.built, f.other = portable.Hash(made.Build.BuildKey), f.card
		f.waitForCards(t, 1)
		var err error
		f.card, err = portable.ParseCard("card", f.allCards(t)[0])
		require.NoError(t, err)
		f.files = a.read(made)
	}
}

func (f *front) publisher(t *testing.T, key string, change ...func(*Options)) *bench {
	return machine(t, f.bucket, remotes.Remote{Publish: true, SigningKey: key, Lease: true,
		Trust: []string{f.public}}, change...)
}

// listen starts the server.
func (f *front) listen(t *testing.T) {
	handler := http.FileServer(http.Dir(f.dir))
	if f.kind != "https" {
		behind, err := url.Parse(f.engine.Endpoint)
		require.NoError(t, err)
		proxy := httputil.NewSingleHostReverseProxy(behind)
		proxy.ErrorLog = log.New(io.Discard, "", 0) // clients that go
		handler = proxy
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		f.requests = append(f.requests, fmt.Sprint(r.Method, " ", r.URL, " ", r.Header))
		f.mu.Unlock()
		if fault := f.fault.Load(); fault != nil && (*fault)(w, r, handler) ||
			f.replaced(w, r) {
			return
		}
		handler.ServeHTTP(w, r)
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	cert := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
		Bytes: s.Certificate().Raw}), 0o600))
	f.env = []string{"SSL_CERT_FILE=" + cert}
	f.to(&f.reads, s.URL)
}

// to has a remote be at another address.
func (f *front) to(c *remote.Config, address string) {
	host := strings.TrimPrefix(address, "https://")
	switch f.kind {
	case "https":
		c.URL = address
	case "oci":
		c.URL, c.Endpoint = "oci://"+host+"/team/builds", address
	default:
		c.Endpoint = address
	}
}

// Objects of the build.
func (f *front) cardName() string { return "builds/*/" + f.built.String() }
func (f *front) blobName(media string) string {
	i := slices.IndexFunc(f.card.Manifest.Layers, func(d portable.Descriptor) bool {
		return d.MediaType == media && d.Size > 10_000 || d.MediaType == media && media != mediaFile
	})
	return "blobs/sha256/" + f.card.Manifest.Layers[i].Digest.Hex()
}

const mediaFile, mediaChunks = portable.MediaFile, portable.MediaChunks

// replaced answers with an object that a test has put in the place of the server's.
func (f *front) replaced(w http.ResponseWriter, r *http.Request) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for object, data := range f.objects {
		dir, name := filepath.Dir(object), filepath.Base(object)
		is := strings.HasSuffix(r.URL.Path, "/v1/"+object) || dir != "blobs/sha256" &&
			strings.HasSuffix(r.URL.Path, "/"+name) && strings.Contains(r.URL.Path, "/v1/builds/")
		if f.kind == "oci" {
			is = strings.HasSuffix(r.URL.Path, "/blobs/sha256:"+name) ||
				strings.HasSuffix(r.URL.Path, "/manifests/b-"+name)
		}
		if !is {
			continue
		}
		if data == nil {
			w.WriteHeader(http.StatusNotFound)
			return true
		}
		sum := portable.DigestOf(data)
		w.Header().Set("ETag", `"`+sum.Hex()[:32]+`"`)
		w.Header().Set("Content-Type", "application/octet-stream")
		if strings.Contains(r.URL.Path, "/manifests/") {
			w.Header().Set("Content-Type", portable.MediaIndex)
			w.Header().Set("Docker-Content-Digest", sum.String())
		}
		http.ServeContent(w, r, "", time.Now(), bytes.NewReader(data))
		return true
	}
	return false
}

// serves puts bytes in the place of an object, nil: it is not there, until it is undone.
func (f *front) serves(t *testing.T, object string, to func(old []byte) []byte) (undo func()) {
	if f.kind == "file" || f.kind == "https" {
		found, err := filepath.Glob(filepath.Join(f.dir, "v1", object))
		require.NoError(t, err)
		require.Len(t, found, 1, object)
		old, err := os.ReadFile(found[0])
		require.NoError(t, err)
		if data := to(bytes.Clone(old)); data == nil {
			require.NoError(t, os.Remove(found[0]))
		} else {
			require.NoError(t, os.WriteFile(found[0], data, 0o600))
		}
		return func() { require.NoError(t, os.WriteFile(found[0], old, 0o600)) }
	}
	old := f.card.Raw
	if strings.HasPrefix(object, "blobs/") { // the true one, of the server
		old = f.fetchObject(t, object)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.objects[object] = to(bytes.Clone(old))
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.objects, object)
	}
}

// fetchObject reads a blob from where the server keeps it.
func (f *front) fetchObject(t *testing.T, object string) (raw []byte) {
	require.NoError(t, filepath.WalkDir(f.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && d.Name() == filepath.Base(object) {
			raw, err = os.ReadFile(path)
		}
		return err
	}))
	require.NotEmpty(t, raw, object)
	return raw
}

// mishap is a way in which a remote fails a machine.
type mishap struct {
	row string // of the table of the design, section 7
	// kinds that it is tried on; "": on all. The comment beside it says why not on all.
	kinds string
	// server makes the server fail.
	server badServer
	// object and to change an object at the remote.
	object func(*front) string
	to     func(*front, []byte) []byte
	// here changes what the machine has: its configuration of the remote and its helper.
	here    func(t *testing.T, f *front, r *remotes.Remote, o *remote.Options)
	options func(*Options)
	bench   func(*bench)
	why     string // expression: what is said of the remote
	hit     bool   // it is harmless
}

// Parts of rows.
func answers(code int, header ...string) badServer {
	return func(w http.ResponseWriter, _ *http.Request, _ http.Handler) bool {
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(code)
		return true
	}
}

// ofBlobs limits a fault to reads of blobs.
func ofBlobs(do badServer) badServer {
	return func(w http.ResponseWriter, r *http.Request, server http.Handler) bool {
		return strings.Contains(r.URL.Path, "/blobs/sha256") && do(w, r, server)
	}
}

// cutWriter passes some bytes of an answer on, and then stalls, or ends the connection.
type cutWriter struct {
	http.ResponseWriter
	left   int
	stalls <-chan struct{} // until it is closed; nil: it does not
}

// Write implements io.Writer.
func (c *cutWriter) Write(b []byte) (int, error) {
	n, _ := c.ResponseWriter.Write(b[:min(len(b), c.left)]) // the client may have gone
	c.left -= n
	if n < len(b) {
		_ = http.NewResponseController(c.ResponseWriter).Flush() // likewise
		if c.stalls != nil {
			<-c.stalls
		}
		panic(http.ErrAbortHandler)
	}
	return n, nil
}

// cut is a server that ends its answers with blobs after some bytes.
func cut(stalls bool) badServer {
	return ofBlobs(func(w http.ResponseWriter, r *http.Request, server http.Handler) bool {
		c := &cutWriter{ResponseWriter: w, left: 20_000}
		if stalls {
			c.stalls = r.Context().Done()
		}
		server.ServeHTTP(c, r)
		return true
	})
}

// dribbles is a server that sends 20 kB a second.
func dribbles(w http.ResponseWriter, r *http.Request, server http.Handler) bool {
	server.ServeHTTP(&slowWriter{w, r.Context()}, r)
	return true
}

type slowWriter struct {
	http.ResponseWriter
	ctx context.Context
}

// Write implements io.Writer.
func (s *slowWriter) Write(b []byte) (n int, err error) {
	for n < len(b) && err == nil && s.ctx.Err() == nil {
		var some int
		some, err = s.ResponseWriter.Write(b[n:min(len(b), n+1000)])
		n += some
		_ = http.NewResponseController(s.ResponseWriter).Flush() // the client may have gone
		time.Sleep(50 * time.Millisecond)
	}
	return n, cmp.Or(err, s.ctx.Err())
}

func theCard(f *front) string   { return f.cardName() }
func theBlob(f *front) string   { return f.blobName(mediaFile) }
func theChunks(f *front) string { return f.blobName(mediaChunks) }

func flipped(_ *front, raw []byte) []byte {
	raw[len(raw)/2] ^= 1
	return raw
}

func absent(*front, []byte) []byte { return nil }

func bytesOf(raw []byte) func(*front, []byte) []byte {
	return func(*front, []byte) []byte { return raw }
}

func shorter(_ *front, raw []byte) []byte { return raw[:len(raw)/2] }

func impatient(_ *testing.T, _ *front, r *remotes.Remote, _ *remote.Options) {
	r.LoseAtMost = time.Second
}

func helperOf(script string) func(*testing.T, *front, *remotes.Remote, *remote.Options) {
	return func(t *testing.T, _ *front, _ *remotes.Remote, o *remote.Options) {
		o.Program = filepath.Join(t.TempDir(), "helper")
		if script != "" {
			require.NoError(t, os.WriteFile(o.Program, []byte("#!/bin/sh\n"+script), 0o700))
		}
	}
}

// lyingClient is a helper that sends other cards, and other bytes.
type lyingClient struct {
	remotes.Client
	cards [][]byte // nil: the true ones
}

func (c *lyingClient) Look(ctx context.Context, r string, k remote.Key,
	budget time.Duration) ([][]byte, error) {
	if c.cards != nil {
		return c.cards, nil
	}
	return c.Client.Look(ctx, r, k, budget)
}

func (c *lyingClient) Fetch(ctx context.Context, _ string, f remote.Fetch) (remote.Progress,
	error) {
	return remote.Progress{}, writeWrongBytes(ctx, f)
}

const network = "https s3 oci" // a directory has no server that fails

// mishaps are the rows of the table of the design that concern a remote. The others are tested
// where they happen: bundles in cmd/epcached (TestRefusedImportsStoreNothing) and portable
// (TestTricksOfTarsAreRefused), layers in cmd/epcached (TestDamageInALayerIsNeverServed,
// TestLayersHaveAnOrderAndMayBeMissing), trust documents in trust_test.go, and a daemon that is
// killed in TestADaemonKilledWhileItChecksAFetchLeavesNothing.
var mishaps = map[string]mishap{
	"no network": {row: "no network", kinds: network, why: "connection refused|no route",
		here: func(t *testing.T, f *front, r *remotes.Remote, _ *remote.Options) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			require.NoError(t, l.Close())
			f.to(&r.Config, "https://"+l.Addr().String())
		}},
	"no directory": {row: "no network", kinds: "file", why: "no such file",
		here: func(_ *testing.T, _ *front, r *remotes.Remote, _ *remote.Options) {
			r.URL = "file:///nonexistent/stick"
		}},
	"no such host": {row: "no network", kinds: network, why: "lookup|no answer",
		here: func(_ *testing.T, f *front, r *remotes.Remote, _ *remote.Options) {
			f.to(&r.Config, "https://host.invalid:1")
		}},
	"black hole": {row: "no network", kinds: network, why: "no answer within ",
		here: func(t *testing.T, f *front, r *remotes.Remote, _ *remote.Options) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			t.Cleanup(func() { _ = l.Close() })
			f.to(&r.Config, "https://"+l.Addr().String())
			r.Connect = 300 * time.Millisecond
		}},
	"another authority": {row: "no network", kinds: network, why: "certificate",
		here: func(_ *testing.T, _ *front, _ *remotes.Remote, o *remote.Options) {
			o.Env = []string{"HOME=/nonexistent", "SSL_CERT_FILE=/nonexistent"}
		}},
	"no helper": {row: "no network", here: helperOf(""), why: "no such file"},
	"helper crashes": {row: "no network", here: helperOf("exit 3\n"),
		why: "helper|epcached-remote"},
	"stalls": {row: "slow", kinds: network, server: cut(true), here: impatient,
		why: "a request may lose 1s"},
	"slow": {row: "slow", kinds: network, server: ofBlobs(dribbles), here: impatient,
		why: "a request may lose 1s"},
	"ends early": {row: "slow", kinds: network, server: cut(false),
		why: "ended early|EOF|reset|[Cc]onnection closed"},
	"403": {row: "403", kinds: network, server: answers(403), why: "403"},
	"401": {row: "403", kinds: network, server: answers(401), why: "401"},
	"429": {row: "403", kinds: network, server: answers(429, "Retry-After", "9"),
		why: "429"},
	"500": {row: "403", kinds: network, server: answers(500), why: "500"},
	"503": {row: "403", kinds: network, server: answers(503), why: "503"},
	"404": {row: "403", kinds: network, server: answers(404),
		why: "does not have|404|no such|cannot be listed"},
	"403 blob": {row: "403", kinds: network, server: ofBlobs(answers(403)), why: "403"},
	"500 blob": {row: "403", kinds: network, server: ofBlobs(answers(500)), why: "500"},
	"another page": {row: "403", kinds: network, why: "v1/builds|EOF|Last-Modified",
		server: func(w http.ResponseWriter, _ *http.Request, _ http.Handler) bool {
			fmt.Fprint(w, "<html>Please log in to this hotel's network</html>")
			return true
		}},
	"unsigned": {row: "card", object: theCard, why: "not signed|no signature",
		to: func(f *front, _ []byte) []byte {
			return (*portable.Signer)(nil).Sign(f.card, portable.Predicate{})
		}},
	"another key": {row: "card", why: "not trusted here",
		here: func(t *testing.T, _ *front, r *remotes.Remote, _ *remote.Options) {
			_, other := fleetKeys(t)
			r.Trust = []string{other}
		}},
	// It is a replay as well: it counted once.
	"expired": {row: "card", object: theCard, why: "expired on",
		to: func(f *front, _ []byte) []byte { return f.signed(time.Now().Add(-time.Hour)) }},
	"signed again": {row: "replay", object: theCard, hit: true,
		to: func(f *front, _ []byte) []byte { return f.signed(time.Now().Add(time.Hour)) }},
	"other build key": {row: "card", object: theCard, why: "is of the build key",
		to: func(f *front, _ []byte) []byte { return f.other.Raw }},
	"helper sends another card": {row: "card", why: "it answers another request"},
	"large card": {row: "card", object: theCard, why: "more than",
		to: bytesOf(bytes.Repeat([]byte(" "), remote.MaxCard+1))},
	"JSON bomb": {row: "card", object: theCard, why: "card|v1/builds",
		to: bytesOf(bytes.Repeat([]byte("["), 200_000))},
	"flipped card": {row: "card", object: theCard, to: flipped, why: "v1/builds"},
	"missing blob": {row: "blob", object: theBlob, to: absent, why: "lacks a blob of its card"},
	"short blob":   {row: "blob", object: theBlob, to: shorter, why: " bytes, not "},
	"flipped blob": {row: "blob", object: theBlob, to: flipped, why: "chunk at "},
	"missing chunks": {row: "blob", object: theChunks, to: absent,
		why: "lacks a blob of its card"},
	"short chunks":   {row: "blob", object: theChunks, to: shorter, why: "SHA-256"},
	"flipped chunks": {row: "blob", object: theChunks, to: flipped, why: "SHA-256"},
	"zstd bomb": {row: "blob", object: theBlob, why: " bytes, not |chunk at",
		to: func(_ *front, raw []byte) []byte {
			enc, err := zstd.NewWriter(nil)
			if err != nil {
				panic(err)
			}
			bomb := enc.EncodeAll(make([]byte, 64<<20), nil)
			return append(bomb, make([]byte, len(raw))...)[:len(raw)]
		}},
	"helper lies about bytes": {row: "blob", why: "BLAKE3"},
	"does not load": {row: "does not load", why: "the driver is too old",
		bench: func(b *bench) {
			b.compiler.CheckFault = func(compilers.CheckJob) *compilers.CheckResult {
				if b.compiler.Compiles.Load() > 0 {
					return nil
				}
				return &compilers.CheckResult{Outcome: compilers.Failed, Code: 11,
					Text: "the driver is too old"}
			}
		}},
	"disk full": {row: "disk full", why: "must stay free",
		options: func(o *Options) {
			o.Space = store.SpaceOptions{Floor: store.Amount{Percent: 100}}
		}},
	"over budget": {row: "disk full", why: "budget",
		options: func(o *Options) {
			o.Space = store.SpaceOptions{Budget: store.Amount{Bytes: 100_000}}
		}},
}

// signed is the card with its signer's statement that counts until then.
func (f *front) signed(until time.Time) []byte {
	text, err := os.ReadFile(f.private)
	if err != nil {
		panic(err)
	}
	signer, err := portable.ParseSigner("key", text)
	if err != nil {
		panic(err)
	}
	says, err := signer.Verify(f.card, time.Now())
	if err != nil {
		panic(err)
	}
	says.NotAfter = until.UTC().Truncate(time.Second)
	return signer.Sign(f.card, *says)
}

// A client gets its model, with the right bytes, whatever a remote does. The remote receives
// nothing but reads, which have neither names nor paths.
func TestEveryFailureOnEachKindOfRemote(t *testing.T) {
	for _, kind := range []string{"file", "https", "s3", "oci"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			f := newFront(t, kind)
			f.fill(t)
			for name, row := range mishaps {
				if row.kinds != "" && !strings.Contains(row.kinds, kind) {
					continue
				}
				t.Run(name, func(t *testing.T) { f.tryFailure(t, name, &row) })
			}
			t.Run("publishers", f.tryPublishers)
			if kind != "file" {
				t.Run("the seed is kept", f.tryAgain)
			}
			t.Run("held lease", f.tryHeldLease)
			t.Run("well again", func(t *testing.T) {
				f.tryFailure(t, "", &mishap{hit: true})
			})
			for _, heard := range f.requests {
				require.Regexp(t, "^(GET|HEAD) ", heard)
				require.NotRegexp(t, "large|onnx|/state|/tmp|/dev", heard) // names and paths
			}
		})
	}
}

func (f *front) tryFailure(t *testing.T, name string, row *mishap) {
	program, err := helperProgram()
	require.NoError(t, err)
	r := remotes.Remote{Config: f.reads, Ask: true, Lease: true, Trust: []string{f.public},
		LoseAtMost: 10 * time.Second}
	o := remote.Options{Program: program, Env: append([]string{"AWS_ACCESS_KEY_ID=user",
		"AWS_SECRET_ACCESS_KEY=secret-secret", "HOME=/nonexistent"}, f.env...)}
	if row.here != nil {
		row.here(t, f, &r, &o)
	}
	if row.object != nil {
		defer f.serves(t, row.object(f), func(old []byte) []byte { return row.to(f, old) })()
	}
	if row.server != nil {
		f.fault.Store(&row.server)
		defer f.fault.Store(nil)
	}
	b := newBenchWith(t, func(opts *Options) {
		opts.Remotes, opts.RemoteClient = []remotes.Remote{r}, remote.New(o)
		switch name {
		case "helper sends another card":
			opts.RemoteClient = &lyingClient{opts.RemoteClient, [][]byte{f.other.Raw}}
		case "helper lies about bytes":
			opts.RemoteClient = &lyingClient{opts.RemoteClient, nil}
		}
		if row.options != nil {
			row.options(opts)
		}
	})
	if row.bench != nil {
		row.bench(b)
	}
	began := time.Now()
	got := b.acquire(b.request(b.openFile(f.model)))
	require.Less(t, time.Since(began), r.LoseAtMost+10*time.Second)
	require.Equal(t, f.files, b.read(got))
	said := b.explainsRemotes(b.request(b.openFile(f.model)))
	if row.hit {
		require.Equal(t, request.Hit, got.Outcome, said)
		require.Zero(t, b.compiler.Compiles.Load())
		return
	}
	require.Equal(t, request.Compiled, got.Outcome)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
	require.Regexp(t, row.why, said)
	require.Zero(t, b.reserved())
}

// A transfer without a compile behind it that fails is continued by the next one.
func (f *front) tryAgain(t *testing.T) {
	b := machine(t, f.bucket, remotes.Remote{Trust: []string{f.public}})
	fetch := func() *request.Request {
		r := b.request(b.openFile(f.model))
		r.OnMiss = request.Fetch
		return r
	}
	var once atomic.Bool
	ends := badServer(func(w http.ResponseWriter, r *http.Request, server http.Handler) bool {
		if !strings.HasSuffix(r.URL.Path, strings.TrimPrefix(f.blobName(mediaFile),
			"blobs/sha256/")) {
			return false
		}
		if once.CompareAndSwap(false, true) {
			server.ServeHTTP(&cutWriter{ResponseWriter: w, left: 400_000}, r)
			return true
		}
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	})
	f.fault.Store(&ends)
	b.refused(fetch())
	require.True(t, once.Load())
	require.NotZero(t, b.reserved(), "what arrived takes space")
	f.fault.Store(nil)
	got := b.acquire(fetch())
	require.Equal(t, request.Hit, got.Outcome)
	require.Equal(t, f.files, b.read(got))
	require.Greater(t, b.cache.RemoteStatus()[0].SeedBytes, int64(200_000))
	require.Zero(t, b.reserved())
}

// A publisher that dies before its card is there leaves blobs, which no machine takes for a build.
// Of two that publish one build at the same time, one has its card there.
func (f *front) tryPublishers(t *testing.T) {
	dies := &mortal{diesAt: putBlobs, once: new(atomic.Bool)}
	dead := f.publisher(t, f.private, func(o *Options) {
		dies.Client = o.RemoteClient
		o.RemoteClient = dies
	})
	other, _ := fleetKeys(t)
	writers := []*bench{f.publisher(t, f.private), f.publisher(t, other)}
	b := machine(t, f.bucket, remotes.Remote{Trust: []string{f.public}})
	made := dead.acquire(dead.request(dead.model(3)))
	require.Eventually(t, dies.dead.Load, soon, time.Millisecond)
	got := b.acquire(b.request(b.model(3)))
	require.Equal(t, request.Compiled, got.Outcome)
	require.Equal(t, dead.read(made), b.read(got))

	var all errgroup.Group
	for _, w := range writers {
		r := w.request(w.model(4))
		all.Go(func() error {
			_, err := w.cache.Acquire(t.Context(), r, nil)
			return err
		})
	}
	require.NoError(t, all.Wait())
	f.built = portable.Hash(writers[0].list()[0].Build.BuildKey)
	f.waitForCards(t, 1)
	got = b.acquire(b.request(b.model(4)))
	require.Equal(t, writers[0].read(writers[0].acquire(writers[0].request(writers[0].model(4)))),
		b.read(got))
}

// A lease that is held for ever costs a bounded time, also if the machine's clock is wrong.
func (f *front) tryHeldLease(t *testing.T) {
	// The request may lose a quarter of it to the remote, and this machine may be busy.
	const length = 1600 * time.Millisecond
	b := machine(t, f.bucket, remotes.Remote{Trust: []string{f.public}, Lease: true},
		func(o *Options) { o.Remotes[0].Connect = time.Second })
	b.later.Store(int64(time.Hour))
	r := b.request(b.model(5))
	b.expects(r, length)
	l, err := f.helper.Lease(t.Context(), "fleet", remote.LeaseRequest{Holder: "another machine",
		Key: portable.Hash(b.planned(r).Plan.BuildKey), Estimate: length, TTL: time.Hour})
	require.NoError(t, err)
	began := time.Now()
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
	require.Less(t, time.Since(began), 12*time.Second)
	waited := b.cache.RemoteStatus()[0].LeasesWaited
	if f.kind == "oci" { // registries have none
		require.Equal(t, remote.NotOffered, l.State)
		require.Zero(t, waited)
		return
	}
	require.Equal(t, remote.Granted, l.State)
	require.EqualValues(t, 1, waited, b.explainsRemotes(r))
	require.Greater(t, time.Since(began), 2*time.Second)
}

// A remote that sent wrong bytes three times in an hour is not asked until that has passed. That is
// reported, as is a remote that does not answer, by one event in ten minutes.
func TestARemoteThatSendsWrongBytesIsSetAside(t *testing.T) {
	store, _, public, _ := published(t)
	store.fetchFault = writeWrongBytes
	b := machine(t, store, remotes.Remote{Trust: []string{public}})
	for range 3 {
		require.NotContains(t, b.explainsRemotes(b.request(b.model(1))), wrongBytes)
		b.waits(2 * time.Minute) // the negative cache is empty again
		r := b.request(b.model(1))
		r.OnMiss = request.Fetch
		require.Regexp(t, "BLAKE3|"+wrongBytes, b.refused(r).Text)
	}
	require.EqualValues(t, 3, store.fetches.Load())
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(2))).Outcome)
	looks := store.looks.Load()
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(3))).Outcome)
	require.Equal(t, looks, store.looks.Load())
	require.Contains(t, b.explainsRemotes(b.request(b.model(1))), wrongBytes)
	doctor, err := b.cache.Queries.Doctor().Examine(t.Context(), b.self())
	require.NoError(t, err)
	require.Contains(t, doctor.String(), wrongBytes)
	require.Equal(t, "remote fleet: "+wrongBytes, b.toldOf(event.Remote))

	b.waits(time.Hour)
	store.fetchFault = nil
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)

	store.lookFault = func(context.Context) error { return remoteError("unreachable", "no route") }
	for range 3 {
		b.acquire(b.request(b.model(uint64(10 + store.looks.Load()))))
	}
	require.Equal(t, 1, strings.Count(b.toldOf(event.Remote), "no route"))
}

// wrongBytes is what is said of a remote that is set aside.
const wrongBytes = "it sent wrong bytes three times in an hour"
