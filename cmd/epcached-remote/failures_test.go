package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// proxy is a bad network between the helper and a server.
type proxy struct {
	listener net.Listener
	target   string
	mode     atomic.Pointer[network]
	mu       sync.Mutex // guards the field below
	conns    []net.Conn
}

// network is what becomes of a connection.
type network struct {
	hole  bool          // it is accepted, and never answered
	after int64         // bytes of the server, then it ends; 0: all
	reset bool          // by a reset; otherwise in order
	delay time.Duration // before each 256 bytes
}

func newProxy(t testing.TB, target string) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{listener: l, target: target}
	p.mode.Store(new(network))
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.keep(c)
			all.Go(func() { p.serve(c.(*net.TCPConn), p.mode.Load()) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		all.Wait()
	})
	return p
}

func (p *proxy) keep(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns = append(p.conns, c)
}

// cut closes what was accepted so far.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

// set changes the network; connections that exist end.
func (p *proxy) set(n network) {
	p.mode.Store(&n)
	p.cut()
}

func (p *proxy) serve(c *net.TCPConn, n *network) {
	if n.hole {
		return // it stays open
	}
	defer c.Close()
	s, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer s.Close()
	p.keep(s)
	go func() {
		_, _ = io.Copy(s, c)
		_ = s.Close()
	}()
	from := io.Reader(s)
	if n.after > 0 {
		from = io.LimitReader(s, n.after)
	}
	if n.delay == 0 {
		_, _ = io.Copy(c, from)
	}
	for n.delay > 0 {
		if _, err := io.CopyN(c, from, 256); err != nil {
			break
		}
		time.Sleep(n.delay)
	}
	if n.reset {
		time.Sleep(50 * time.Millisecond) // a client loses what it has not read before the reset
		_ = c.SetLinger(0)
	}
}

// answers is a server that fails: the handler comes first.
func status(code int, header ...string) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, _ *http.Request) bool {
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(code)
		return true
	}
}

// The rows of the failure table of the design, for the kinds that have a network.
var failures = map[string]struct {
	network network
	fault   func(http.ResponseWriter, *http.Request) bool
	is      error // of the look-up; nil: none, or any
	fetch   error // likewise; without an error the bytes are right
}{
	"black hole": {network: network{hole: true}, is: remote.ErrUnreachable,
		fetch: remote.ErrUnreachable},
	"reset at once": {network: network{after: 1, reset: true}, is: remote.ErrUnreachable,
		fetch: remote.ErrUnreachable},
	"reset in the middle": {network: network{after: 200 << 10, reset: true}},
	"ends early":          {network: network{after: 200 << 10}},
	"slow": {network: network{delay: 50 * time.Millisecond},
		fetch: context.DeadlineExceeded},
	"slow to begin": {network: network{delay: time.Second}, is: remote.ErrUnreachable,
		fetch: context.DeadlineExceeded},
	"500": {fault: status(500), is: remote.ErrUnreachable,
		fetch: remote.ErrUnreachable},
	"503": {fault: status(503, "Retry-After", "7"), is: remote.ErrUnreachable,
		fetch: remote.ErrUnreachable},
	"429": {fault: status(429, "Retry-After", "7"), is: remote.ErrUnreachable,
		fetch: remote.ErrUnreachable},
	"403": {fault: status(403), is: remote.ErrRefused, fetch: remote.ErrRefused},
	"401": {fault: status(401), is: remote.ErrRefused, fetch: remote.ErrRefused},
	"404": {fault: status(404), is: remote.ErrMissing, fetch: remote.ErrMissing},
	"header bomb": {fault: status(200, "X", strings.Repeat("x", 2*maxHeader)),
		is: remote.ErrUnreachable, fetch: remote.ErrUnreachable},
	"redirect to http": {fault: status(302, "Location", "http://127.0.0.1:1/"), is: errAny,
		fetch: errAny},
	"redirect for ever": {fault: status(302, "Location", "/again"), is: errAny, fetch: errAny},
	"another page": {fault: func(w http.ResponseWriter, _ *http.Request) bool {
		fmt.Fprint(w, "<html>Please log in to this hotel's network</html>")
		return true
	}, is: remote.ErrDamaged, fetch: remote.ErrDamaged},
	"endless": {fault: func(w http.ResponseWriter, r *http.Request) bool {
		for r.Context().Err() == nil {
			if _, err := w.Write(make([]byte, 1<<16)); err != nil {
				break
			}
		}
		return true
	}, is: remote.ErrDamaged, fetch: errAny},
	"ranges that are wrong": {fault: func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Range") == "" {
			return false
		}
		w.Header().Set("Content-Range", "bytes 5-6/7")
		w.WriteHeader(206)
		fmt.Fprint(w, "xy")
		return true
	}, fetch: remote.ErrDamaged},
}

