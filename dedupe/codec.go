package dedupe

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
)

// A recipe file; numbers are little-endian, uv is an unsigned varint in its
// shortest form, sv a signed one (zigzag).
//
//	offset  size  what
//	0       8     magic "epcrecip"
//	8       4     version of the format, 1, or 2: with frames, which is only read
//	12      4     n, the length of the body, at most 32 MiB
//	16      n     body
//	16+n    32    BLAKE3 of all before
//	48+n          in version 2: the frames, one behind the other
//
// The body:
//
//	0       32    digest of the blob
//	32      8     size of the blob
//	40      4     c, number of bases, at most 256
//	44      4     e, number of extents, at most 524,288
//
// 48 4 0; other values are names of ranges behind the extents, which are ignored
//
//	52      4     1 + index of the base with the recipe's own literals; 0: none
//	56      40 c  bases: 32 digest, 8 size
//	        e     extents: uv 2 x base + (1 if repeated); uv length; sv from, less the end of
//	              what the extent before took from that base (0 for the first); uv period, if
//	              repeated
//
// In version 2 the frames follow the bases; extents of base c take from them:
//
//	8     s, bytes that come out of all frames
//	4     b, bytes that come out of each but the last: a power of two, from 64 KiB to 1 MiB
//	20 f  for each of s/b frames, rounded up: 4 bytes that are stored, 16 half of their BLAKE3
//
// Extents have no offsets: each begins where the one before it ends.
const (
	recipeMagic   = "epcrecip"
	formatPlain   = 1 // of recipes
	formatFramed  = 2 // of recipes with frames, of earlier versions of epcached
	formatVersion = formatFramed
	headerSize    = 16
	sumSize       = 32
	maxBody       = 32 << 20
	bodyHead      = 56
	baseSize      = 40
	minExtent     = 3 // least bytes of an encoded extent
	frameEntry    = 20
)

