package portable

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"
	"syscall"

	"github.com/klauspost/compress/zstd"
	"lukechampine.com/blake3"
)

// Bundle is an image layout for reading: a directory or a tar.
type Bundle struct {
	from  source
	Cards []Entry // in the order of the index
	// Documents are trust documents, which are not verified.
	Documents [][]byte
}

// Entry is one build of a bundle.
type Entry struct {
	Name string // its name in the bundle
	*Card
	Err error // why the card cannot be read
}

// source has the files of an image layout by name.
type source interface {
	open(name string) (io.ReadCloser, error)
	io.Closer
}

// Open opens a directory or a tar, and reads the cards. A card that cannot be read does not keep
// the others from being read.
func Open(ctx context.Context, name string) (*Bundle, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe must not block here
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if info.IsDir() {
		root, err := os.OpenRoot(name)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
		return read(ctx, directory{root})
	}
	if !info.Mode().IsRegular() {
		return nil, errors.Join(wrong(name, "", "neither a directory nor a regular file"),
			f.Close())
	}
	return openTar(ctx, f, f, name, info.Size())
}

// OpenStream copies a tar from a stream to an empty file and opens it. It stops at an entry that no
// bundle has. The bundle closes the file, even if this fails.
func OpenStream(ctx context.Context, from io.Reader, f *os.File, name string) (*Bundle, error) {
	return openTar(ctx, io.TeeReader(&progressReader{ctx, from, nil}, f), f, name, math.MaxInt64)
}

// openTar opens a tar of at most a size, which it reads from f, or while it is copied to f.
func openTar(ctx context.Context, from io.Reader, f *os.File, name string, size int64) (*Bundle,
	error) {
	t, err := newTar(ctx, from, f, name, size)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return read(ctx, t)
}

// Close closes the files.
func (b *Bundle) Close() error { return b.from.Close() }

func read(ctx context.Context, from source) (*Bundle, error) {
	b := &Bundle{from: from}
	if err := b.readCards(ctx); err != nil {
		return nil, errors.Join(err, from.Close())
	}
	return b, nil
}

func (b *Bundle) readCards(ctx context.Context) error {
	raw, err := b.file(layoutFile, MaxPEM)
	if err != nil {
		return err
	}
	if !strings.Contains(string(raw), `"1.0.`) {
		return wrong(layoutFile, "imageLayoutVersion", "%.80q, not 1.0.0", raw)
	}
	if raw, err = b.file(indexFile, maxIndex); err != nil {
		return err
	}
	x, err := parseIndex(indexFile, raw)
	if err != nil {
		return err
	}
	seen := make(map[string]bool)
	for i := range x.Manifests {
		d := &x.Manifests[i]
		name := d.Annotations[annotationRef]
		if d.MediaType == MediaManifest && d.ArtifactType == MediaTrust &&
			len(b.Documents) < maxDocuments {
			if raw := b.document(d); raw != nil {
				b.Documents = append(b.Documents, raw)
			}
			continue
		}
		if d.MediaType != MediaIndex || d.ArtifactType != ArtifactCard &&
			!strings.HasPrefix(name, "b-") {
			continue // not a build
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if seen[name] {
			return wrong(indexFile, fmt.Sprintf("manifests[%d]", i), "a second build %.80q", name)
		}
		seen[name] = true
		one := Entry{Name: name}
		one.Card, one.Err = b.card(d)
		b.Cards = append(b.Cards, one)
	}
	return nil
}

func (b *Bundle) card(d *Descriptor) (*Card, error) {
	file := path.Join(blobsDir, d.Digest.Hex())
	raw, err := b.file(file, maxCard)
	if err != nil {
		return nil, err
	}
	if DigestOf(raw) != d.Digest {
		return nil, wrong(file, "", "its SHA-256 differs")
	}
	return ParseCard(file, raw)
}

func (b *Bundle) file(name string, most int) ([]byte, error) {
	f, err := b.from.open(name)
	if err != nil {
		return nil, missing(name, err)
	}
	defer f.Close()
	return readAll(f, name, most)
}

func missing(name string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return wrong(name, "", "it is missing")
	}
	return err
}

// maxWindow bounds the memory that a frame of zstd asks for.
const maxWindow = 32 << 20

// Extract writes the plain bytes of a build's file, and checks them and the blob that they are in.
// If it fails, the bytes that it has written must not be used. copied is called with bytes as they
// are written.
func (b *Bundle) Extract(ctx context.Context, c *Card, i int, to io.Writer,
	copied func(int)) error {
	l := Layer{File: c.Config.Files[i], Blob: *c.Manifest.fileLayers()[i]}
	name := path.Join(blobsDir, l.Blob.Digest.Hex())
	blob, err := b.from.open(name)
	if err != nil {
		return missing(name, err)
	}
	defer blob.Close()
	return l.Unpack(ctx, name, blob, to, copied)
}