// errAny stands for any error.
var errAny = errors.New("any error")

func TestFailuresAreAnsweredWithinTheBudget(t *testing.T) {
	for _, kind := range []string{"https", "s3", "oci"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, kind)
			e := export(t, randomBytes(1, 1<<20))
			e.publish(t, f.writer(t))
			for row, want := range failures {
				t.Run(row, func(t *testing.T) {
					f.Configure(nil) // a breaker of its own
					f.Configure([]remote.Config{f.config})
					f.fault.Store(&want.fault)
					f.proxy.set(want.network)
					requireIs := func(want, err error) {
						switch {
						case errors.Is(want, errAny), kind == "s3" &&
							errors.Is(want, remote.ErrDamaged):
							// minio-go finds that it is no answer of an S3 store
							require.Error(t, err)
						default:
							require.ErrorIs(t, err, want)
						}
					}
					looks, fetches := 10*time.Second, 10*time.Second // a loaded machine is slow
					if want.network.hole || want.network.delay > 0 || row == "endless" {
						looks, fetches = 500*time.Millisecond, 700*time.Millisecond
					}
					began := time.Now()
					cards, err := f.Look(t.Context(), name, remote.BuildKey(buildKey), looks)
					require.Less(t, time.Since(began), looks+time.Second)
					if want.is != nil {
						requireIs(want.is, err)
					} else if err == nil {
						require.Equal(t, [][]byte{e.card.Raw}, cards)
					}
					if row == "503" {
						e, is := errors.AsType[*remote.Error](err)
						require.True(t, is)
						require.Equal(t, 7*time.Second, e.RetryAfter)
					}
					ctx, cancel := context.WithTimeout(t.Context(), fetches)
					defer cancel()
					began = time.Now()
					got, _, err := e.fetch(t, ctx, f.Client)
					require.Less(t, time.Since(began), fetches+time.Second)
					if want.fetch == nil && err == nil { // it continued behind the last whole chunk
						e.requireEqual(t, got)
						return
					}
					if errors.Is(want.fetch, remote.ErrUnreachable) &&
						errors.Is(err, context.DeadlineExceeded) {
						return // its time was up before all attempts had failed
					}
					if want.fetch != nil {
						requireIs(want.fetch, err)
					}
				})
			}
			// The network is well again.
			f.fault.Store(nil)
			f.proxy.set(network{})
			f.Configure(nil)
			f.Configure([]remote.Config{f.config})
			got, _, err := e.fetch(t, t.Context(), f.Client)
			require.NoError(t, err)
			e.requireEqual(t, got)
		})
	}
}

func TestATransferContinuesBehindAReset(t *testing.T) {
	for _, kind := range []string{"https", "s3", "oci"} {
		f := newFixture(t, kind)
		e := export(t, randomBytes(1, 3<<20))
		e.publish(t, f.writer(t))
		f.proxy.set(network{after: 1500 << 10, reset: true})
		got, p, err := e.fetch(t, t.Context(), f.Client)
		require.NoError(t, err)
		e.requireEqual(t, got)
		require.Less(t, p.Wire, int64(4<<20))
	}
}

