package main

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
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

// endless is a stream of zeros that counts what is read of it.
type endless struct{ read atomic.Int64 }

// Read implements io.Reader. It ends, so that a failing test fills no disk.
func (e *endless) Read(p []byte) (int, error) {
	if e.read.Add(int64(len(p))) > 64<<20 {
		return 0, io.EOF
	}
	clear(p)
	return len(p), nil
}

func TestImportOfAStreamThatIsNoBundleEndsAtOnce(t *testing.T) {
	newStandIn(t).serve()
	var other bytes.Buffer
	to := tar.NewWriter(&other)
	require.NoError(t, to.WriteHeader(&tar.Header{Name: "holiday.jpg", Size: 1 << 40}))
	for want, first := range map[string]io.Reader{
		"an empty tar":                     strings.NewReader(""),
		"neither a tar nor":                strings.NewReader(strings.Repeat("no tar", 1000)),
		"an image layout has no such file": &other,
	} {
		rest := &endless{}
		var out, err bytes.Buffer
		code := run(t.Context(), []string{"import", "-"}, io.MultiReader(first, rest), &out, &err)
		require.Equal(t, exit.Damage, code, err.String())
		require.Contains(t, err.String(), want)
		require.Less(t, rest.read.Load(), int64(1<<20))
	}
}

func TestCancelledImportOfAStreamLeavesNoFile(t *testing.T) {
	newStandIn(t).serve()
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	ctx, cancel := context.WithCancel(t.Context())
	stream, writer := io.Pipe()
	defer writer.Close()
	ended := make(chan int, 1)
	go func() { ended <- run(ctx, []string{"import", "-"}, stream, io.Discard, io.Discard) }()
	to := tar.NewWriter(writer)
	require.NoError(t, to.WriteHeader(&tar.Header{Name: "oci-layout", Size: 1 << 20}))
	cancel()
	select {
	case code := <-ended:
		require.NotEqual(t, exit.Done, code)
	case <-time.After(10 * time.Second):
		require.Fail(t, "it does not end")
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	open, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, fd := range open {
		file, _ := os.Readlink("/proc/self/fd/" + fd.Name())
		require.NotContains(t, file, dir, "the removed file takes space until it is closed")
	}
}
