package dedupe

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
)

// framedSample is a recipe of a blob with literals that make three frames: text, bytes that nothing
// compresses, and a short end.
func framedSample() (r *Recipe, plain, own []byte) {
	own = bytes.Repeat([]byte("name of an operator, and where its weights are; "), 2<<10)[:MinFrame]
	noise := make([]byte, MinFrame)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(noise)
	own = append(append(own, noise...), bytes.Repeat([]byte("tail"), 250)...)
	plain = append(plain, own[:100]...)
	plain = append(plain, sampleBase[1003:201003]...)
	plain = append(plain, own[100:100000]...)
	plain = append(plain, bytes.Repeat(own[100000:100012], 400)[:4001]...)
	plain = append(plain, own[100012:]...)
	r = &Recipe{
		Blob: blake3.Sum256(plain), Size: int64(len(plain)), Literals: NoLiterals,
		Bases: []Base{{cas.Digest(blake3.Sum256(sampleBase)), int64(len(sampleBase))}},
		Extents: []Extent{
			{Length: 100, Base: 1},
			{At: 100, Length: 200000, From: 1003},
			{At: 200100, Length: 99900, From: 100, Base: 1},
			{At: 300000, Length: 4001, From: 100000, Period: 12, Base: 1},
			{At: 304001, Length: int64(len(own)) - 100012, From: 100012, Base: 1},
		},
		Frames: &Frames{Size: int64(len(own)), Each: MinFrame},
	}
	return r, plain, own
}

// putSample stores it in a directory of its own.
func putSample(t testing.TB) (dir string, r *Recipe, plain []byte) {
	t.Helper()
	dir = t.TempDir()
	s, err := OpenRecipeStore(dir, nil)
	require.NoError(t, err)
	r, plain, own := framedSample()
	require.NoError(t, s.Put(context.Background(), r, bytes.NewReader(own), nil))
	return dir, r, plain
}

func recipePath(dir string, d cas.Digest) string {
	return filepath.Join(recipeDir(dir, d), d.String())
}

// restored is what a recipe in dir gives.
func restored(t testing.TB, dir string, d cas.Digest, trusted bool) ([]byte, error) {
	t.Helper()
	r, err := ReadRecipeStore(dir).Get(d)
	if err != nil {
		return nil, err
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	require.NoError(t, err)
	err = Apply(context.Background(), r, openSample, f, ApplyOptions{Trusted: trusted})
	require.NoError(t, f.Close())
	if err != nil {
		return nil, err
	}
	b, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	return b, nil
}

func TestRecipeOfFormat2(t *testing.T) {
	path := filepath.Join("..", "testdata", "format", "v2", "recipe")
	written, r, plain := putSample(t)
	if *writeSample {
		b, err := os.ReadFile(recipePath(written, r.Blob))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, b, 0o644))
	}
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(recipeDir(dir, r.Blob), 0o700))
	require.NoError(t, os.WriteFile(recipePath(dir, r.Blob), b, 0o444))
	got, err := ReadRecipeStore(dir).Get(r.Blob)
	require.NoError(t, err)
	// another encoder may find something shorter
	got.Frames.file, got.Frames.Table, r.Frames.Table = nil, nil, nil
	require.Equal(t, r, got)
	for _, trusted := range []bool{false, true} {
		out, err := restored(t, dir, r.Blob, trusted)
		require.NoError(t, err)
		require.True(t, bytes.Equal(plain, out), "trusted %v", trusted)
	}
	s, err := OpenRecipeStore(dir, nil)
	require.NoError(t, err)
	require.Empty(t, s.Problems())
	p, ok := s.Has(r.Blob)
	require.True(t, ok)
	require.Equal(t, int64(len(b)), p.Stored)
	require.Equal(t, r.Frames.Size, p.Compressed)
	require.Equal(t, r.Bases, p.Bases)
}

