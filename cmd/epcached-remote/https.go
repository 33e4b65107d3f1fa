package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/remote"
)

// Bounds of what servers send.
const (
	maxHeader   = 64 << 10
	maxListing  = 1 << 20 // bytes of a listing, or of an error
	maxRedirect = 3
	// A call fails if the server sends no byte for this time, also without a deadline of the
	// caller.
	stalled = 30 * time.Second
)

// meter counts the bytes of each call, learns the server's clock, and bounds what is read.
type meter struct {
	next http.RoundTripper
	skew atomic.Int64 // nanoseconds by which the server's clock is ahead
}

func newMeter(c remote.Config) *meter {
	connect := c.Connect
	if connect == 0 {
		connect = remote.DefaultConnect
	}
	dial := &net.Dialer{Timeout: connect, KeepAlive: 15 * time.Second}
	return &meter{next: &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dial.DialContext,
		TLSHandshakeTimeout: connect, ResponseHeaderTimeout: stalled,
		ExpectContinueTimeout: time.Second, MaxResponseHeaderBytes: maxHeader,
		DisableCompression: true, MaxIdleConnsPerHost: 16, IdleConnTimeout: 30 * time.Second,
	}}
}

func (m *meter) clock() time.Time { return time.Now().Add(time.Duration(m.skew.Load())) }

// RoundTrip implements http.RoundTripper.
func (m *meter) RoundTrip(r *http.Request) (*http.Response, error) {
	c := callOf(r.Context())
	if c == nil {
		return m.next.RoundTrip(r) // a request for credentials, which is not measured
	}
	c.requests.Add(1)
	c.out.Add(max(0, r.ContentLength))
	response, err := m.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if date, err := http.ParseTime(response.Header.Get("Date")); err == nil {
		skew := time.Until(date)
		if skew.Abs() < 2*time.Second {
			skew = 0 // because the header has whole seconds
		}
		m.skew.Store(int64(skew))
	}
	if after := response.Header.Get("Retry-After"); after != "" && response.StatusCode >= 429 {
		seconds, _ := strconv.Atoi(after)
		c.retryAfter.Store(int64(time.Duration(min(max(seconds, 1), 3600)) * time.Second))
	}
	bound := int64(-1)
	if response.StatusCode >= 300 || r.Method != http.MethodGet || r.URL.Query().Has("list-type") {
		bound = maxListing
	}
	response.Body = &meteredBody{response.Body, c, bound, time.AfterFunc(stalled, func() {
		_ = response.Body.Close()
	})}
	return response, nil
}

type meteredBody struct {
	io.ReadCloser
	call  *call
	left  int64 // negative: no bound
	watch *time.Timer
}

// Read implements io.Reader.
func (b *meteredBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, fail("damaged", "an answer of more than %d bytes", maxListing)
	}
	if b.left > 0 {
		p = p[:min(int64(len(p)), b.left)]
	}
	n, err := b.ReadCloser.Read(p)
	b.call.in.Add(int64(n))
	b.watch.Reset(stalled)
	if b.left > 0 {
		b.left -= int64(n)
	}
	return n, err
}

// Close implements io.Closer.
func (b *meteredBody) Close() error {
	b.watch.Stop()
	return b.ReadCloser.Close()
}

// https is a read-only remote: static files of any web server.
type https struct {
	*meter
	base   *url.URL
	client http.Client
}

func newHTTPS(c remote.Config, u *url.URL) *https {
	h := &https{meter: newMeter(c), base: u}
	h.client = http.Client{Transport: h.meter, CheckRedirect: redirects("https")}
	return h
}

// redirects follows redirects to https, and to http if the remote itself is reached by that.
func redirects(scheme string) func(*http.Request, []*http.Request) error {
	return func(r *http.Request, via []*http.Request) error {
		if r.URL.Scheme != "https" && r.URL.Scheme != scheme || len(via) > maxRedirect {
			return fail("damaged", "a redirect to %s, or more than %d", r.URL.Scheme, maxRedirect)
		}
		return nil
	}
}