func TestDamageIsNeverFetched(t *testing.T) {
	enc, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	frame := enc.EncodeAll(make([]byte, 64<<20), nil)
	bomb := func([]byte) []byte { return bytes.Clone(frame) }
	damages := map[string]func([]byte) []byte{
		"first byte":  func(b []byte) []byte { b[0] ^= 1; return b },
		"middle byte": func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		"last byte":   func(b []byte) []byte { b[len(b)-1] ^= 1; return b },
		"one less":    func(b []byte) []byte { return b[:len(b)-1] },
		"one more":    func(b []byte) []byte { return append(b, 0) },
		"half":        func(b []byte) []byte { return b[:len(b)/2] },
		"empty":       func([]byte) []byte { return []byte{} },
		"removed":     func([]byte) []byte { return nil },
		"bomb":        bomb,
		"bomb of the same size": func(b []byte) []byte {
			return append(bomb(nil), make([]byte, len(b))...)[:len(b)]
		},
		"other bytes": func(b []byte) []byte { return randomBytes(3, len(b)) },
	}
	e := export(t, randomBytes(1, 1<<20))
	objects := map[string]string{"a file that is read whole": blobName(e.layers[0].Blob.Digest),
		"a file that is read by range": blobName(e.layers[1].Blob.Digest),
		"a chunk list":                 blobName(e.layers[1].Chunks.Digest)}
	for _, kind := range kinds {
		f := newFixture(t, kind)
		e.publish(t, f.writer(t))
		for what, object := range objects {
			for damage, to := range damages {
				t.Run(kind+"/"+what+"/"+damage, func(t *testing.T) {
					f.Configure(nil)
					f.Configure([]remote.Config{f.config})
					var good []byte
					f.change(t, object, func(b []byte) []byte {
						good = bytes.Clone(b)
						return to(b)
					})
					defer func() { f.put(t, object, good, time.Now()) }()
					got, _, err := e.fetch(t, t.Context(), f.Client)
					if err == nil {
						e.requireEqual(t, got) // a byte that no reader reads
						require.Contains(t, []string{"one more"}, damage)
					} else if damage == "removed" {
						require.ErrorIs(t, err, remote.ErrMissing)
						require.ErrorContains(t, err, "the remote lacks a blob of its card: ")
					} else {
						require.ErrorIs(t, err, remote.ErrDamaged)
					}
				})
			}
		}
		for damage, to := range damages {
			t.Run(kind+"/a card/"+damage, func(t *testing.T) {
				epoch := remote.Epoch(time.Now())
				object := buildName(epoch, buildKey)
				var good []byte
				f.change(t, object, func(b []byte) []byte { good = bytes.Clone(b); return to(b) })
				defer func() { f.put(t, object, good, time.Now()) }()
				_, err := f.Look(t.Context(), name, remote.BuildKey(buildKey), budget)
				if damage == "removed" {
					require.ErrorIs(t, err, remote.ErrMissing)
				} else {
					require.ErrorIs(t, err, remote.ErrDamaged)
				}
			})
		}
	}
}

func TestACardOfAnotherBuildIsDamage(t *testing.T) {
	f := newFixture(t, "file")
	e := export(t, randomBytes(1, 1000))
	epoch := remote.Epoch(time.Now())
	f.put(t, buildName(epoch, otherKey), e.card.Raw, time.Now())
	_, err := f.Look(t.Context(), name, remote.BuildKey(otherKey), budget)
	require.ErrorIs(t, err, remote.ErrDamaged)
}

func TestADirectoryThatIsNotThereIsUnreachable(t *testing.T) {
	c := client(t, nil, remote.Config{Name: name, URL: "file:///nonexistent/stick"})
	_, err := c.Look(t.Context(), name, remote.BuildKey(buildKey), budget)
	require.ErrorIs(t, err, remote.ErrUnreachable)
}

func TestPipesAndLinksOutOfADirectoryAreNotRead(t *testing.T) {
	f := newFixture(t, "file")
	e := export(t, randomBytes(1, 1000))
	e.publish(t, f.Client)
	object := blobName(e.layers[0].Blob.Digest)
	f.change(t, object, func([]byte) []byte { return nil })
	require.NoError(t, syscall.Mkfifo(f.dir+"/"+object, 0o600))
	_, _, err := e.fetch(t, t.Context(), f.Client)
	require.ErrorIs(t, err, remote.ErrDamaged)
	require.NoError(t, os.Remove(f.dir+"/"+object))
	outside := temporary(t, blobOf(t, e, e.layers[0].Blob.Digest))
	require.NoError(t, os.Symlink(outside.Name(), f.dir+"/"+object))
	_, _, err = e.fetch(t, t.Context(), f.Client)
	require.ErrorIs(t, err, remote.ErrUnreachable)
}

