// Package daemon finds the daemon of a call, starts one if there is none, or says why none answers.
package daemon

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"github.com/epcached/epcached/unixsock"
)

// Finder finds the daemon of a call, and starts the user's own if there is none.
type Finder struct {
	Version string // of this program
	Socket  string // from --socket
	Wait    time.Duration
	WaitSet bool
	// ownClient is the connection to the user's own daemon, beside one to another user's; nil until
	// a model needs it; guarded by startMu.
	ownClient *unixsock.Client
}

// How long a client waits for a configured socket, or that of a restarting daemon, to appear; and
// for the answer of a listening daemon, which may be starting under socket activation.
const (
	DefaultWait  = 3 * time.Second
	MaxWait      = 10 * time.Second
	helloTimeout = 10 * time.Second
)

// CloseOwn closes the connection of OwnDaemon.
func (f *Finder) CloseOwn() error {
	if f.ownClient == nil {
		return nil
	}
	return f.ownClient.Close()
}

// Sockets lists the sockets to try, in order.
func (f *Finder) Sockets() []string {
	if f.Socket != "" {
		return []string{f.Socket}
	}
	return unixsock.DefaultSocket()
}

// Connect connects to the first daemon that answers.
func (f *Finder) Connect(ctx context.Context) (*unixsock.Client, error) {
	paths := f.Sockets()
	d := f.dialer()
	// Wait only if a daemon is configured, or a socket exists.
	if f.WaitSet || len(paths) == 1 || slices.ContainsFunc(paths, exists) {
		d.Wait = f.Wait
	}
	c, err := d.Dial(ctx, paths...)
	return c, f.howToStart(noDaemon(paths, err))
}

// Retry repeats a request after the connection broke, because a restart of the daemon in the middle
// of a call is no failure of the call. It is for idempotent requests only.
func (f *Finder) Retry(ctx context.Context, ask func(*unixsock.Client) error) error {
	c, err := f.withLongWait().Connect(ctx)
	if err != nil {
		return err
	}
	return errors.Join(ask(c), c.Close())
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func (f *Finder) dialer() unixsock.Dialer {
	return unixsock.Dialer{Name: "epcachectl " + f.Version, HelloTimeout: helloTimeout}
}

// withLongWait returns a finder with the longest wait.
func (f *Finder) withLongWait() *Finder {
	patient := *f
	patient.Wait, patient.WaitSet = MaxWait, true
	return &patient
}

// Reconnect waits for a daemon as long as the context lasts.
func (f *Finder) Reconnect(ctx context.Context) (*unixsock.Client, error) {
	for {
		c, err := f.withLongWait().Connect(ctx)
		if err == nil || !IsConnectionLost(err) || ctx.Err() != nil {
			return c, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
			// pause for a daemon that accepts and closes at once
		}
	}
}

// IsConnectionLost distinguishes the end of a daemon from a refusal.
func IsConnectionLost(err error) bool {
	return errors.Is(err, unixsock.ErrConnectionLost) || errors.Is(err, unixsock.ErrNoDaemon) ||
		errors.Is(err, unixsock.ErrBusy)
}
