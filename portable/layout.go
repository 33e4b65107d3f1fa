package portable

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"lukechampine.com/blake3"
)

// The names in an image layout.
const (
	layoutFile  = "oci-layout"
	layoutText  = `{"imageLayoutVersion":"1.0.0"}`
	indexFile   = "index.json"
	blobsDir    = "blobs/sha256"
	titleSuffix = ".zst"
)

// Writer adds builds to an image layout in a directory. Blobs are durable before the index names
// them, so that an interrupted export leaves a layout without the builds that were not finished.
type Writer struct {
	root  *os.Root
	index index
}

// Create opens a directory for writing: an image layout, or an empty or missing directory.
func Create(dir string) (*Writer, error) {
	if err := os.Mkdir(dir, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	w := &Writer{root: root,
		index: index{SchemaVersion: 2, MediaType: MediaIndex, Manifests: []Descriptor{}}}
	if err := w.begin(dir); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return w, nil
}

func (w *Writer) begin(dir string) error {
	some, err := fs.ReadDir(w.root.FS(), ".")
	if err != nil {
		return err
	}
	if _, err := w.root.Stat(layoutFile); err != nil && len(some) > 0 {
		return fmt.Errorf("%s: neither empty nor an image layout", dir)
	}
	switch raw, err := readFile(w.root.OpenFile, indexFile, maxIndex); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	default:
		if w.index, err = parseIndex(indexFile, raw); err != nil {
			return err
		}
	}
	if err := w.root.MkdirAll(blobsDir, 0o777); err != nil {
		return err
	}
	return w.write(layoutFile, []byte(layoutText))
}

// Build is a build to export.
type Build struct {
	Config Config    // without the files
	Says   Predicate // with additional requests that the build answers
	Files  []Source
	Signer *Signer     // nil: unsigned
	Copied func(n int) // called with the numbers of bytes read; may be nil
}

// Source is a file of a build to export.
type Source struct {
	Name string
	Size int64
	From io.Reader
}

// Add writes the blobs of a build, and adds its card to the index. It sets the files of the config,
// and the files and requests of the statement.
func (w *Writer) Add(ctx context.Context, b *Build) (*Card, error) {
	c := b.Config
	c.Version, c.Files = configVersion, nil
	var layers []Descriptor
	for _, f := range b.Files {
		if why := BadName(f.Name); why != "" {
			return nil, fmt.Errorf("file %q: %s", f.Name, why)
		}
		some, file, err := w.layer(ctx, f, b.Copied)
		if err != nil {
			return nil, err
		}
		layers, c.Files = append(layers, some...), append(c.Files, file)
	}
	m := newManifest(&c, layers)
	raw := encode(m)
	blobs := [][]byte{encode(&c), raw}
	var signed [][]byte
	if b.Signer != nil {
		says := b.Says
		says.BuildKey, says.Files = c.BuildKey, c.Files
		says.Requests = append([]Request{RequestOf(c.Record)}, says.Requests...)
		says.Issued = says.Issued.UTC().Truncate(time.Second)
		one, s := b.Signer.signature(raw, says)
		blobs, signed = append(blobs, emptyConfig().Data, one, s), append(signed, s)
	}
	card := newCard(raw, signed...)
	out, err := ParseCard("card", card) // the written bytes must be readable
	if err != nil {
		return nil, err
	}
	for _, blob := range append(blobs, card) {
		if err := w.write(path.Join(blobsDir, DigestOf(blob).Hex()), blob); err != nil {
			return nil, err
		}
	}
	w.name(out, card)
	return out, nil
}

// name adds the card to the index, where it replaces an earlier one of the same build.
func (w *Writer) name(c *Card, raw []byte) {
	d := descriptorOf(MediaIndex, raw)
	d.Data, d.ArtifactType = nil, ArtifactCard
	w.replace(c.Name(), d)
}

// replace adds a descriptor to the index, where it replaces an earlier one of the same name.
func (w *Writer) replace(name string, d Descriptor) {
	d.Annotations = map[string]string{annotationRef: name}
	w.index.Manifests = slices.DeleteFunc(w.index.Manifests, func(old Descriptor) bool {
		return old.Annotations[annotationRef] == name
	})
	w.index.Manifests = append(w.index.Manifests, d)
}

