package dedupe

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"
	"pgregory.net/rapid"

	"github.com/epcached/epcached/cas"
)

var (
	sampleBase = bytes.Repeat([]byte("weights of a layer, "), 20000)
	literals   = []byte("header of batch 4|01234567|tail")
)

// sampleRecipe takes from two bases, out of order, and repeats.
func sampleRecipe() (*Recipe, []byte) {
	var plain []byte
	plain = append(plain, literals[:17]...)
	plain = append(plain, sampleBase[1003:201003]...)
	plain = append(plain, bytes.Repeat(literals[18:26], 500)[:3999]...)
	plain = append(plain, sampleBase[3:70003]...)
	plain = append(plain, literals[26:]...)
	return &Recipe{
		Blob: cas.Digest(blake3.Sum256(plain)), Size: int64(len(plain)), Literals: 0,
		Bases: []Base{
			{cas.Digest(blake3.Sum256(literals)), int64(len(literals))},
			{cas.Digest(blake3.Sum256(sampleBase)), int64(len(sampleBase))},
		},
		Extents: []Extent{
			{At: 0, Length: 17, From: 0, Base: 0},
			{At: 17, Length: 200000, From: 1003, Base: 1},
			{At: 200017, Length: 3999, From: 18, Period: 8, Base: 0},
			{At: 204016, Length: 70000, From: 3, Base: 1},
			{At: 274016, Length: 5, From: 26, Base: 0},
		},
	}, plain
}

func openSample(d cas.Digest) (Source, error) {
	for _, b := range [][]byte{sampleBase, literals} {
		if cas.Digest(blake3.Sum256(b)) == d {
			return bytes.NewReader(b), nil
		}
	}
	return nil, cas.ErrNotFound
}

func TestRecipeOfFormat1(t *testing.T) {
	path := filepath.Join("..", "testdata", "format", "v1", "recipe")
	r, _ := sampleRecipe()
	b, err := os.ReadFile(path) // it has names of ranges, which are passed over
	require.NoError(t, err)
	got, err := DecodeRecipe(b)
	require.NoError(t, err)
	require.Equal(t, r, got)
}

func TestApply(t *testing.T) {
	for _, trusted := range []bool{false, true} {
		r, plain := sampleRecipe()
		f, err := os.Create(filepath.Join(t.TempDir(), "out"))
		require.NoError(t, err)
		require.NoError(t,
			Apply(context.Background(), r, openSample, f, ApplyOptions{Trusted: trusted}))
		require.NoError(t, f.Close())
		got, err := os.ReadFile(f.Name())
		require.NoError(t, err)
		require.True(t, bytes.Equal(plain, got), "trusted %v", trusted)
	}
}

func TestApplyCopiesBetweenFiles(t *testing.T) {
	r, plain := sampleRecipe()
	dir := t.TempDir()
	open := func(d cas.Digest) (Source, error) {
		s, err := openSample(d)
		if err != nil {
			return nil, err
		}
		b := make([]byte, s.Size())
		if err := ReadFull(s, b, 0); err != nil {
			return nil, err
		}
		path := filepath.Join(dir, d.String())
		if err := os.WriteFile(path, b, 0o444); err != nil {
			return nil, err
		}
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		return NewFile(f)
	}
	f, err := os.Create(filepath.Join(dir, "out"))
	require.NoError(t, err)
	require.NoError(t, Apply(context.Background(), r, open, f, ApplyOptions{Trusted: true}))
	require.NoError(t, f.Close())
	got, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(plain, got))
}

func TestAssembledReadsAnyRange(t *testing.T) {
	r, plain := sampleRecipe()
	a, err := Assemble(r, openSample)
	require.NoError(t, err)
	requireAnyRange(t, a, plain)
}

// requireAnyRange reads ranges, most of which begin in or beside each extent's first and last
// bytes, and closes it.
func requireAnyRange(t *testing.T, a *Assembled, plain []byte) {
	t.Helper()
	for _, e := range a.recipe.Extents {
		for _, off := range []int64{e.At, e.At + 1, e.At + e.Length/2, e.At + e.Length/2 + 1,
			e.At + e.Length - 1} {
			for _, n := range []int64{1, 3, e.Length / 3, e.Length, 2 * e.Length} {
				got := make([]byte, min(n, a.Size()-off))
				require.NoError(t, ReadFull(a, got, off))
				require.True(t, bytes.Equal(plain[off:off+int64(len(got))], got), "%d bytes at %d",
					len(got), off)
			}
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		e := rapid.SampledFrom(a.recipe.Extents).Draw(t, "extent")
		off := rapid.IntRange(int(e.At), int(e.At+e.Length)).Draw(t, "off")
		n := min(rapid.IntRange(0, 20).Draw(t, "n")+rapid.IntRange(0, 1).
			Draw(t, "more")*int(e.Length), len(plain)-off)
		got := make([]byte, n)
		require.NoError(t, ReadFull(a, got, int64(off)))
		require.True(t, bytes.Equal(plain[off:off+n], got))
	})
	n, err := a.ReadAt(make([]byte, 2), a.Size()-1)
	require.Equal(t, 1, n)
	require.ErrorIs(t, err, io.EOF)
	_, err = a.ReadAt(make([]byte, 1), -1)
	require.Error(t, err)
	require.NoError(t, a.Close())
}