// Incompressible frames are stored as they are, and read like the others.
func TestFramesAreReadInAnyRange(t *testing.T) {
	dir, r, plain := putSample(t)
	stored := r.Frames.Table
	require.Less(t, stored[0].Stored, int64(MinFrame/8))
	require.Equal(t, int64(MinFrame), stored[1].Stored)
	got, err := ReadRecipeStore(dir).Get(r.Blob)
	require.NoError(t, err)
	a, err := Assemble(got, openSample)
	require.NoError(t, err)
	requireAnyRange(t, a, plain)
}

// A recipe that is not proven leaves what was there.
func TestFailedPutChangesNothing(t *testing.T) {
	ctx := context.Background()
	framed, _, own := framedSample()
	for name, put := range map[string]struct {
		r        *Recipe
		literals Source
	}{"frames": {framed, bytes.NewReader(own)}, "none": {later(framed.Blob, framed.Size), nil}} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s, err := OpenRecipeStore(dir, nil)
			require.NoError(t, err)
			before := later(framed.Blob, framed.Size)
			before.Bases[0].Digest[0] ^= 1
			require.NoError(t, s.Put(ctx, before, nil, nil))
			require.ErrorIs(t,
				s.Put(ctx, put.r, put.literals, func(*Recipe) error { return os.ErrInvalid }),
				os.ErrInvalid)
			got, err := s.Get(framed.Blob)
			require.NoError(t, err)
			require.Equal(t, before, got)
			left, err := os.ReadDir(filepath.Join(dir, recipesName, incomingName))
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

// later is a recipe of a blob that takes all of it from one base.
func later(blob cas.Digest, size int64) *Recipe {
	return &Recipe{Blob: blob, Size: size, Literals: NoLiterals,
		Bases: []Base{{cas.Digest{7}, size}}, Extents: []Extent{{Length: size}}}
}

// frame makes a frame of Zstandard of b.
func frame(t testing.TB, b []byte, o ...zstd.EOption) []byte {
	t.Helper()
	c, err := zstd.NewWriter(nil, o...)
	require.NoError(t, err)
	return c.EncodeAll(b, nil)
}

// Each frame that is not what its recipe says is refused with its place, and never gives a byte;
// what it says of itself takes no memory.
func TestFramesRefused(t *testing.T) {
	bomb := frame(t, make([]byte, 64<<20), zstd.WithSingleSegment(false))
	text := bytes.Repeat([]byte("text "), MinFrame)[:MinFrame]
	skippable := binary.LittleEndian.AppendUint32(nil, 0x184d2a50)
	skippable = append(binary.LittleEndian.AppendUint32(skippable, 100), make([]byte, 100)...)
	lies := frame(t, text, zstd.WithSingleSegment(true))
	// The size that it states, of 4 bytes behind the magic and the descriptor.
	shorter := append([]byte{}, lies...)
	binary.LittleEndian.PutUint32(shorter[5:], MinFrame+1)
	unsized := frame(t, text[:100])
	cases := map[string][]byte{
		"no frame":                    []byte("no frame of Zstandard"),
		"empty but for a magic":       {0x28, 0xb5, 0x2f, 0xfd},
		"a bomb":                      bomb,
		"a bomb with a modest header": append(append([]byte{}, lies[:len(lies)/2]...), bomb...),
		"cut off":                     lies[:len(lies)-3],
		"something behind":            append(append([]byte{}, lies...), 0),
		"a second frame":              append(append([]byte{}, lies...), lies...),
		"skippable":                   skippable,
		"less than it says": frame(t, text[:MinFrame-1],
			zstd.WithSingleSegment(true)),
		"more than it may": frame(t, append(append([]byte{}, text...), 0),
			zstd.WithSingleSegment(true)),
		"another size than what is in it": shorter,
		"a few bytes":                     unsized,
		"with a dictionary": append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x21, 9},
			lies[5:]...),
		"a window of gigabytes": append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x80, 0xf8, 0, 0, 1, 0},
			lies[9:]...),
	}
	for name, bad := range cases {
		t.Run(name, func(t *testing.T) {
			if len(bad) > MinFrame {
				bad = bad[:MinFrame]
			}
			dir, r, _ := putSample(t)
			// The recipe is sound in itself, and says of this frame what is true of it.
			replaceFrame(t, dir, r, 0, bad)
			for _, trusted := range []bool{false, true} {
				_, err := restored(t, dir, r.Blob, trusted)
				var fe *FormatError
				require.ErrorAs(t, err, &fe)
				require.Equal(t, "frame 0", fe.Field)
				require.Positive(t, fe.Offset)
			}
		})
	}
}

