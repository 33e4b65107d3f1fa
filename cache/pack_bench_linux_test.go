package cache

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// BenchmarkUnpack compares unpacking with cp, of one file of a quarter of a GiB in 128 extents,
// turn by turn, on the file system of the temporary directory.
func BenchmarkUnpack(b *testing.B) {
	const size, piece = 256 << 20, 2 << 20
	ctx, dir := context.Background(), b.TempDir()
	bench := newBench(b)
	bench.close()
	bench.state = filepath.Join(dir, "state")
	bench.open()
	c := bench.cache
	plain := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(plain)
	hold := c.cas.Hold()
	defer hold.Release()
	d, _, err := hold.Put(ctx, bytes.NewReader(plain))
	require.NoError(b, err)
	r := &dedupe.Recipe{Size: size - 4, Literals: dedupe.NoLiterals,
		Bases: []dedupe.Base{{Digest: d, Size: size}}}
	moved := make([]byte, 0, size)
	// the second and the first of each two, four bytes off
	for at := int64(0); at < r.Size; at += piece {
		n := min(piece, r.Size-at)
		from := at + 4
		if n == piece && at/piece%2 == 0 && at+2*piece <= r.Size {
			from = at + piece + 4
		} else if n == piece && at/piece%2 == 1 {
			from = at - piece + 4
		}
		r.Extents = append(r.Extents, dedupe.Extent{At: at, Length: n, From: from})
		moved = append(moved, plain[from:from+n]...)
	}
	r.Blob = blake3.Sum256(moved)
	open := func(d cas.Digest) (dedupe.Source, error) {
		f, err := c.cas.Open(ctx, d)
		if err != nil {
			return nil, err
		}
		return dedupe.NewFile(f)
	}
	var took [3][]time.Duration
	object := filepath.Join(bench.state, "objects", d.String()[:2], d.String())
	for b.Loop() {
		for i, do := range []func(to string) error{
			func(to string) error {
				return exec.Command("cp", "--reflink=never", object, to).
					Run()
			},
			func(to string) error { return applyTo(ctx, r, open, to, true) },
			func(to string) error { return applyTo(ctx, r, open, to, false) },
		} {
			to := filepath.Join(dir, "copy")
			began := time.Now()
			require.NoError(b, do(to))
			took[i] = append(took[i], time.Since(began))
			require.NoError(b, os.Remove(to))
		}
	}
	var median [3]float64 // seconds: one round that waits for the disk says nothing of the others
	for i, name := range []string{"cp-MB/s", "unpack-MB/s", "hashed-MB/s"} {
		slices.Sort(took[i])
		median[i] = took[i][len(took[i])/2].Seconds()
		b.ReportMetric(size/1e6/median[i], name)
	}
	b.ReportMetric(median[0]/median[1], "unpack/cp")
	b.ReportMetric(median[0]/median[2], "hashed/cp")
}

func applyTo(ctx context.Context, r *dedupe.Recipe, open func(cas.Digest) (dedupe.Source, error),
	to string, trusted bool) error {
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer f.Close()
	return dedupe.Apply(ctx, r, open, f, dedupe.ApplyOptions{Trusted: trusted})
}

// BenchmarkFirstHitOfAPacked compares the first request for a packed build with cp of its binary of
// 64 MiB.
func BenchmarkFirstHitOfAPacked(b *testing.B) {
	dir := b.TempDir()
	bench := newBench(b)
	bench.close()
	bench.state = filepath.Join(dir, "state")
	bench.open()
	builds, _ := bench.stores([]*request.Request{bench.dense(4096, 1), bench.dense(4096, 2)})
	bench.pack(builds[1])
	require.True(b, bench.cache.packing.OnlyPacked(large(builds[1])))
	d := large(builds[0])
	object := filepath.Join(bench.state, "objects", d.String()[:2], d.String())
	var hit, cp, again time.Duration
	for b.Loop() {
		bench.later.Add(int64(time.Hour))
		_, err := bench.cache.Store.Packer().DropCopies(builds[1].ID)
		require.NoError(b, err)
		for i, total := range []*time.Duration{&hit, &again} {
			began := time.Now()
			a, err := lookup.Lease(context.Background(), bench.cache.Store, builds[1],
				func(string) {})
			*total += time.Since(began)
			require.NoError(b, err, i)
			require.NoError(b, a.View.Close())
		}
		to := filepath.Join(dir, "copy")
		began := time.Now()
		require.NoError(b, exec.Command("cp", "--reflink=never", object, to).Run())
		cp += time.Since(began)
		require.NoError(b, os.Remove(to))
	}
	for name, d := range map[string]time.Duration{"first-ms": hit, "cp-ms": cp,
		"second-ms": again} {
		b.ReportMetric(float64(d.Microseconds())/1000/float64(b.N), name)
	}
}
