package remote

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/epcached/epcached/portable"
)

// Options say how to connect to the helper.
type Options struct {
	Socket  string   // of the helper's unit; "": Program is started
	Program string   // the path of epcached-remote
	Env     []string // of the program; nil: the daemon's
	Log     *slog.Logger
	// Stalled is the time without progress after which an upload fails; 0: a minute.
	Stalled time.Duration
}

// Times of calls that write small objects, and objects that the server copies.
const (
	putBudget   = time.Minute
	renewBudget = 10 * time.Minute
)

// Client makes calls to remotes, by one helper process, which is started when it is needed and ends
// when it is idle.
type Client struct {
	opts   Options
	helper *helper

	mu      sync.Mutex // guards the fields below
	remotes map[string]*state
	order   []string
}

// New returns a client. Nothing is started before the first call.
func New(opts Options) *Client {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	opts.Stalled = cmp.Or(opts.Stalled, time.Minute)
	return &Client{opts: opts, helper: newHelper(opts), remotes: make(map[string]*state)}
}

// Configure replaces the remotes. Those that stay as they are keep their breaker and figures.
func (c *Client) Configure(remotes []Config) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := make(map[string]*state, len(remotes))
	c.order = nil
	for _, r := range remotes {
		old := c.remotes[r.Name]
		if old == nil || old.config != r {
			old = newState(r)
		}
		next[r.Name] = old
		c.order = append(c.order, r.Name)
	}
	c.remotes = next
}

// Close ends the helper that the client started. Calls under way fail.
func (c *Client) Close() error { return c.helper.close() }

// Hello asks the helper what a remote can do, without any traffic to it.
func (c *Client) Hello(ctx context.Context, remote string) (Can, error) {
	a, err := c.call(ctx, remote, &Request{Do: DoHello}, nil, nil)
	if err != nil || a.Can == nil {
		return Can{}, err
	}
	return *a.Can, nil
}

// Look returns the remote's cards under a key, unverified: at most one for a build key. It takes at
// most budget, and fails with ErrMissing, ErrRefused or ErrUnreachable.
func (c *Client) Look(ctx context.Context, remote string, key Key,
	budget time.Duration) ([][]byte, error) {
	a, err := c.call(ctx, remote, &Request{Do: DoLook, Key: key, Budget: budget}, nil, nil)
	if err != nil {
		return nil, err
	}
	total := 0
	for _, card := range a.Cards {
		if total += len(card); len(card) > MaxCard || total > MaxLook || len(a.Cards) > MaxCards {
			return nil, &Error{Class: "damaged", Remote: remote,
				Text: "the helper sent too many cards"}
		}
	}
	if len(a.Cards) == 0 {
		return nil, &Error{Class: "missing", Remote: remote, Text: "it does not have the build"}
	}
	return a.Cards, nil
}

// Fetch has the arguments of Client.Fetch.
type Fetch struct {
	Manifest []byte     // of the build, as in its card, which the caller has verified
	Files    []*os.File // empty and writable, one for each file of the config, in that order
	Seeds    []*os.File // readable; bytes that they have are not transferred
	// Background: no request waits for it, so that Config.Rate bounds it.
	Background bool
	// Progress is called from one goroutine; it may be nil.
	Progress func(Progress)
}

// Fetch writes the plain bytes of a build's files. If its context ends, the bytes written so far
// can be used as a seed. The caller keeps all files open until Fetch returns, and verifies them,
// because a malicious helper may still have them open for writing.
func (c *Client) Fetch(ctx context.Context, remote string, f Fetch) (Progress, error) {
	var last Progress
	progress := func(p Progress) {
		last = p
		if f.Progress != nil {
			f.Progress(p)
		}
	}
	files := append(append([]*os.File(nil), f.Files...), f.Seeds...)
	_, err := c.call(ctx, remote,
		&Request{Do: DoFetch, Manifest: f.Manifest, Writable: len(f.Files),
			Slowly: f.Background}, files, progress)
	return last, err
}

// Blob is a blob to upload: a layer, a config, or a manifest, as portable.Writer makes them.
type Blob struct {
	BlobName
	File *os.File // readable
}