// Encode validates the recipe and returns the bytes of its file. The encoding is unique. It fails
// for a recipe with frames.
func (r *Recipe) Encode() ([]byte, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	if r.Frames != nil {
		return nil, invalid("frames", "they are not written any more")
	}
	b := make([]byte, headerSize, headerSize+bodyHead+baseSize*len(r.Bases)+
		12*len(r.Extents)+sumSize)
	copy(b, recipeMagic)
	binary.LittleEndian.PutUint32(b[8:], formatPlain)
	b = append(b, r.Blob[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(r.Size))
	for _, n := range []int{len(r.Bases), len(r.Extents), 0, r.Literals + 1} {
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
	}
	for _, c := range r.Bases {
		b = append(b, c.Digest[:]...)
		b = binary.LittleEndian.AppendUint64(b, uint64(c.Size))
	}
	b = r.appendExtents(b)
	if len(b)-headerSize > maxBody {
		return nil, invalid("body", "%d bytes, more than %d", len(b)-headerSize, maxBody)
	}
	binary.LittleEndian.PutUint32(b[12:], uint32(len(b)-headerSize))
	sum := blake3.Sum256(b)
	return append(b, sum[:]...), nil
}

// Equal reports whether two recipes have the same encoding.
func (r *Recipe) Equal(other *Recipe) bool {
	a, err := r.Encode()
	b, err2 := other.Encode()
	return err == nil && err2 == nil && bytes.Equal(a, b)
}

func (r *Recipe) appendExtents(b []byte) []byte {
	ends := make([]int64, r.sources())
	for _, e := range r.Extents {
		head := uint64(e.Base) << 1
		if e.Period > 0 {
			head |= 1
		}
		b = binary.AppendUvarint(b, head)
		b = binary.AppendUvarint(b, uint64(e.Length))
		b = binary.AppendVarint(b, e.From-ends[e.Base])
		if e.Period > 0 {
			b = binary.AppendUvarint(b, uint64(e.Period))
		}
		ends[e.Base] = e.From + e.baseBytes()
	}
	return b
}

// DecodeRecipe decodes the bytes of a recipe file, and accepts only recipes that pass Validate.
// Frames are checked when they are read. Errors are *FormatError or ErrNewer.
func DecodeRecipe(b []byte) (*Recipe, error) {
	return decodeRecipe(b, int64(len(b)))
}

// decodeRecipe reads the head of a file of that size.
func decodeRecipe(b []byte, size int64) (*Recipe, error) {
	body, err := bodyOf(b, size)
	if err != nil {
		return nil, err
	}
	d := &decoder{b: body}
	r := &Recipe{}
	copy(r.Blob[:], d.fixed("blob", len(r.Blob)))
	r.Size = d.int64("size")
	bases := d.count("bases", MaxBases, baseSize)
	extents := d.count("extents", MaxExtents, minExtent)
	names := d.count("names", maxBody, 1)
	r.Literals = d.count("literals", bases, 0) - 1
	d.bases(r, bases)
	end := int64(headerSize + len(body) + sumSize)
	if binary.LittleEndian.Uint32(b[8:]) == formatFramed {
		end = d.frames(r, end)
	}
	d.extents(r, extents)
	if d.err == nil && names == 0 && len(d.b) > d.at {
		d.fail("body", "%d bytes after its end", len(d.b)-d.at)
	}
	if d.err != nil {
		return nil, d.err
	}
	if end != size {
		return nil, &FormatError{12, "length",
			fmt.Sprintf("%d bytes, but the file has %d", end, size)}
	}
	if err := r.Validate(); err != nil {
		return nil, err
	}
	return r, nil
}

// bodyOf checks the header and the checksum, and returns the body. It checks the version first,
// because newer formats may use another checksum.
func bodyOf(b []byte, size int64) ([]byte, error) {
	if len(b) < headerSize || string(b[:8]) != recipeMagic {
		return nil,
			&FormatError{0, "magic",
				fmt.Sprintf("it does not begin with %q and a header", recipeMagic)}
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v > formatVersion {
		return nil, fmt.Errorf("format %d: %w", v, ErrNewer)
	} else if v == 0 {
		return nil, &FormatError{8, "version", "0"}
	}
	n := int64(binary.LittleEndian.Uint32(b[12:]))
	if n > maxBody {
		return nil, &FormatError{12, "length", fmt.Sprintf("%d, more than %d", n, maxBody)}
	}
	end := headerSize + n
	if min(size, int64(len(b))) < end+sumSize {
		return nil,
			&FormatError{12, "length", fmt.Sprintf("%d, but the file has %d bytes", n, size)}
	}
	if sum := blake3.Sum256(b[:end]); string(sum[:]) != string(b[end:end+sumSize]) {
		return nil, &FormatError{end, "checksum", "it does not fit the bytes before"}
	}
	return b[headerSize:end], nil
}

func readRecipe(fsys cas.FS, path string, d cas.Digest) (r *Recipe, stamp cas.Stamp, err error) {
	f, err := fsys.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, stamp, cas.ErrNotFound
	}
	if err != nil {
		return nil, stamp, err
	}
	defer f.Close() // opened for reading
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, stamp, err
	case !info.Mode().IsRegular():
		return nil, stamp, &FormatError{-1, "", "not a regular file"}
	}
	// before reading, so that a change in the meantime changes the stamp
	if stamp, err = cas.StampOf(f); err != nil {
		return nil, stamp, err
	}
	b, err := readHead(fsys, f, info.Size())
	if err != nil {
		return nil, stamp, err
	}
	if r, err = decodeRecipe(b, info.Size()); err != nil {
		return nil, stamp, err
	}
	if r.Frames != nil {
		r.Frames.fs, r.Frames.path, r.Frames.stamp = fsys, path, stamp
	}
	if r.Blob != d {
		return nil, stamp,
			&FormatError{headerSize, "blob", fmt.Sprintf("it is the recipe of %s", r.Blob)}
	}
	return r, stamp, nil
}

// readHead reads all bytes before the frames, at least the header.
func readHead(fsys cas.FS, f *os.File, size int64) ([]byte, error) {
	b := make([]byte, min(size, headerSize))
	if err := readAll(fsys, f, b); err != nil || len(b) < headerSize {
		return b, err
	}
	n := headerSize + int64(binary.LittleEndian.Uint32(b[12:])) + sumSize
	if n > min(size, headerSize+maxBody+sumSize) {
		return b, nil // decoding refuses it
	}
	b = make([]byte, n)
	return b, readAll(fsys, f, b)
}

func readAll(fsys cas.FS, f *os.File, b []byte) error {
	n, err := fsys.ReadAt(f, b, 0)
	switch {
	case n == len(b):
		return nil
	case err == io.EOF:
		// the file was truncated in the meantime
		return &FormatError{int64(n), "length",
			fmt.Sprintf("the file ends early, and had %d bytes", len(b))}
	}
	return err
}

// decoder reads a body. After the first error it returns zeros, so that callers need to check only
// once at the end.
type decoder struct {
	b   []byte
	at  int
	err error
}

func (d *decoder) fail(field, format string, args ...any) {
	if d.err == nil {
		d.err = &FormatError{Offset: int64(headerSize + d.at), Field: field,
			Reason: fmt.Sprintf(format, args...)}
	}
}