// replaceFrame writes the recipe again with other bytes for one frame, and the table that fits
// them.
func replaceFrame(t testing.TB, dir string, r *Recipe, i int, bad []byte) {
	t.Helper()
	path := recipePath(dir, r.Blob)
	read, err := ReadRecipeStore(dir).Get(r.Blob)
	require.NoError(t, err)
	src, err := read.Frames.open()
	require.NoError(t, err)
	var frames []byte
	for k, one := range read.Frames.Table {
		b := make([]byte, one.Stored)
		require.NoError(t, src.read(b, k))
		if k == i {
			b = bad
		}
		frames = append(frames, b...)
	}
	require.NoError(t, src.Close())
	read.Frames.Table[i] = Frame{int64(len(bad)), truncatedSum(bad)}
	head, err := read.Encode()
	require.NoError(t, err)
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.WriteFile(path, append(head, frames...), 0o444))
}

func TestDamagedFiles(t *testing.T) {
	cases := map[string]struct {
		field  string
		damage func(b []byte, head int) []byte
	}{
		"a flipped bit in a frame": {"frame 0",
			func(b []byte, head int) []byte { b[head+20] ^= 4; return b }},
		"a flipped bit in a frame as it is": {"frame 1",
			func(b []byte, head int) []byte { b[len(b)-3000] ^= 4; return b }},
		"a flipped bit in the table": {"checksum",
			func(b []byte, head int) []byte { b[head-sumSize-30] ^= 4; return b }},
		"cut off": {"frames",
			func(b []byte, head int) []byte { return b[:len(b)-1] }},
		"cut off before the frames": {"frames",
			func(b []byte, head int) []byte { return b[:head] }},
		"cut off in the table": {"length", func(b []byte, head int) []byte { return b[:head-40] }},
		"something behind": {"frames",
			func(b []byte, head int) []byte { return append(b, 0) }},
		"format 1 with frames": {"checksum",
			func(b []byte, head int) []byte { b[8] = 1; return b }},
		"a length of gigabytes": {"length",
			func(b []byte, head int) []byte { b[15] = 0xff; return b }},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir, r, _ := putSample(t)
			path := recipePath(dir, r.Blob)
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			head, err := r.Encode()
			require.NoError(t, err)
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.WriteFile(path, c.damage(b, len(head)), 0o444))
			_, err = restored(t, dir, r.Blob, true)
			var fe *FormatError
			require.ErrorAs(t, err, &fe)
			require.Equal(t, c.field, fe.Field)
		})
	}
}

// A recipe that stands where the one stood that was read is not taken for it.
func TestFramesOfAnotherRecipe(t *testing.T) {
	dir, r, _ := putSample(t)
	read, err := ReadRecipeStore(dir).Get(r.Blob)
	require.NoError(t, err)
	replaceFrame(t, dir, r, 2, frame(t, bytes.Repeat([]byte("else"), 250)))
	_, err = Assemble(read, openSample)
	require.NoError(t, err)
	_, err = read.Frames.open()
	require.ErrorIs(t, err, cas.ErrNotFound)
	require.NoError(t, os.Remove(recipePath(dir, r.Blob)))
	_, err = read.Frames.open()
	require.ErrorIs(t, err, cas.ErrNotFound)
}

