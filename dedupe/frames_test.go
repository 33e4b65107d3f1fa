package dedupe

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
)

// framedSample is a recipe that an earlier version wrote, of a blob with literals that make three
// frames: text, bytes that nothing compresses, and a short end.
func framedSample(t testing.TB) (file []byte, plain []byte) {
	t.Helper()
	file, err := os.ReadFile(filepath.Join("..", "testdata", "format", "v2", "recipe"))
	require.NoError(t, err)
	own := bytes.Repeat([]byte("name of an operator, and where its weights are; "), 2<<10)
	own = own[:minFrame]
	noise := make([]byte, minFrame)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(noise)
	own = append(append(own, noise...), bytes.Repeat([]byte("tail"), 250)...)
	plain = append(plain, own[:100]...)
	plain = append(plain, sampleBase[1003:201003]...)
	plain = append(plain, own[100:100000]...)
	plain = append(plain, bytes.Repeat(own[100000:100012], 400)[:4001]...)
	plain = append(plain, own[100012:]...)
	return file, plain
}

// The places of the sample's fields that tests change.
const (
	sampleLiterals = headerSize + 52
	sampleFrames   = headerSize + bodyHead + baseSize
	sampleTable    = sampleFrames + 12
	sampleExtents  = sampleTable + 3*frameEntry
)

func headOf(file []byte) int {
	return headerSize + int(binary.LittleEndian.Uint32(file[12:])) + sumSize
}

// writeRecipe stores a file as the sample's recipe, in a directory of its own.
func writeRecipe(t testing.TB, file []byte) (dir string, d cas.Digest) {
	t.Helper()
	dir, d = t.TempDir(), cas.Digest(file[headerSize:headerSize+32])
	require.NoError(t, os.MkdirAll(recipeDir(dir, d), 0o700))
	require.NoError(t, os.WriteFile(recipePath(dir, d), file, 0o444))
	return dir, d
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
	file, plain := framedSample(t)
	dir, d := writeRecipe(t, file)
	require.Equal(t, cas.Digest(blake3.Sum256(plain)), d)
	for _, trusted := range []bool{false, true} {
		out, err := restored(t, dir, d, trusted)
		require.NoError(t, err)
		require.True(t, bytes.Equal(plain, out), "trusted %v", trusted)
	}
	s, err := OpenRecipeStore(dir, nil)
	require.NoError(t, err)
	require.Empty(t, s.Problems())
	p, ok := s.Has(d)
	require.True(t, ok)
	require.Equal(t, int64(len(file)), p.Stored)
	require.EqualValues(t, 2*minFrame+1000, p.Own)
	require.Equal(t, []Base{{cas.Digest(blake3.Sum256(sampleBase)), int64(len(sampleBase))}},
		p.Bases)
	require.Equal(t, []int64{200000, int64(len(plain)) - 200000}, p.Taken)
	r, err := s.Get(d)
	require.NoError(t, err)
	require.ErrorContains(t, s.Put(r, nil), "frames: they are not written any more")
}

// Incompressible frames are stored as they are, and read like the others.
func TestFramesAreReadInAnyRange(t *testing.T) {
	file, plain := framedSample(t)
	dir, d := writeRecipe(t, file)
	got, err := ReadRecipeStore(dir).Get(d)
	require.NoError(t, err)
	require.Less(t, got.Frames.table[0].stored, int64(minFrame/8))
	require.EqualValues(t, minFrame, got.Frames.table[1].stored)
	a, err := Assemble(got, openSample)
	require.NoError(t, err)
	requireAnyRange(t, a, plain)
}

// A recipe that is not proven leaves what was there.
func TestFailedPutChangesNothing(t *testing.T) {
	dir := t.TempDir()
	s, err := OpenRecipeStore(dir, nil)
	require.NoError(t, err)
	before, after := later(cas.Digest{1}, 9), later(cas.Digest{1}, 9)
	before.Bases[0].Digest[0] ^= 1
	require.NoError(t, s.Put(before, nil))
	require.ErrorIs(t, s.Put(after, func(*Recipe) error { return os.ErrInvalid }), os.ErrInvalid)
	got, err := s.Get(before.Blob)
	require.NoError(t, err)
	require.Equal(t, before, got)
	left, err := os.ReadDir(filepath.Join(dir, recipesName, incomingName))
	require.NoError(t, err)
	require.Empty(t, left)
}

