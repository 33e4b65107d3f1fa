package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/unixsock/wire"
)

// BenchmarkSDKChange switches a link from one real QNN SDK to another under a running daemon, and
// measures how long it takes from that write until the stored build has been judged for the new one
// and subscribers have heard, beyond the quiet period. The goal is one second.
func BenchmarkSDKChange(b *testing.B) {
	const quiet = time.Second
	real := [2]string{runtimeDir(b, qnn), runtimeDir(b, olderQNN)}
	place := filepath.Join(shortDir(b), "runtime")
	require.NoError(b, os.Symlink(real[0], place))
	d := newSite(b, place).start(b)
	get(b, d.dial(), writeModel(b, b.TempDir(), 1), withEPs(qnnProvider()))
	d.idle()
	judged := make(chan time.Time, 64)
	ctx, cancel := context.WithCancel(b.Context())
	listener := d.dial()
	ended := make(chan error, 1)
	go func() {
		ended <- listener.Subscribe(ctx, func(e *wire.Event) error {
			if e.Kind == event.Judged {
				judged <- time.Now()
			}
			return nil
		})
	}()
	var beyond time.Duration
	at := 0
	for b.Loop() {
		at = 1 - at
		require.NoError(b, replaceLink(real[at], place))
		written := time.Now()
		beyond += (<-judged).Sub(written) - quiet
		time.Sleep(quiet / 2) // the other events of this change
		for len(judged) > 0 {
			<-judged
		}
	}
	cancel()
	require.NoError(b, <-ended)
	b.ReportMetric(float64(beyond.Milliseconds())/float64(b.N), "ms-beyond-quiet")
}