func TestFramesValidated(t *testing.T) {
	_, r, _ := putSample(t)
	cases := map[string]func(r *Recipe){
		"a size that is no power of two": func(r *Recipe) { r.Frames.Each = MinFrame + 1 },
		"frames too small":               func(r *Recipe) { r.Frames.Each = MinFrame / 2 },
		"frames too large":               func(r *Recipe) { r.Frames.Each = 2 * MaxFrame },
		"one missing":                    func(r *Recipe) { r.Frames.Table = r.Frames.Table[:2] },
		"one that grows":                 func(r *Recipe) { r.Frames.Table[1].Stored++ },
		"one of nothing":                 func(r *Recipe) { r.Frames.Table[1].Stored = 0 },
		"no bytes":                       func(r *Recipe) { r.Frames.Size = 0 },
		"literals besides":               func(r *Recipe) { r.Literals = 0 },
		"nothing taken from them": func(r *Recipe) {
			r.Extents, r.Size = r.Extents[1:2],
				200000
			r.Extents[0].At = 0
		},
		"an extent behind their end": func(r *Recipe) { r.Extents[0].From = r.Frames.Size - 99 },
		"a base behind them":         func(r *Recipe) { r.Extents[0].Base = 2 },
	}
	for name, damage := range cases {
		t.Run(name, func(t *testing.T) {
			bad := *r
			frames := *r.Frames
			frames.Table = append([]Frame{}, frames.Table...)
			bad.Frames, bad.Extents = &frames, append([]Extent{}, r.Extents...)
			damage(&bad)
			var fe *FormatError
			require.ErrorAs(t, bad.Validate(), &fe)
		})
	}
}

// Any file is either refused, or is sound, encodes to the same bytes again, and decodes to the
// stated bytes.
func FuzzFramedRecipe(f *testing.F) {
	dir, r, _ := putSample(f)
	b, err := os.ReadFile(recipePath(dir, r.Blob))
	require.NoError(f, err)
	head, err := r.Encode()
	require.NoError(f, err)
	f.Add(head[headerSize:len(head)-sumSize], b[len(head):])
	f.Fuzz(func(t *testing.T, body, frames []byte) {
		head := make([]byte, headerSize, headerSize+len(body)+sumSize)
		copy(head, recipeMagic)
		head[8] = formatFramed
		head = seal(append(head, body...))
		r, err := DecodeRecipe(append(bytes.Clone(head), frames...))
		var fe *FormatError
		if err != nil {
			require.True(t, errors.As(err, &fe), "%v", err)
			return
		}
		if binary.LittleEndian.Uint32(body[48:]) == 0 { // else names of ranges were passed over
			again, err := r.Encode()
			require.NoError(t, err)
			require.Equal(t, head, again)
		}
		// The fuzzer finds no sums: they are made right, so that what is behind them is tried.
		at := int64(0)
		for i, one := range r.Frames.Table {
			stored := frames[at : at+one.Stored]
			at += one.Stored
			if p := make([]byte, r.Frames.plain(i)); int64(len(p)) > one.Stored {
				_ = decodeFrame(p, stored)
			}
		}
	})
}

// Any bytes decode to just as many as are expected, or are refused.
func FuzzFrame(f *testing.F) {
	f.Add(frame(f, bytes.Repeat([]byte("text "), 1000), zstd.WithSingleSegment(true)), 5000)
	f.Add(frame(f, make([]byte, 1<<20)), 1<<20)
	f.Add(frame(f, make([]byte, 1<<20)), 5)
	f.Fuzz(func(t *testing.T, b []byte, n int) {
		if n <= 0 || n > MaxFrame {
			return
		}
		room := bytes.Repeat([]byte{0xa5}, n+64)
		if decodeFrame(room[:n], b) == nil {
			plain, err := zstd.NewReader(nil)
			require.NoError(t, err)
			want, err := plain.DecodeAll(b, nil)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, room[:n]))
			plain.Close()
		}
		require.Equal(t, bytes.Repeat([]byte{0xa5}, 64), room[n:], "it wrote behind its end")
	})
}