// PutBlobs uploads the blobs that the remote does not have, and prevents those that it has from
// expiring. It fails if it makes no progress for Options.Stalled.
func (c *Client) PutBlobs(ctx context.Context, remote string, blobs []Blob,
	progress func(Progress)) (Sent, error) {
	r := &Request{Do: DoPutBlobs}
	var files []*os.File
	for _, b := range blobs {
		r.Blobs, files = append(r.Blobs, b.BlobName), append(files, b.File)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stalled := time.AfterFunc(c.opts.Stalled, func() {
		cancel(unreachable(remote, fmt.Sprintf("no byte was sent for %v", c.opts.Stalled)))
	})
	defer stalled.Stop()
	a, err := c.call(ctx, remote, r, files, func(p Progress) {
		stalled.Reset(c.opts.Stalled)
		if progress != nil {
			progress(p)
		}
	})
	if err != nil || a.Sent == nil {
		return Sent{}, err
	}
	return *a.Sent, nil
}

// PutCard puts a card, after its blobs, under its build key and its request keys, in the current
// epoch. It does not replace an existing card.
func (c *Client) PutCard(ctx context.Context, remote string, keys CardKeys,
	card []byte) (Put, error) {
	return c.put(ctx, remote, &Request{Do: DoPutCard, Budget: putBudget, Keys: keys, Card: card})
}

// Renew prevents a build in use from expiring: it renews the build's blobs, and puts the card,
// which the caller has verified, into the current epoch unless that has one. It fails with
// ErrMissing if a blob is missing or has another size.
func (c *Client) Renew(ctx context.Context, remote string, keys CardKeys,
	card []byte) (Put, error) {
	return c.put(ctx, remote, &Request{Do: DoRenew, Budget: renewBudget, Keys: keys, Card: card})
}

func (c *Client) put(ctx context.Context, remote string, r *Request) (Put, error) {
	a, err := c.call(ctx, remote, r, nil, nil)
	if err != nil {
		return "", err
	}
	return Put(a.Put), nil
}

// Lease takes, renews or releases the right to compile for all machines.
func (c *Client) Lease(ctx context.Context, remote string, l LeaseRequest) (Lease, error) {
	a, err := c.call(ctx, remote, &Request{Do: DoLease, Lease: l}, nil, nil)
	if err != nil || a.Lease == nil {
		return Lease{}, err
	}
	return *a.Lease, nil
}

// Trust returns the remote's trust document, unverified. It fails with ErrMissing if there is none.
func (c *Client) Trust(ctx context.Context, remote string) ([]byte, error) {
	a, err := c.call(ctx, remote, &Request{Do: DoTrust}, nil, nil)
	if err != nil {
		return nil, err
	}
	if len(a.Cards) != 1 || len(a.Cards[0]) > MaxTrust {
		return nil, &Error{Class: "damaged", Remote: remote,
			Text: "the helper sent no trust document"}
	}
	return a.Cards[0], nil
}

// PutTrust puts a trust document. It replaces only the document with the digest over, or with zero
// none, and otherwise returns Exists.
func (c *Client) PutTrust(ctx context.Context, remote string, document []byte,
	over portable.Digest) (Put, error) {
	return c.put(ctx, remote, &Request{Do: DoPutTrust, Budget: putBudget, Card: document,
		Keys: CardKeys{Over: over}})
}

// Collect removes objects that no look-up can find any more, for remotes without lifecycle rules:
// see Kind. With dryRun it removes nothing.
func (c *Client) Collect(ctx context.Context, remote string, dryRun bool,
	progress func(Progress)) ([]Kind, error) {
	a, err := c.call(ctx, remote, &Request{Do: DoCollect, DryRun: dryRun}, nil, progress)
	if err != nil {
		return nil, err
	}
	return a.Kinds, nil
}

// Check tries the operations that the daemon needs: reading, writing, create-only writes, writes
// that are conditional on an ETag, ranges, listing, and the clock. It leaves one small object
// behind: check/<random>, which the lifecycle rules remove, or the tag check.
func (c *Client) Check(ctx context.Context, remote string) ([]Finding, error) {
	a, err := c.call(ctx, remote, &Request{Do: DoCheck}, nil, nil)
	if err != nil {
		return nil, err
	}
	return a.Check, nil
}

// call makes one call, which the breaker may refuse, and counts it.
func (c *Client) call(ctx context.Context, remote string, r *Request, files []*os.File,
	progress func(Progress)) (*Answer, error) {
	c.mu.Lock()
	s := c.remotes[remote]
	c.mu.Unlock()
	if s == nil {
		return nil, &Error{Class: "unsupported", Remote: remote, Text: "it is not configured"}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r.Version, r.Remote = Version, s.config
	probe, err := s.enter(r.Do == DoCheck || r.Do == DoHello)
	if err != nil {
		return nil, err
	}
	outer := ctx
	if r.Budget > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.Budget)
		defer cancel()
	}
	a, err := c.helper.call(ctx, r, files, progress)
	switch {
	case outer.Err() != nil:
		err = outer.Err()
		if stalled, is := errors.AsType[*Error](context.Cause(outer)); is {
			err = stalled
		}
	case err != nil && ctx.Err() != nil:
		err = unreachable(remote, "no answer within "+r.Budget.String())
	case err == nil && a.Err != nil:
		a.Err.Remote, a.Err.Text = remote, oneLine(a.Err.Text)
		if classes[a.Err.Class] == nil {
			a.Err.Class = "damaged"
		}
		err = a.Err
	case err != nil:
		err = unreachable(remote, err.Error())
	}
	s.leave(probe, a, err)
	if err != nil && !errors.Is(err, context.Canceled) {
		c.opts.Log.Debug("remote", "remote", remote, "call", r.Do, "error", err)
	}
	return a, err
}

// oneLine replaces control characters in a text of the helper, for logs.
func oneLine(text string) string {
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text[:min(len(text), maxText)])
	return strings.ToValidUTF8(text, "")
}