func TestApplyRefuses(t *testing.T) {
	apply := func(r *Recipe, open func(cas.Digest) (Source, error)) error {
		f, err := os.Create(filepath.Join(t.TempDir(), "out"))
		require.NoError(t, err)
		err = Apply(context.Background(), r, open, f, ApplyOptions{})
		require.NoError(t, f.Close())
		return err
	}
	t.Run("a lie about the digest", func(t *testing.T) {
		r, plain := sampleRecipe()
		r.Blob[0] ^= 1
		var corrupt *cas.CorruptError
		require.ErrorAs(t, apply(r, openSample), &corrupt)
		require.Equal(t, cas.Digest(blake3.Sum256(plain)), corrupt.Got)
	})
	t.Run("a lie about a base's length", func(t *testing.T) {
		r, _ := sampleRecipe()
		r.Bases[1].Size++
		var c *BaseError
		require.ErrorAs(t, apply(r, openSample), &c)
		require.Equal(t, r.Bases[1].Digest, c.Digest)
	})
	t.Run("a missing base", func(t *testing.T) {
		r, _ := sampleRecipe()
		err := apply(r, func(cas.Digest) (Source, error) { return nil, cas.ErrNotFound })
		require.ErrorIs(t, err, cas.ErrNotFound)
	})
}

func TestValidateRefuses(t *testing.T) {
	cases := map[string]func(*Recipe){
		"points behind its base":       func(r *Recipe) { r.Extents[4].From = 27 },
		"points before its base":       func(r *Recipe) { r.Extents[0].From = -1 },
		"a sum that wraps":             func(r *Recipe) { r.Extents[0].From = 1<<63 - 1 },
		"a gap":                        func(r *Recipe) { r.Extents[1].At++ },
		"an overlap":                   func(r *Recipe) { r.Extents[1].At-- },
		"too short":                    func(r *Recipe) { r.Extents = r.Extents[:4] },
		"too long":                     func(r *Recipe) { r.Extents[4].Length++ },
		"an empty extent":              func(r *Recipe) { r.Extents[0].Length = 0 },
		"a period of the whole length": func(r *Recipe) { r.Extents[2].Period = 3999 },
		"a period behind its base":     func(r *Recipe) { r.Extents[2].Period = 14 },
		"a base that is not there":     func(r *Recipe) { r.Extents[0].Base = 2 },
		"a base that is the blob":      func(r *Recipe) { r.Bases[1].Digest = r.Blob },
		"a base twice": func(
			r *Recipe) {
			r.Bases[1].Digest = r.Bases[0].Digest
		},
		"a base that nothing needs": func(r *Recipe) {
			r.Bases = append(r.Bases,
				Base{cas.Digest{1}, 1})
		},
		"literals that are not there": func(r *Recipe) { r.Literals = 2 },
		"literals below none":         func(r *Recipe) { r.Literals = -2 },
		"a base before the first":     func(r *Recipe) { r.Extents[0].Base = -1 },
		"a base of no bytes": func(r *Recipe) {
			r.Bases = append(r.Bases,
				Base{cas.Digest{1}, 0})
		},
		"a base without a digest": func(r *Recipe) { r.Bases[1].Digest = cas.Digest{} },
		"a base above all limits": func(r *Recipe) { r.Bases[1].Size = MaxSize + 1 },
		"too many bases":          func(r *Recipe) { *r = *ofMany(MaxBases + 1) },
		"a negative period":       func(r *Recipe) { r.Extents[2].Period = -8 },
		"a negative size": func(r *Recipe) {
			*r = Recipe{Blob: r.Blob,
				Literals: NoLiterals, Size: -1}
		},
		"a size above all limits": func(r *Recipe) {
			*r = Recipe{Blob: r.Blob, Literals: NoLiterals, Size: MaxSize + 1,
				Bases: r.Bases[1:2], Extents: []Extent{{Length: MaxSize + 1, Period: 1}}}
		},
		"too many extents": func(r *Recipe) {
			*r = *ofMany(1)
			r.Size = MaxExtents +
				1
			r.Extents = bytesOf(r.Size)
		},
	}
	for name, damage := range cases {
		t.Run(name, func(t *testing.T) {
			r, _ := sampleRecipe()
			damage(r)
			var f *FormatError
			require.ErrorAs(t, r.Validate(), &f)
			_, err := r.Encode()
			require.ErrorAs(t, err, &f)
		})
	}
}

