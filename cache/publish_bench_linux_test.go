package cache

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/store"
)

// BenchmarkPublish compares publishing an artefact of 256 MiB with copying its files durably, turn
// by turn: "put" is what an application brings, from its open files to the manifest; "compiled" is
// what a worker has written, from there on, and "checked" the same where its bytes were hashed
// while it was checked. Each turn has other bytes.
func BenchmarkPublish(b *testing.B) {
	const size = 256 << 20
	ctx, dir := context.Background(), b.TempDir()
	bench := newBench(b)
	bench.close()
	bench.state = filepath.Join(dir, "state")
	bench.open()
	c := bench.cache
	like := bench.acquire(bench.variant(1)).Build
	sizes := map[string]int{like.Files[0].Name: 2000, "weights.bin": size}
	source, content := filepath.Join(dir, "source"), make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(content)
	ways := []struct {
		name  string
		ahead bool // the files are staged before it begins
		known bool // and hashed
	}{{name: "copy"}, {name: "put"}, {name: "compiled", ahead: true},
		{name: "checked", ahead: true, known: true}}
	took := make([]time.Duration, len(ways))
	turn := uint32(0)
	for b.Loop() {
		for i, way := range ways {
			turn++
			binary.LittleEndian.PutUint32(content, turn)
			for name, n := range sizes {
				require.NoError(b, os.MkdirAll(source, 0o700))
				require.NoError(b, os.WriteFile(filepath.Join(source, name), content[:n], 0o600))
			}
			staged := filepath.Join(c.dir, "staging", jobs.NewID())
			err := os.Mkdir(staged, 0o700)
			require.NoError(b, err)
			hashed := make(map[string]cas.Hashed)
			stage := func() {
				for name := range sizes {
					f, err := os.Open(filepath.Join(source, name))
					require.NoError(b, err)
					hashed[name], err = c.cas.CopyAhead(ctx, f, filepath.Join(staged, name),
						int64(sizes[name]))
					require.NoError(b, err)
					require.NoError(b, f.Close())
				}
			}
			build := *like
			build.Files = nil
			binary.LittleEndian.PutUint32(build.RequestKey[:], turn)
			for name, n := range sizes {
				build.Files = append(build.Files, like.Files[0])
				build.Files[len(build.Files)-1].Name, build.Files[len(build.Files)-1].Size = name,
					int64(n)
			}
			if way.ahead {
				for name, n := range sizes {
					require.NoError(b,
						os.WriteFile(filepath.Join(staged, name), content[:n], 0o600))
				}
			}
			if way.known {
				hashed["weights.bin"], err = c.cas.HashAhead(ctx,
					filepath.Join(staged, "weights.bin"))
				require.NoError(b, err)
			}
			began := time.Now()
			if way.name == "copy" {
				for name := range sizes {
					require.NoError(b,
						copyDurably(filepath.Join(source, name), filepath.Join(staged, name)))
				}
				require.NoError(b, cas.OS{}.SyncDir(staged))
				took[i] += time.Since(began)
			} else {
				if !way.ahead {
					stage()
				}
				hold := c.cas.Hold()
				err := c.Store.Publish(ctx,
					store.Publication{Build: &build, Dir: staged, Hashed: hashed, Kind: "test"},
					hold)
				took[i] += time.Since(began)
				hold.Release()
				require.NoError(b, err)
				err = bench.remove(&build)
				require.NoError(b, err)
			}
			require.NoError(b, os.RemoveAll(staged))
		}
	}
	for i, way := range ways {
		b.ReportMetric(float64(took[i].Microseconds())/1000/float64(b.N), way.name+"-ms")
		if i > 0 {
			b.ReportMetric(took[i].Seconds()/took[0].Seconds(), way.name+"/copy")
		}
	}
}

// copyDurably has the kernel copy, as cp does.
func copyDurably(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	if _, err = out.ReadFrom(in); err == nil {
		err = out.Sync()
	}
	return errors.Join(err, out.Close())
}
