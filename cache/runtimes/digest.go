package runtimes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/internal/witness"
)

// Bounds of what is shown of one execution provider.
const (
	maxBeside      = 512
	maxLibraryName = 4096
	maxLibrary     = 8 << 30 // bytes of one file
)

// digests hashes libraries, and remembers the digests of files by their stamps.
type digests struct {
	book    memo.Book
	now     func() time.Time
	mayRead func(ctx context.Context, uid uint32) (leave func(), err error) // Options.ReadShown
}

// LibraryDigest hashes an EP library and the libraries beside it that carry its SDK. Libraries of
// equal digests are the same, wherever they are.
func LibraryDigest(ctx context.Context, l compilers.EPLibrary) (cas.Digest, error) {
	return libraryDigest(l, func(path string) (cas.Digest, error) { return cas.SumFile(ctx, path) })
}

// libraryDigest covers the EP library and the libraries beside it that carry its SDK: names relative to the
// library's folder and contents, in the order of the names. fileDigest gives a file's.
func libraryDigest(l compilers.EPLibrary, fileDigest func(path string) (cas.Digest, error)) (cas.Digest, error) {
	var b []byte
	files := slices.Clone(l.Files)
	slices.Sort(files)
	for _, path := range files {
		d, err := fileDigest(path)
		if err != nil {
			return cas.Digest{}, err
		}
		name, err := filepath.Rel(filepath.Dir(l.Path), path)
		if err != nil {
			name = filepath.Base(path)
		}
		b = memo.AppendText(b, name)
		b = append(b, d[:]...)
	}
	if l.Tool != "" {
		b = append(b, "tool "+l.Tool...)
	}
	return blake3.Sum256(b), nil
}

func (x *digests) file(ctx context.Context, path string) (cas.Digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return cas.Digest{}, err
	}
	defer f.Close()
	return x.open(ctx, 0, f)
}

func (x *digests) open(ctx context.Context, uid uint32, f *os.File) (cas.Digest, error) {
	if d, ok := x.remembered(uid, f); ok {
		return d, nil
	}
	key, believable := memo.FileKey(uid, f)
	before, err := witness.Watch([]*os.File{f}, x.now(), believable)
	if err != nil {
		return cas.Digest{}, err
	}
	info, err := f.Stat()
	if err != nil {
		return cas.Digest{}, err
	}
	d, err := cas.Sum(ctx, f, 0, info.Size())
	if err == nil && before.Believed() && before.Unchanged() == nil {
		// Not saved costs another hashing at the next start, nothing else.
		_ = x.book.Save(append([]byte("file:"), key[:]...), d[:])
	}
	return d, err
}

func (x *digests) remembered(uid uint32, f *os.File) (cas.Digest, bool) {
	key, believable := memo.FileKey(uid, f)
	if !believable {
		return cas.Digest{}, false
	}
	raw, ok := x.book.Get(append([]byte("file:"), key[:]...))
	if !ok || len(raw) != 32 {
		return cas.Digest{}, false
	}
	return cas.Digest(raw), true
}

// OwnDigest returns the digest that stands for an execution provider's library and what the client shows
// of those beside it. A library that nothing is shown beside is known by the very file and its path as
// well, because another place may have another SDK around an equal library. The digest never equals one
// of libraries that are run here.
func (s *Set) OwnDigest(ctx context.Context, uid uint32, ref *LibraryRef) (digest cas.Digest,
	library cas.Stamp, err error) {
	all, err := s.digests.contents(ctx, uid, ref)
	if err != nil {
		return digest, library, err
	}
	if library, err = cas.StampOf(ref.File); err != nil {
		return digest, library, shownError(ctx, err, ref, "")
	}
	b := []byte("own")
	if len(ref.Beside) == 0 && !ref.Complete {
		b = append(memo.AppendStamp(b, library), ref.Path...)
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		d := all[name]
		b = memo.AppendText(b, name)
		b = append(b, d[:]...)
	}
	return blake3.Sum256(b), library, nil
}

