package main

import (
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

func TestFIFOsBlockNoVerb(t *testing.T) {
	newStandIn(t).serve()
	fifo := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	for _, args := range [][]string{
		{"import", "none.tar", "--trust", fifo},
		{"export", "--all", "--to", "new.tar", "--key", fifo},
		{"export", "--all", "--to", "new.tar", "--for", fifo},
		{"remote", "revoke", "r", "--key", fifo},
		{"trust", "show", fifo},
	} {
		ended := make(chan result, 1)
		go func() { ended <- call(t, args...) }()
		select {
		case r := <-ended:
			require.NotEqual(t, exit.Done, r.code, args)
			require.Contains(t, r.err, fifo, args)
			require.Contains(t, r.err, "it is not a regular file", args)
		case <-time.After(10 * time.Second):
			require.Fail(t, "it blocks", "%v", args)
		}
	}
}