// layer compresses a file into a blob, and writes the chunk list of a large one.
func (w *Writer) layer(ctx context.Context, f Source, copied func(int)) (d []Descriptor, out File,
	err error) {
	name := path.Join(blobsDir, ".new-"+rand.Text())
	to, err := w.root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
	if err != nil {
		return nil, out, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.root.Remove(name))
		}
	}()
	sum, plain := sha256.New(), blake3.New(32, nil)
	size := &counter{}
	list, err := compress(io.MultiWriter(to, sum, size),
		io.TeeReader(&progressReader{ctx, f.From, copied}, plain), f.Size)
	if err = errors.Join(err, to.Sync(), to.Close()); err != nil {
		return nil, out, fmt.Errorf("file %q: %w", f.Name, err)
	}
	d = []Descriptor{{MediaType: MediaFile, Digest: Digest(sum.Sum(nil)), Size: size.n,
		Annotations: map[string]string{annotationTitle: f.Name + titleSuffix}}}
	if f.Size >= ChunkedFrom {
		chunks := descriptorOf(MediaChunks, list)
		chunks.Data = nil
		d = append(d, chunks)
		if err := w.write(path.Join(blobsDir, chunks.Digest.Hex()), list); err != nil {
			return nil, out, err
		}
	}
	out = File{f.Name, f.Size, Hash(plain.Sum(nil))}
	return d, out, w.root.Rename(name, path.Join(blobsDir, d[0].Digest.Hex()))
}

type counter struct{ n int64 }

// Write implements io.Writer.
func (c *counter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}

// progressReader reads until its context ends, and reports how much.
type progressReader struct {
	ctx    context.Context
	from   io.Reader
	report func(int)
}

// Read implements io.Reader.
func (t *progressReader) Read(p []byte) (int, error) {
	if err := t.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := t.from.Read(p)
	if t.report != nil {
		t.report(n)
	}
	return n, err
}

// write makes a file with these bytes atomically.
func (w *Writer) write(name string, data []byte) error {
	temporary := path.Join(path.Dir(name), ".new-"+rand.Text())
	f, err := w.root.OpenFile(temporary, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = w.root.Rename(temporary, name)
	}
	if err != nil {
		err = errors.Join(err, w.root.Remove(temporary))
	}
	return err
}

// Close writes the index, which names the builds that were added, and makes it durable.
func (w *Writer) Close() error {
	slices.SortStableFunc(w.index.Manifests, func(a, b Descriptor) int {
		return strings.Compare(a.Annotations[annotationRef], b.Annotations[annotationRef])
	})
	err := w.sync(blobsDir)
	if err == nil {
		err = w.write(indexFile, encode(&w.index))
	}
	if err == nil {
		err = w.sync(".")
	}
	return errors.Join(err, w.root.Close())
}

func (w *Writer) sync(dir string) error {
	d, err := w.root.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// WriteTar writes the image layout of a directory as a tar, with equal bytes for equal builds.
func WriteTar(ctx context.Context, to io.Writer, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	blobs, err := fs.ReadDir(root.FS(), blobsDir)
	if err != nil {
		return err
	}
	infos := []fs.FileInfo(nil)
	for _, b := range blobs {
		info, err := b.Info()
		if err != nil {
			return err
		}
		infos = append(infos, info)
	}
	slices.SortFunc(infos, func(a, b fs.FileInfo) int {
		return cmp.Or(cmp.Compare(a.Size(), b.Size()), strings.Compare(a.Name(), b.Name()))
	})
	names := []string{layoutFile, indexFile}
	for _, info := range infos {
		names = append(names, path.Join(blobsDir, info.Name()))
	}
	out := tar.NewWriter(to)
	for _, name := range names {
		if err := addFile(ctx, out, root, name); err != nil {
			return err
		}
	}
	return out.Close()
}

func addFile(ctx context.Context, out *tar.Writer, root *os.Root, name string) error {
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	err = out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644,
		Size: info.Size(), ModTime: time.Unix(0, 0)})
	if err == nil {
		_, err = io.Copy(out, &progressReader{ctx, f, nil})
	}
	return err
}

// parseIndex reads an index that other tools may have written.
func parseIndex(file string, raw []byte) (x index, err error) {
	if err := bounded(file, raw, maxIndex, maxValues*16); err != nil {
		return x, err
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	if err := dec.Decode(&x); err != nil {
		return x, jsonError(file, dec.InputOffset(), err)
	}
	if len(x.Manifests) > maxCards {
		return x, wrong(file, "manifests", "%d, more than %d", len(x.Manifests), maxCards)
	}
	return x, nil
}

func readAll(from io.Reader, file string, most int) ([]byte, error) {
	raw, err := io.ReadAll(io.LimitReader(from, int64(most)+1))
	if err == nil && len(raw) > most {
		err = wrong(file, "", "more than %d bytes", most)
	}
	return raw, err
}

func sumsTo(h hash.Hash, d Digest) bool { return Digest(h.Sum(nil)) == d }
