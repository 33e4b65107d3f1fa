package cache

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// An EP with incomplete libraries of its own registers, takes no node, and says why only in ONNX
// Runtime's log: the log's words are part of every report of the failure.
func TestAMissingLibraryOfAnEPIsNamed(t *testing.T) {
	whole := compilertest.Runtime(t, "qnn-2.7.0")
	dir := t.TempDir()
	for _, name := range []string{"onnxruntime",
		"onnxruntime_qnn"} { // and not onnxruntime_qnn.libs
		linkFiles(t, filepath.Join(whole.Directory, name), filepath.Join(dir, name))
	}
	r, err := compilers.Find(dir)
	require.NoError(t, err)
	ort := compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})
	t.Cleanup(func() { require.NoError(t, ort.Close()) })
	b := newBenchWith(t, func(o *Options) { o.Compiler, o.Runtimes = ort, []compilers.Runtime{r} })
	const missing = "libc++-71bc274c.so.1.0: cannot open shared object file"

	e := b.refused(b.forQNN(compilertest.DenseModel(1, 64, 2), "60", nil))
	require.Equal(t, "no node taken", e.Facts["reason"])
	require.Contains(t, e.Text, missing)
	require.Contains(t, e.Facts["logged"], missing)
	require.Contains(t, e.Hint, "ONNX Runtime logged")

	require.ErrorContains(t, b.probed().MarkErrors[qnn], missing)

	var said []string
	advice, err := b.cache.Queries.Doctor().Examine(t.Context(), request.Peer{UID: b.cache.uid})
	require.NoError(t, err)
	for _, a := range advice.Advice {
		said = append(said, a.Text)
	}
	require.Contains(t, strings.Join(said, "\n"), missing)
}

// linkFiles makes a directory with links to the files of another: loaders look beside the links.
func linkFiles(t *testing.T, from, to string) {
	require.NoError(t, filepath.WalkDir(from, func(path string, entry os.DirEntry,
		err error) error {
		if err != nil {
			return err
		}
		below, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return os.MkdirAll(filepath.Join(to, below), 0o755)
		}
		return os.Symlink(path, filepath.Join(to, below))
	}))
}