// later is a recipe of a blob that takes all of it from one base.
func later(blob cas.Digest, size int64) *Recipe {
	return &Recipe{Blob: blob, Size: size, Literals: NoLiterals,
		Bases: []Base{{cas.Digest{7}, size}}, Extents: []Extent{{Length: size}}}
}

// zframe makes a frame of Zstandard of b.
func zframe(t testing.TB, b []byte, o ...zstd.EOption) []byte {
	t.Helper()
	c, err := zstd.NewWriter(nil, o...)
	require.NoError(t, err)
	return c.EncodeAll(b, nil)
}

// Each frame that is not what its recipe says is refused with its place, and never gives a byte;
// what it says of itself takes no memory.
func TestFramesRefused(t *testing.T) {
	bomb := zframe(t, make([]byte, 64<<20), zstd.WithSingleSegment(false))
	text := bytes.Repeat([]byte("text "), minFrame)[:minFrame]
	skippable := binary.LittleEndian.AppendUint32(nil, 0x184d2a50)
	skippable = append(binary.LittleEndian.AppendUint32(skippable, 100), make([]byte, 100)...)
	lies := zframe(t, text, zstd.WithSingleSegment(true))
	// The size that it states, of 4 bytes behind the magic and the descriptor.
	shorter := append([]byte{}, lies...)
	binary.LittleEndian.PutUint32(shorter[5:], minFrame+1)
	unsized := zframe(t, text[:100])
	cases := map[string][]byte{
		"no frame":                    []byte("no frame of Zstandard"),
		"empty but for a magic":       {0x28, 0xb5, 0x2f, 0xfd},
		"a bomb":                      bomb,
		"a bomb with a modest header": append(append([]byte{}, lies[:len(lies)/2]...), bomb...),
		"cut off":                     lies[:len(lies)-3],
		"something behind":            append(append([]byte{}, lies...), 0),
		"a second frame":              append(append([]byte{}, lies...), lies...),
		"skippable":                   skippable,
		"less than it says": zframe(t, text[:minFrame-1],
			zstd.WithSingleSegment(true)),
		"more than it may": zframe(t, append(append([]byte{}, text...), 0),
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
			if len(bad) > minFrame {
				bad = bad[:minFrame]
			}
			// The recipe is sound in itself, and says of this frame what is true of it.
			file, _ := framedSample(t)
			dir, d := writeRecipe(t, withFirstFrame(file, bad))
			for _, trusted := range []bool{false, true} {
				_, err := restored(t, dir, d, trusted)
				var fe *FormatError
				require.ErrorAs(t, err, &fe)
				require.Equal(t, "frame 0", fe.Field)
				require.Positive(t, fe.Offset)
			}
		})
	}
}

// withFirstFrame returns the sample with other bytes for its first frame, and the table that fits
// them.
func withFirstFrame(file, bad []byte) []byte {
	head := bytes.Clone(file[:headOf(file)-sumSize])
	rest := file[headOf(file)+int(binary.LittleEndian.Uint32(head[sampleTable:])):]
	binary.LittleEndian.PutUint32(head[sampleTable:], uint32(len(bad)))
	sum := blake3.Sum256(bad)
	copy(head[sampleTable+4:sampleTable+frameEntry], sum[:])
	return slices.Concat(seal(head), bad, rest)
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
		"cut off": {"length",
			func(b []byte, head int) []byte { return b[:len(b)-1] }},
		"cut off before the frames": {"length",
			func(b []byte, head int) []byte { return b[:head] }},
		"cut off in the table": {"length", func(b []byte, head int) []byte { return b[:head-40] }},
		"something behind": {"length",
			func(b []byte, head int) []byte { return append(b, 0) }},
		"format 1 with frames": {"checksum",
			func(b []byte, head int) []byte { b[8] = 1; return b }},
		"a length of gigabytes": {"length",
			func(b []byte, head int) []byte { b[15] = 0xff; return b }},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			file, _ := framedSample(t)
			dir, d := writeRecipe(t, c.damage(file, headOf(file)))
			_, err := restored(t, dir, d, true)
			var fe *FormatError
			require.ErrorAs(t, err, &fe)
			require.Equal(t, c.field, fe.Field)
		})
	}
}