// Unpack writes the plain bytes of a file, as Bundle.Extract does.
func (l *Layer) Unpack(ctx context.Context, name string, blob io.Reader, to io.Writer,
	copied func(int)) error {
	d, want := &l.Blob, &l.File
	sum, plain, size := sha256.New(), blake3.New(32, nil), &counter{}
	whole := io.TeeReader(io.LimitReader(&progressReader{ctx, blob, nil}, d.Size+1),
		io.MultiWriter(sum, size))
	dec, err := zstd.NewReader(whole, zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
	if err != nil {
		return err
	}
	defer dec.Close()
	bad := func(format string, args ...any) error { return wrong(name, want.Name, format, args...) }
	out := &progressReader{ctx, io.LimitReader(dec, want.Size+1), copied}
	n, err := io.Copy(to, io.TeeReader(out, plain))
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, new(*fs.PathError)): // an error of the destination or the bundle
		return err
	case err != nil:
		return bad("%v, after %d bytes of it", err, n)
	case n != want.Size:
		return bad("%d bytes or more, not %d", n, want.Size)
	}
	// Read the rest after the last frame, which the digest covers too.
	if _, err := io.Copy(io.Discard, whole); err != nil {
		return err
	}
	switch {
	case size.n != d.Size:
		return bad("the blob has %d bytes or more, not %d", size.n, d.Size)
	case !sumsTo(sum, d.Digest):
		return bad("the SHA-256 of the blob differs")
	case Hash(plain.Sum(nil)) != want.Hash:
		return bad("the BLAKE3 of the file is not the one that the manifest states")
	}
	return nil
}

// directory is an image layout in a directory. Links cannot lead out of it.
type directory struct{ *os.Root }

func (d directory) open(name string) (io.ReadCloser, error) { return openFile(d.OpenFile, name) }

// opener is os.OpenFile, or that of a root.
type opener func(name string, flag int, mode os.FileMode) (*os.File, error)

// openFile opens a regular file. It refuses a FIFO, on which it would otherwise block.
func openFile(open opener, name string) (*os.File, error) {
	f, err := open(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(wrong(name, "", "it is not a regular file"), err, f.Close())
	}
	return f, nil
}

// ReadFile reads a regular file of at most this size. It never blocks on a FIFO or a device.
func ReadFile(name string, most int) ([]byte, error) { return readFile(os.OpenFile, name, most) }

func readFile(open opener, name string, most int) ([]byte, error) {
	f, err := openFile(open, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f, name, most)
}

// archive is an image layout in a tar. Its files are read in place.
type archive struct {
	file  *os.File
	files map[string]extent
}

type extent struct{ at, size int64 }

// maxEntries bounds the entries of a tar.
const maxEntries = 1 << 17

// newTar finds the files of a tar. An entry that an image layout does not have is refused.
func newTar(ctx context.Context, from io.Reader, f *os.File, file string, size int64) (*archive,
	error) {
	a := &archive{f, make(map[string]extent)}
	entries := tar.NewReader(from)
	bad := func(field, format string, args ...any) error {
		at, _ := f.Seek(0, io.SeekCurrent)
		return &FormatError{file, field, at, fmt.Sprintf(format, args...)}
	}
	for n := 0; ; n++ {
		h, err := entries.Next()
		switch {
		case errors.Is(err, io.EOF) && n == 0:
			return nil, bad("", "an empty tar")
		case errors.Is(err, io.EOF):
			return a, ctx.Err()
		case errors.Is(err, io.ErrUnexpectedEOF):
			return nil, bad("", "the tar ends early")
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.As(err, new(*fs.PathError)): // of the copy
			return nil, err
		case err != nil && n == 0:
			return nil, wrong(file, "",
				"neither a tar nor a directory that epcachectl export wrote")
		case err != nil:
			return nil, bad("", "%v", err)
		case n == maxEntries:
			return nil, bad("", "more than %d entries", maxEntries)
		}
		at, err := f.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, err
		}
		name := strings.TrimPrefix(h.Name, "./") // as tar -C DIR . writes them
		switch {
		case h.Typeflag == tar.TypeDir && (name == "" || name == "blobs/" || name == blobsDir+"/"):
			continue
		case h.Typeflag != tar.TypeReg || !inLayout(name):
			return nil, bad(fmt.Sprintf("entry %.120q", h.Name), "an image layout has no such file")
		}
		if _, twice := a.files[name]; twice {
			return nil, bad(fmt.Sprintf("entry %q", name), "it comes twice")
		}
		if h.Size > size-at {
			return nil, bad(fmt.Sprintf("entry %q", name), "the tar ends early")
		}
		a.files[name] = extent{at, h.Size}
	}
}

func inLayout(name string) bool {
	if name == layoutFile || name == indexFile {
		return true
	}
	digits, ok := strings.CutPrefix(name, blobsDir+"/")
	return ok && new(Hash).UnmarshalText([]byte(digits)) == nil
}

func (a *archive) open(name string) (io.ReadCloser, error) {
	x, ok := a.files[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return io.NopCloser(io.NewSectionReader(a.file, x.at, x.size)), nil
}

// Close closes the tar.
func (a *archive) Close() error { return a.file.Close() }