func (x *digests) contents(ctx context.Context, uid uint32, ref *LibraryRef) (contents, error) {
	if len(ref.Beside) > maxBeside || len(ref.Path) > maxLibraryName {
		return nil, apierr.New(apierr.BadRequest, nil,
			"library of %s: more than %d libraries beside it, or a path of more than %d bytes",
			ref.EP, maxBeside, maxLibraryName)
	}
	out := make(contents, 1+len(ref.Beside))
	var err error
	if out[""], err = x.shown(ctx, uid, ref.File); err != nil {
		return nil, shownError(ctx, err, ref, "")
	}
	for _, name := range slices.Sorted(maps.Keys(ref.Beside)) {
		if name == "" || len(name) > maxLibraryName || ref.Beside[name] == nil {
			return nil, apierr.New(apierr.BadRequest, nil,
				"library of %s: %.80q beside it: not a name", ref.EP, name)
		}
		if out[name], err = x.shown(ctx, uid, ref.Beside[name]); err != nil {
			return nil, shownError(ctx, err, ref, name)
		}
	}
	return out, nil
}

// of gives the contents as a runtime's are: the library by name, without what is no part of it.
func (shown contents) of(ref *LibraryRef) contents {
	out := make(contents, len(shown))
	for name, d := range shown {
		if name != "" && !compilers.Foreign(name) {
			out[name] = d
		}
	}
	out[filepath.Base(ref.Path)] = shown[""]
	return out
}

var errReplacedOpen = errors.New("it has been replaced since it was opened")

// shown hashes a library that a client has open, or remembers it. A package manager may link
// or unlink another name of the file meanwhile: its stamp changes and its bytes do not, so it is
// hashed again.
func (x *digests) shown(ctx context.Context, uid uint32, f *os.File) (cas.Digest, error) {
	for range 2 {
		before, err := cas.StampOf(f)
		if err != nil {
			return cas.Digest{}, err
		}
		if before.Size > maxLibrary {
			return cas.Digest{}, fmt.Errorf("%d bytes, more than %d", before.Size, int64(maxLibrary))
		}
		if gone, err := Unlinked(f); gone || err != nil {
			return cas.Digest{}, errors.Join(err, errReplacedOpen)
		}
		d, err := x.read(ctx, uid, f)
		if err != nil {
			return cas.Digest{}, err
		}
		after, err := cas.StampOf(f)
		if err != nil || after == before {
			return d, err
		}
		if after.Size != before.Size || after.Mtime != before.Mtime {
			break
		}
	}
	return cas.Digest{}, errReplacedOpen
}

// read hashes a library or remembers it. The library may lie on a file system that never
// answers, so one of an owner's is read at a time, on a goroutine of its own.
func (x *digests) read(ctx context.Context, uid uint32, f *os.File) (cas.Digest, error) {
	if d, ok := x.remembered(uid, f); ok {
		return d, nil
	}
	leave, err := x.mayRead(ctx, uid)
	if err != nil {
		return cas.Digest{}, err
	}
	type read struct {
		digest cas.Digest
		err    error
	}
	done := make(chan read, 1)
	go func() {
		defer leave()
		d, err := x.open(ctx, uid, f)
		done <- read{d, err}
	}()
	select {
	case r := <-done:
		return r.digest, r.err
	case <-ctx.Done():
		return cas.Digest{}, ctx.Err()
	}
}

func shownError(ctx context.Context, err error, ref *LibraryRef, name string) error {
	path := cmp.Or(name, ref.Path)
	switch {
	case ctx.Err() != nil:
		return apierr.New(apierr.Cancelled, ctx.Err(), "library %q", path)
	case errors.Is(err, errReplacedOpen):
		return replaced(path)
	}
	return apierr.New(apierr.BadRequest, err, "library %q of %s", path, ref.EP)
}

// Unlinked reports whether the name that a file was opened by is removed, or leads to another file now.
// Other names of the file say nothing: package managers link their files into many places, and an update
// takes one of them away.
func Unlinked(f *os.File) (bool, error) {
	path, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
	if err != nil {
		return false, err
	}
	return strings.HasSuffix(path, " (deleted)"), nil
}