func TestHostsAndCertificatesThatFailAreUnreachable(t *testing.T) {
	f := newFixture(t, "https")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	for what, url := range map[string]string{"no such host": "https://host.invalid/x",
		"nothing listens": "https://" + l.Addr().String(), "another authority": f.config.URL} {
		// it does not know the test's authority
		c := client(t, nil, remote.Config{Name: name, URL: url})
		began := time.Now()
		_, err := c.Look(t.Context(), name, remote.BuildKey(buildKey), 2*time.Second)
		require.ErrorIs(t, err, remote.ErrUnreachable, what)
		require.Less(t, time.Since(began), 3*time.Second, what)
	}
}

// The credentials are for one host: a server cannot send them elsewhere.
func TestCredentialsAreNotSentToAnotherHost(t *testing.T) {
	other := newFixture(t, "s3")
	f := newFixture(t, "s3")
	redirect := status(307, "Location", other.config.Endpoint+"/bucket/x")
	f.fault.Store(&redirect)
	_, err := f.Look(t.Context(), name, remote.BuildKey(buildKey), budget)
	require.Error(t, err)
	require.Empty(t, other.s3.requests)
}

// A remote that takes no bytes, or has a locked directory, does not block a publisher.
func TestAStuckUploadEnds(t *testing.T) {
	for _, kind := range []string{"file", "s3", "oci"} {
		t.Run(kind, func(t *testing.T) {
			f := newFixture(t, kind)
			e := export(t, randomBytes(1, 1<<20))
			blobs := filepath.Join(f.dir, blobsName)
			require.NoError(t, os.MkdirAll(blobs, 0o700))
			if kind == "file" {
				held, err := os.Open(blobs)
				require.NoError(t, err)
				defer held.Close()
				require.NoError(t, syscall.Flock(int(held.Fd()), syscall.LOCK_SH))
			}
			over := make(chan struct{})
			t.Cleanup(func() { close(over) })
			stuck := func(_ http.ResponseWriter, r *http.Request) bool {
				if r.Method == http.MethodGet || r.Method == http.MethodHead {
					return false
				}
				<-over
				return true
			}
			f.fault.Store(&stuck)
			c := clientWith(t, remote.Options{Env: f.env, Stalled: time.Second}, f.config)
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			_, err := c.PutBlobs(ctx, name, e.blobs, nil)
			require.ErrorIs(t, err, remote.ErrUnreachable)
			require.ErrorContains(t, err, "no byte was sent for 1s")
			require.Eventually(t, func() bool { // the helper has stopped, too
				left, err := os.ReadDir(blobs)
				return err == nil && len(left) == 0
			}, 10*time.Second, 10*time.Millisecond)
		})
	}
}

// A server may refuse before it has read the body, and close the connection.
func TestAnEarlyRefusalIsNoFailure(t *testing.T) {
	f := newFixture(t, "s3")
	e := export(t, randomBytes(1, 1000))
	e.publish(t, f.Client)
	reset := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPut {
			return false
		}
		panic(http.ErrAbortHandler)
	}
	f.fault.Store(&reset)
	put, err := f.PutCard(t.Context(), name, remote.CardKeys{Build: buildKey}, e.card.Raw)
	require.NoError(t, err)
	require.NotEmpty(t, put)
}

func TestKeysOfRequestsAreNotInMessages(t *testing.T) {
	f := newFixture(t, "https")
	f.proxy.set(network{hole: true})
	_, err := f.Look(t.Context(), name, remote.BuildKey(buildKey), 100*time.Millisecond)
	require.ErrorIs(t, err, remote.ErrUnreachable)
	require.NotContains(t, err.Error(), portable.Hash.String(buildKey))
}
