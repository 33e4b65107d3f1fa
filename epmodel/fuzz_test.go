package epmodel_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/epmodel"
)

// seeds are the models of the other tests, real graphs, and what fuzzing has found (testdata/fuzz).
func seeds(f *testing.F) [][]byte {
	f.Helper()
	all := [][]byte{fullModel(), sidecar("a.bin"), model(nil),
		model(msg{}.sub(5, external("w", 3, "location", "w.bin", "offset", "4", "length", "12")))}
	files, err := filepath.Glob("testdata/artefacts/*")
	require.NoError(f, err)
	for _, p := range files {
		b, err := os.ReadFile(p)
		require.NoError(f, err)
		all = append(all, b)
	}
	return all
}

// readFuzzed reads b and checks that memory stays in proportion and that errors are about the
// input.
func readFuzzed(t *testing.T, b []byte) *epmodel.Model {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	m, err := read(b)
	runtime.ReadMemStats(&after)
	// a two-byte field costs one Initializer, in a slice that grows by copying
	if got, most := after.TotalAlloc-before.TotalAlloc, uint64(1<<20+2000*len(b)); got > most {
		t.Fatalf("%d bytes taken for %d of input", got, len(b))
	}
	if err != nil {
		var fe *epmodel.FormatError
		require.True(t, errors.As(err, &fe), "%v", err)
		require.LessOrEqual(t, fe.Offset, int64(len(b)))
		return nil
	}
	return m
}

func FuzzRead(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m := readFuzzed(t, b)
		if m == nil {
			return
		}
		again := mustRead(t, b)
		require.Equal(t, m, again, "the same bytes read twice")
		inside := func(off, n int64) {
			require.True(t, off >= 0 && n >= 0 && off+n <= int64(len(b)), "range %d+%d", off, n)
		}
		for _, i := range tensors(t, b) {
			if i.Location == "" {
				inside(i.Offset, i.Length)
			} else {
				require.True(t, i.Offset >= 0 && i.Length >= -1 && i.Offset+max(i.Length, 0) >= 0)
				require.True(t, filepath.IsLocal(i.Location), "%q", i.Location)
			}
		}
		for _, c := range m.Contexts {
			inside(c.Inline.Offset, c.Inline.Length)
			for _, r := range c.Long {
				inside(r.Offset, r.Length)
			}
		}
		_, err := epmodel.Digest(context.Background(), m, bytes.NewReader(b),
			func(string) (epmodel.Source, error) {
				return bytes.NewReader(make([]byte, 100)), nil
			}, sum)
		var fe *epmodel.FormatError
		require.True(t, err == nil || errors.As(err, &fe), "%v", err)
	})
}

func FuzzValidate(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s, "a.bin", int64(100))
	}
	f.Fuzz(func(t *testing.T, b []byte, name string, size int64) {
		m := readFuzzed(t, b)
		if m == nil {
			return
		}
		files := map[string]int64{name: size}
		err := epmodel.Validate(m, files)
		if err != nil {
			formatError(t, err)
			return
		}
		require.NotEmpty(t, m.Contexts)
		for _, r := range m.Sidecars() {
			require.Equal(t, name, r.Name, "only what is there passes")
			require.True(t, filepath.IsLocal(r.Name) && filepath.Clean(r.Name) == r.Name, "%q",
				r.Name)
		}
		_ = m.NodeSummary(3)
		_ = m.CompatibilityInfo()
	})
}

func FuzzBinaryReferences(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(append(s, make([]byte, 600)...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		refs, err := epmodel.BinaryReferences("x.bin", bytes.NewReader(b))
		if err != nil {
			formatError(t, err)
			require.Nil(t, refs)
		}
	})
}

func FuzzInterface(f *testing.F) {
	all := append(seeds(f), described(9, msg{}.sub(1, reads("Add", "x", "k")).
		sub(5, inGraph("k", "abcd")).sub(11, input("x", 2)).sub(11, input("k", 1)).
		sub(12, input("y", 2))))
	for _, s := range all {
		f.Add(s, s)
		f.Add(s, []byte(model(msg{}.sub(11, input("x", 2)).sub(12, input("y", 2)))))
	}
	f.Fuzz(func(t *testing.T, source, compiled []byte) {
		ctx := context.Background()
		m := readFuzzed(t, compiled)
		i, err := epmodel.ReadInterface(ctx, "m.onnx", bytes.NewReader(source))
		if m == nil || err != nil {
			return
		}
		plan, exposed, err := epmodel.ExposeOuter(ctx, m, bytes.NewReader(compiled))
		if err == nil && plan != nil {
			b, err := written(plan)
			require.NoError(t, err)
			require.Len(t, readFuzzed(t, b).Outputs, len(m.Outputs)+len(exposed))
			i.Exposed = exposed
			compiled, m = b, mustRead(t, b)
		}
		s, _, err := i.Restore(ctx, m, bytes.NewReader(compiled))
		if s == nil || err != nil {
			return
		}
		b, err := written(s)
		require.NoError(t, err)
		require.Subset(t, readFuzzed(t, b).Metadata, m.Metadata)
		again, _, err := i.Restore(ctx, mustRead(t, b), bytes.NewReader(b))
		require.NoError(t, err)
		require.Nil(t, again)
	})
}
