package cache

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/epmodel"
)

// BenchmarkConversion writes the other form of an artefact of 256 MiB, and beside it copies the
// same bytes, file by file, in the same directory. Both read from the page cache and sync nothing.
func BenchmarkConversion(b *testing.B) {
	s := newBench(b)
	m := compilertest.DenseModel(1, 8, 1)
	m.Initializers[0].Raw = make([]byte, 256<<20)
	path := filepath.Join(memoryDir(b), "large.onnx") // the stand-in's context is the model's bytes
	require.NoError(b, os.WriteFile(path, m.Encode(), 0o644))
	asked := func(embed bool) *request.Request {
		r := s.request(s.openFile(path))
		r.Embed = embed
		return r
	}
	forms := map[bool]*request.Answer{false: s.acquire(asked(false)), true: s.acquire(asked(true))}
	for name, embed := range map[string]bool{"into the graph": true, "out of the graph": false} {
		b.Run(name, func(b *testing.B) {
			from, to := forms[!embed], forms[embed]
			dir := filepath.Join(from.Path, filepath.Dir(from.Graph))
			var ours, plain time.Duration
			var size int64
			for _, f := range to.Build.Files {
				size += f.Size
			}
			for b.Loop() {
				ours += timed(b, func() error { return s.convert(to, from, dir) })
				plain += timed(b, func() error { return s.copyOut(from, dir) })
			}
			speed := func(d time.Duration) float64 {
				return float64(size) * float64(b.N) / d.Seconds() / 1e9
			}
			b.ReportMetric(speed(ours), "converted-GB/s")
			b.ReportMetric(speed(plain), "copied-GB/s")
			b.ReportMetric(ours.Seconds()/plain.Seconds(), "converted/copied")
		})
	}
}

// convert writes the files of one answer out of those of the other.
func (s *bench) convert(to, from *request.Answer, dir string) error {
	staged, err := os.MkdirTemp(s.cache.path("staging"), "bench-")
	if err != nil {
		return err
	}
	form := build.Form{Of: from.Build, Embed: to.Build.Embed, Graph: filepath.Base(to.Graph),
		MaxGraph: epmodel.MaxGraph, Dir: staged}
	_, err = form.Write(context.Background(), dir)
	return errors.Join(err, os.RemoveAll(staged))
}

func (s *bench) copyOut(from *request.Answer, dir string) error {
	staged, err := os.MkdirTemp(s.cache.path("staging"), "bench-")
	if err != nil {
		return err
	}
	for _, f := range from.Build.Files {
		r, err := os.Open(filepath.Join(dir, f.Name))
		if err != nil {
			return err
		}
		w, err := os.Create(filepath.Join(staged, f.Name))
		if err != nil {
			return err
		}
		if err := errors.Join(copyPlain(w, r), r.Close(), w.Close()); err != nil {
			return err
		}
	}
	return os.RemoveAll(staged)
}

func copyPlain(w io.Writer, r io.Reader) error {
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, make([]byte, 1<<20))
	return err
}
