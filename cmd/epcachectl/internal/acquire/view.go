package acquire

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
)

func closeViews(results []got) {
	for _, r := range results {
		r.own.end()
		if r.view != nil && !r.told() {
			r.view.Close() // a folder that was only read from
		}
	}
}

// filePath gives the path of a file of a view, for this process and those that inherit the descriptor.
func (r *got) filePath(name string) (string, error) {
	if r.queued() {
		return "", r.errQueued()
	}
	if r.view == nil {
		return "", errors.New("the daemon sent no descriptor of the view")
	}
	if !filepath.IsLocal(name) {
		return "", fmt.Errorf("the daemon names a file %q outside the view", name)
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", r.view.Fd(), name), nil
}

// opener opens a file of the result, as often as it is called.
func (r *got) opener(name string) (func() (io.ReadCloser, error), error) {
	if open, ok := r.blobs[name]; ok {
		return open, nil
	}
	path, err := r.filePath(name)
	if err != nil {
		return nil, err
	}
	return func() (io.ReadCloser, error) {
		f, err := os.Open(path)
		return f, modelfile.PlainPathError(err)
	}, nil
}

// passedThrough tells whether the model is compiled already, and is loaded from its own files.
func (r *got) passedThrough() bool { return r.reply.GetOutcome() == "passthrough" && r.view == nil }

// graphPath is what a program can load: of a model that is compiled already, the model itself.
func (r *got) graphPath() (string, error) {
	if r.passedThrough() {
		return filepath.Abs(r.path)
	}
	return r.filePath(r.graph)
}
