package main

import (
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// writeModel writes a small model of its own content for each seed.
func writeModel(t testing.TB, dir string, seed uint64) string {
	t.Helper()
	path := filepath.Join(dir, fmt.Sprintf("model%d.onnx", seed))
	require.NoError(t, os.WriteFile(path, compilertest.Dense(seed, 16, 1), 0o644))
	return path
}

func openFile(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// The execution providers that the tests compile with.
func openVINOProvider() *wire.ExecutionProvider {
	return &wire.ExecutionProvider{Name: "OpenVINOExecutionProvider"}
}

func qnnProvider() *wire.ExecutionProvider {
	return &wire.ExecutionProvider{Name: "QNNExecutionProvider",
		Options: map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}}
}

// forModel is a request for a model that is the request's only descriptor.
func forModel(name string, eps ...*wire.ExecutionProvider) *wire.Acquire {
	if len(eps) == 0 {
		eps = []*wire.ExecutionProvider{openVINOProvider()}
	}
	return &wire.Acquire{Model: &wire.Model{Name: filepath.Base(name)}, Eps: eps}
}

// lease is what one request got: the answer, and the view that came with it.
type lease struct {
	*wire.AcquireReply
	view *os.File
}

// get asks for the model at path, and keeps the view until the test ends.
func get(t testing.TB, c *unixsock.Client, path string, change ...func(*wire.Acquire)) lease {
	t.Helper()
	a, err := tryGet(t, c, path, change...)
	require.NoError(t, err)
	return a
}

func tryGet(t testing.TB, c *unixsock.Client, path string, change ...func(*wire.Acquire)) (lease,
	error) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	request := forModel(path)
	for _, ch := range change {
		ch(request)
	}
	reply, view, err := c.Acquire(limited(t), request, []*os.File{f}, nil, nil)
	if view != nil {
		t.Cleanup(func() { view.Close() })
	}
	return lease{reply, view}, err
}

func onMissFail(r *wire.Acquire) { r.OnMiss = wire.OnMiss_FAIL }

func refresh(r *wire.Acquire) { r.OnMiss = wire.OnMiss_REFRESH }

func withEPs(eps ...*wire.ExecutionProvider) func(*wire.Acquire) {
	return func(r *wire.Acquire) { r.Eps = eps }
}

// requireRight reads every file of the answer through the view's descriptor, and compares with what
// was promised.
func (a lease) requireRight(t testing.TB) {
	t.Helper()
	require.NoError(t, a.wrong())
}

func (a lease) wrong() error {
	if a.view == nil || len(a.Files) == 0 {
		return fmt.Errorf("an answer %q without files", a.Outcome)
	}
	found := false
	for _, f := range a.Files {
		got, err := fileDigest(fmt.Sprintf("/proc/self/fd/%d/%s", a.view.Fd(), f.Name))
		if err != nil {
			return err
		}
		if got != f.Digest {
			return fmt.Errorf("%s: its bytes have digest %s, promised was %s", f.Name, got,
				f.Digest)
		}
		found = found || f.Name == a.Graph
	}
	if !found {
		return fmt.Errorf("the graph %q is not among the files", a.Graph)
	}
	return nil
}

// names returns the digests of the answer's files by their names below the view's id.
func (a lease) names() map[string]string {
	out := make(map[string]string, len(a.Files))
	for _, f := range a.Files {
		out[path.Base(f.Name)] = f.Digest
	}
	return out
}

func fileDigest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := blake3.New(32, nil)
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}
