package dedupe

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
)

// extentsOfAllKinds is a recipe of a base of 4 MiB: of extents of many steps, that repeat,
// that are many to a step, and that lie at every place within a block.
func extentsOfAllKinds() (r *Recipe, base, plain []byte) {
	base = randomBytes(141, 4<<20)
	d := cas.Digest(blake3.Sum256(base))
	r = &Recipe{Bases: []Base{{d, int64(len(base))}}, Literals: NoLiterals}
	take := func(from, length, period int64) {
		r.Extents = append(r.Extents,
			Extent{At: r.Size, Length: length, From: from, Period: period})
		r.Size += length
		used := base[from : from+length]
		if period > 0 {
			used = bytes.Repeat(base[from:from+period], int(length/period+1))[:length]
		}
		plain = append(plain, used...)
	}
	take(5, 3<<20+77, 0)
	take(4096*3, 2<<20, 0)
	take(77, 200<<10, 1000)
	take(99, 2<<20+100, 64<<10+1)
	for i := range int64(400) {
		take(i*7919, 5000+i, 0)
	}
	take(4096+r.Size%4096, 64<<10+4096, 0)
	take(1, 64<<10, 0)
	take(3, 10, 0)
	take(2, 64<<10-1, 3)
	r.Blob = cas.Digest(blake3.Sum256(plain))
	return r, base, plain
}

// To a file or to anything else, from files or from anything else, hashed or not: the same bytes
// come out, and the progress adds up.
func TestApplyGivesExtentsOfAllKinds(t *testing.T) {
	r, base, plain := extentsOfAllKinds()
	dir := t.TempDir()
	path := filepath.Join(dir, "base")
	require.NoError(t, os.WriteFile(path, base, 0o444))
	open := map[string]func(cas.Digest) (Source, error){
		"a file": func(cas.Digest) (Source, error) {
			f, err := os.Open(path)
			if err != nil {
				return nil, err
			}
			return NewFile(f)
		},
		"memory": func(cas.Digest) (Source, error) { return source(base), nil },
	}
	for name, take := range open {
		for _, trusted := range []bool{false, true} {
			for _, file := range []bool{false, true} {
				last := int64(0)
				o := ApplyOptions{Trusted: trusted, Progress: func(done, total int64) {
					require.Equal(t, r.Size, total)
					require.Greater(t, done, last)
					last = done
				}}
				got := make(buffer, len(plain))
				if file {
					f, err := os.Create(filepath.Join(dir, "out"))
					require.NoError(t, err)
					require.NoError(t, Apply(context.Background(), r, take, f, o))
					require.NoError(t, f.Close())
					got, err = os.ReadFile(f.Name())
					require.NoError(t, err)
				} else {
					require.NoError(t, Apply(context.Background(), r, take, got, o))
				}
				require.True(t, bytes.Equal(plain, got), "from %s, trusted %v, to a file %v", name,
					trusted, file)
				require.Equal(t, r.Size, last)
			}
		}
	}
}

// failing is a writer, or a source, that fails at one byte.
type failing struct {
	Source
	at  int64
	err error
}

func (f *failing) has(p []byte, off int64) bool { return off <= f.at && f.at < off+int64(len(p)) }

func (f *failing) WriteAt(p []byte, off int64) (int, error) {
	if f.has(p, off) {
		return 0, f.err
	}
	return len(p), nil
}

func (f *failing) ReadAt(p []byte, off int64) (int, error) {
	if f.has(p, off) {
		return 0, f.err
	}
	return f.Source.ReadAt(p, off)
}

// A byte that cannot be written, or read, is an error, whatever extent it belongs to.
func TestApplyReportsReadAndWriteErrors(t *testing.T) {
	r, base, _ := extentsOfAllKinds()
	bad := errors.New("bad sector")
	for _, trusted := range []bool{false, true} {
		o := ApplyOptions{Trusted: trusted}
		for _, i := range []int{0, 2, 200, 404, 407} {
			for _, at := range []int64{r.Extents[i].At, r.Extents[i].At + r.Extents[i].Length - 1} {
				err := Apply(context.Background(), r,
					func(cas.Digest) (Source, error) { return source(base), nil },
					&failing{at: at, err: bad}, o)
				require.ErrorIs(t, err, bad, "extent %d, trusted %v", i, trusted)
			}
		}
		for _, at := range []int64{5, 5 + 3<<20, 77 + 999, 99 + 64<<10} {
			src := &failing{Source: source(base), at: at, err: bad}
			err := Apply(context.Background(), r,
				func(cas.Digest) (Source, error) { return src, nil }, make(buffer, r.Size), o)
			require.ErrorIs(t, err, bad)
			var c *BaseError
			require.ErrorAs(t, err, &c)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		err := Apply(ctx, r, func(cas.Digest) (Source, error) { return source(base), nil },
			make(buffer, r.Size), o)
		require.ErrorIs(t, err, context.Canceled)
	}
}

// closing counts what was opened and not closed.
type closing struct {
	Source
	open *int
	err  error
}

func (c *closing) Close() error { *c.open--; return c.err }

// Every base that was opened is closed, also one that is not what the recipe says of it, and
// the error of closing is returned.
func TestApplyClosesItsSources(t *testing.T) {
	r, base, _ := extentsOfAllKinds()
	bad := errors.New("bad close")
	for _, cut := range []int{0, 1} {
		for _, fails := range []error{nil, bad} {
			open := 0
			err := Apply(context.Background(), r, func(cas.Digest) (Source, error) {
				open++
				return &closing{source(base[cut:]), &open, fails}, nil
			}, make(buffer, r.Size), ApplyOptions{})
			require.Zero(t, open)
			require.Equal(t, fails != nil, errors.Is(err, bad))
			var c *BaseError
			require.Equal(t, cut > 0, errors.As(err, &c))
		}
	}
	r.Extents[0].Length++
	var f *FormatError
	_, err := Assemble(r, func(cas.Digest) (Source, error) { return source(base), nil })
	require.ErrorAs(t, err, &f)
}