// ofMany is a recipe of so many bases, a byte from each.
func ofMany(n int) *Recipe {
	r := &Recipe{Blob: cas.Digest{1}, Size: int64(n), Literals: NoLiterals}
	for i := range n {
		r.Bases = append(r.Bases, Base{cas.Digest{2, byte(i), byte(i >> 8)}, 1})
		r.Extents = append(r.Extents, Extent{At: int64(i), Length: 1, Base: i})
	}
	return r
}

// bytesOf takes each byte by itself.
func bytesOf(n int64) (all []Extent) {
	for i := range n {
		all = append(all, Extent{At: i, Length: 1})
	}
	return all
}

// Recipes at the limits are accepted.
func TestValidateAcceptsTheLimits(t *testing.T) {
	most := ofMany(1)
	most.Size, most.Extents = MaxExtents, bytesOf(MaxExtents)
	for _, r := range []*Recipe{ofMany(MaxBases), most} {
		b, err := r.Encode()
		require.NoError(t, err)
		again, err := DecodeRecipe(b)
		require.NoError(t, err)
		require.True(t, again.Equal(r))
	}
}

// seal makes header and checksum of a damaged body right again.
func seal(b []byte) []byte {
	binary.LittleEndian.PutUint32(b[12:], uint32(len(b)-headerSize))
	sum := blake3.Sum256(b)
	return append(b, sum[:]...)
}

func TestDecodeRefuses(t *testing.T) {
	r, _ := sampleRecipe()
	sound, err := r.Encode()
	require.NoError(t, err)
	body := len(sound) - sumSize
	cases := map[string]struct {
		offset int64
		damage func(b []byte) []byte
	}{
		"empty":                 {0, func([]byte) []byte { return nil }},
		"another magic":         {0, func(b []byte) []byte { b[0]++; return b }},
		"version 0":             {8, func(b []byte) []byte { b[8] = 0; return b }},
		"cut off":               {12, func(b []byte) []byte { return b[:len(b)-1] }},
		"something behind":      {12, func(b []byte) []byte { return append(b, 0) }},
		"a flipped bit":         {int64(body), func(b []byte) []byte { b[60] ^= 1; return b }},
		"too many bases":        {56, func(b []byte) []byte { b[57] = 2; return seal(b[:body]) }},
		"more extents than fit": {60, func(b []byte) []byte { b[61] = 9; return seal(b[:body]) }},
		"a base outside":        {152, func(b []byte) []byte { b[152] = 4; return seal(b[:body]) }},
		"a longer number": {152,
			func(b []byte) []byte {
				return seal(append(append(b[:152:152], 0x80, 0),
					b[153:body]...))
			}},
		"a longer signed one": {154,
			func(b []byte) []byte {
				return seal(append(append(b[:154:154], 0x80, 0),
					b[155:body]...))
			}},
		"a repeat of nothing": {152,
			func(b []byte) []byte {
				b[152] |= 1
				return seal(append(append(b[:155:155], 0),
					b[155:body]...))
			}},
		"a size of 2^63": {48, func(b []byte) []byte { b[55] = 0x80; return seal(b[:body]) }},
		"a base of 2^63": {104,
			func(b []byte) []byte { b[111] = 0x80; return seal(b[:body]) }},
		"a length of 2^63": {153, func(b []byte) []byte {
			return seal(append(append(b[:153:153], binary.AppendUvarint(nil, 1<<63)...),
				b[154:body]...))
		}},
		"more than it may have": {12,
			func(b []byte) []byte { binary.LittleEndian.PutUint32(b[12:], maxBody+1); return b }},
		"bytes after its end": {int64(body),
			func(b []byte) []byte { return seal(append(b[:body:body], 0)) }},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := DecodeRecipe(c.damage(bytes.Clone(sound)))
			var f *FormatError
			require.ErrorAs(t, err, &f)
			require.Equal(t, c.offset, f.Offset, "%v", err)
		})
	}
	newer := bytes.Clone(sound)
	newer[8] = 3
	_, err = DecodeRecipe(newer)
	require.ErrorIs(t, err, ErrNewer)
}

func FuzzDecodeRecipe(f *testing.F) {
	r, _ := sampleRecipe()
	b, err := r.Encode()
	require.NoError(f, err)
	f.Add(b[headerSize : len(b)-sumSize])
	f.Fuzz(func(t *testing.T, body []byte) {
		head := make([]byte, headerSize, headerSize+len(body)+sumSize)
		copy(head, recipeMagic)
		head[8] = formatPlain
		file := seal(append(head, body...))
		r, err := DecodeRecipe(file)
		if err != nil {
			var fe *FormatError
			require.True(t, errors.As(err, &fe), "%v", err)
			require.LessOrEqual(t, fe.Offset, int64(len(file)))
			return
		}
		if binary.LittleEndian.Uint32(body[48:]) > 0 {
			return // names of ranges were passed over
		}
		again, err := r.Encode()
		require.NoError(t, err)
		require.Equal(t, file, again)
	})
}