func (d *decoder) fixed(field string, n int) []byte {
	if len(d.b)-d.at < n {
		d.fail(field, "the body ends in the middle of it")
	}
	if d.err != nil {
		return make([]byte, n)
	}
	d.at += n
	return d.b[d.at-n : d.at]
}

func (d *decoder) int64(field string) int64 {
	v := binary.LittleEndian.Uint64(d.fixed(field, 8))
	if v > math.MaxInt64 {
		d.at -= 8
		d.fail(field, "%d", v)
		return 0
	}
	return int64(v)
}

// count reads the number of elements that follow, each of at least each bytes. It fails if the body
// is too short for them, so that a wrong number allocates no memory.
func (d *decoder) count(field string, most, each int) int {
	v := int64(binary.LittleEndian.Uint32(d.fixed(field, 4)))
	if v > int64(most) || v*int64(each) > int64(len(d.b)-d.at) {
		d.at -= 4
		d.fail(field, "%d, more than there can be", v)
		return 0
	}
	return int(v)
}

// uvarint reads an unsigned varint below 2^63 in its shortest form.
func (d *decoder) uvarint(field string) int64 {
	v, n := binary.Uvarint(d.b[d.at:])
	if n <= 0 || v > math.MaxInt64 || n > 1 && d.b[d.at+n-1] == 0 {
		d.fail(field, "not a number in its shortest form")
		return 0
	}
	d.at += n
	return int64(v)
}

func (d *decoder) varint(field string) int64 {
	v, n := binary.Varint(d.b[d.at:])
	if n <= 0 || n > 1 && d.b[d.at+n-1] == 0 {
		d.fail(field, "not a number in its shortest form")
		return 0
	}
	d.at += n
	return v
}

func (d *decoder) bases(r *Recipe, n int) {
	if d.err != nil || n == 0 {
		return
	}
	r.Bases = make([]Base, n)
	for i := range r.Bases {
		copy(r.Bases[i].Digest[:], d.fixed("base", 32))
		r.Bases[i].Size = d.int64("base size")
	}
}

func (d *decoder) extents(r *Recipe, n int) {
	if d.err != nil || n == 0 {
		return
	}
	r.Extents = make([]Extent, n)
	ends := make([]int64, r.sources())
	at := int64(0)
	for i := range r.Extents {
		start := d.at
		head := d.uvarint("extent")
		e := Extent{At: at, Length: d.uvarint("extent length"), Base: int(head >> 1)}
		delta := d.varint("extent from")
		if head&1 != 0 {
			e.Period = d.uvarint("extent period")
		}
		if d.err != nil {
			return
		}
		if e.Base < len(ends) {
			// if the sum overflows it is negative or beyond the base, which Validate refuses
			e.From = ends[e.Base] + delta
		}
		err := r.validateExtent(i, e, at)
		if err == nil && head&1 != 0 && e.Period == 0 {
			err = invalid(fmt.Sprintf("extent %d", i), "repeated, with a period of 0")
		}
		if err != nil {
			err.Offset = int64(headerSize + start)
			d.err = err
			return
		}
		ends[e.Base] = e.From + e.baseBytes()
		at += e.Length
		r.Extents[i] = e
	}
}

// frames reads the table of the frames, which begin at offset at of the file, and returns their
// end.
func (d *decoder) frames(r *Recipe, at int64) (end int64) {
	f := &Frames{fs: cas.OS{}, size: d.int64("literals"),
		each: int64(binary.LittleEndian.Uint32(d.fixed("frame size", 4)))}
	most := min(maxFrames, int64(len(d.b)-d.at)/frameEntry)
	if f.size <= 0 || f.size > MaxSize || f.each < minFrame || f.each > maxFrame ||
		f.each&(f.each-1) != 0 || (f.size+f.each-1)/f.each > most || r.Literals != NoLiterals {
		d.fail("frames", "%d bytes in frames of %d, and at most %d of them", f.size, f.each, most)
		return at
	}
	f.table = make([]frame, (f.size+f.each-1)/f.each)
	for i := range f.table {
		b := d.fixed("frame", frameEntry)
		one := frame{at, int64(binary.LittleEndian.Uint32(b)), [16]byte(b[4:])}
		if one.stored <= 0 || one.stored > f.plain(i) {
			d.fail(fmt.Sprintf("frame %d", i), "%d bytes stored, %d when decompressed",
				one.stored, f.plain(i))
			return at
		}
		f.table[i] = one
		at += one.stored
	}
	r.Frames = f
	return at
}