func (h *https) can() remote.Can { return remote.Can{Read: true, Range: true} }

func (h *https) get(ctx context.Context, name string, from, length int64) (*object, error) {
	return h.ask(ctx, http.MethodGet, name, from, length)
}

func (h *https) stat(ctx context.Context, name string) (*object, error) {
	o, err := h.ask(ctx, http.MethodHead, name, 0, -1)
	if err != nil {
		return nil, err
	}
	return o, o.body.Close()
}

func (h *https) ask(ctx context.Context, method, name string, from, length int64) (*object, error) {
	at := *h.base
	at.Path = strings.TrimSuffix(at.Path, "/") + "/" + name
	r, err := http.NewRequestWithContext(ctx, method, at.String(), nil)
	if err != nil {
		return nil, err
	}
	return answerOf(&h.client, r, from, length)
}

// answerOf makes a request for an object, or for length bytes of it.
func answerOf(client interface {
	Do(*http.Request) (*http.Response, error)
}, r *http.Request, from, length int64) (*object, error) {
	if length >= 0 {
		r.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", from, from+length-1))
	}
	response, err := client.Do(r)
	if err != nil {
		return nil, err
	}
	o := &object{body: response.Body, size: response.ContentLength,
		etag: cmp.Or(response.Header.Get("Docker-Content-Digest"), response.Header.Get("ETag"))}
	o.modified, _ = http.ParseTime(response.Header.Get("Last-Modified"))
	switch code := response.StatusCode; {
	case code == http.StatusOK:
		return o, nil
	case code == http.StatusPartialContent && length >= 0:
		if o.from, o.size, err = contentRange(response.Header.Get("Content-Range")); err == nil {
			return o, nil
		}
	default:
		err = statusError(code, "")
	}
	return nil, errors.Join(err, response.Body.Close())
}

// contentRange reads "bytes FROM-TO/SIZE".
func contentRange(text string) (from, size int64, err error) {
	bad := fail("damaged", "Content-Range: %.80q", text)
	span, total, ok := strings.Cut(strings.TrimPrefix(text, "bytes "), "/")
	first, _, is := strings.Cut(span, "-")
	if !ok || !is {
		return 0, 0, bad
	}
	if from, err = strconv.ParseInt(first, 10, 64); err != nil || from < 0 {
		return 0, 0, bad
	}
	if total == "*" {
		return from, -1, nil
	}
	if size, err = strconv.ParseInt(total, 10, 64); err != nil || size < 0 {
		return 0, 0, bad
	}
	return from, size, nil
}

// statusError returns the error of an answer.
func statusError(code int, text string) error {
	if text != "" {
		text = ": " + text
	}
	text = fmt.Sprintf("the server answered %d%s", code, text)
	switch {
	case code == http.StatusNotFound, code == http.StatusGone:
		return fail("missing", "%s", text)
	case code == http.StatusUnauthorized, code == http.StatusForbidden:
		return fail("refused", "%s", text)
	case code == http.StatusPreconditionFailed, code == http.StatusConflict:
		return errExists // AWS answers 409 while another writer is active
	case code == http.StatusNotImplemented, code == http.StatusMethodNotAllowed:
		return fail("unsupported", "%s", text)
	case code == http.StatusRequestedRangeNotSatisfiable:
		return fail("damaged", "%s: the object is shorter than it was said to be", text)
	}
	return fail("unreachable", "%s", text)
}

func (h *https) put(context.Context, string, *io.SectionReader, string, condition) error {
	return fail("unsupported", "https:// is read only")
}

func (h *https) touch(context.Context, string, int64) error {
	return fail("unsupported", "https:// is read only")
}

func (h *https) list(context.Context, string, int) ([]string, error) {
	return nil, fail("unsupported", "https:// cannot be listed")
}

func (h *https) walk(context.Context, string, func(string, *object) error) error {
	return fail("unsupported", "https:// cannot be listed")
}

func (h *https) remove(context.Context, string) error {
	return fail("unsupported", "https:// is read only")
}