// A recipe that stands where the one stood that was read is not taken for it.
func TestFramesOfAnotherRecipe(t *testing.T) {
	file, _ := framedSample(t)
	dir, d := writeRecipe(t, file)
	read, err := ReadRecipeStore(dir).Get(d)
	require.NoError(t, err)
	path := recipePath(dir, d)
	require.NoError(t, os.WriteFile(path+"2", file, 0o444))
	require.NoError(t, os.Rename(path+"2", path))
	_, err = read.Frames.open()
	require.ErrorIs(t, err, cas.ErrNotFound)
	require.NoError(t, os.Remove(path))
	_, err = read.Frames.open()
	require.ErrorIs(t, err, cas.ErrNotFound)
}

func TestFramesValidated(t *testing.T) {
	each := func(size uint32) func(b []byte) {
		return func(b []byte) { binary.LittleEndian.PutUint32(b[sampleFrames+8:], size) }
	}
	size := func(size uint64) func(b []byte) {
		return func(b []byte) { binary.LittleEndian.PutUint64(b[sampleFrames:], size) }
	}
	stored := func(size uint32) func(b []byte) {
		return func(b []byte) {
			binary.LittleEndian.PutUint32(b[sampleTable+frameEntry:], size)
		}
	}
	for name, c := range map[string]struct {
		field  string
		damage func(b []byte)
	}{
		"a size that is no power of two": {"frames", each(minFrame + 1)},
		"frames too small":               {"frames", each(minFrame / 2)},
		"frames too large":               {"frames", each(2 * maxFrame)},
		"frames of nothing":              {"frames", each(0)},
		"one missing":                    {"frame 3", size(3*minFrame + 1)},
		"more than there can be":         {"frames", size(MaxSize)},
		"more than a blob may have":      {"frames", size(MaxSize + 1)},
		"one that grows":                 {"frame 1", stored(minFrame + 1)},
		"one of nothing":                 {"frame 1", stored(0)},
		"no bytes":                       {"frames", size(0)},
		"literals besides":               {"frames", func(b []byte) { b[sampleLiterals] = 1 }},
		"an extent behind their end":     {"extent 4", size(2*minFrame + 999)},
		"a base behind them":             {"extent 0", func(b []byte) { b[sampleExtents] = 4 }},
	} {
		t.Run(name, func(t *testing.T) {
			file, _ := framedSample(t)
			head := bytes.Clone(file[:headOf(file)-sumSize])
			c.damage(head)
			_, err := DecodeRecipe(append(seal(head), file[headOf(file):]...))
			var fe *FormatError
			require.ErrorAs(t, err, &fe)
			require.Contains(t, fe.Field, c.field)
		})
	}
}

// Any file is either refused, or is sound, and decodes to the stated bytes.
func FuzzFramedRecipe(f *testing.F) {
	file, _ := framedSample(f)
	head := headOf(file)
	f.Add(file[headerSize:head-sumSize], file[head:])
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
		require.NoError(t, r.Validate())
		// The fuzzer finds no sums, so the frames are decoded without them.
		for i, one := range r.Frames.table {
			stored := frames[one.at-int64(len(head)):][:one.stored]
			if plain := r.Frames.plain(i); plain > one.stored {
				_, _ = decodeFrame(stored, plain)
			}
		}
	})
}

// Any bytes decode to just as many as are expected, or are refused.
func FuzzFrame(f *testing.F) {
	f.Add(zframe(f, bytes.Repeat([]byte("text "), 1000), zstd.WithSingleSegment(true)), 5000)
	f.Add(zframe(f, make([]byte, 1<<20)), 1<<20)
	f.Add(zframe(f, make([]byte, 1<<20)), 5)
	f.Fuzz(func(t *testing.T, b []byte, n int) {
		if n <= 0 || n > maxFrame {
			return
		}
		if got, err := decodeFrame(b, int64(n)); err == nil {
			plain, err := zstd.NewReader(nil)
			require.NoError(t, err)
			want, err := plain.DecodeAll(b, nil)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, got))
			plain.Close()
			require.Equal(t, n, cap(got), "it needs memory of the stated size only")
		}
	})
}
