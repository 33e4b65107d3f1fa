package layer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/store/views"
)

// Writer adds builds to a layer in a directory. They are in the layer once Close returns.
type Writer struct {
	dir string
	ids []string
}

// Create opens a directory for writing: a layer, or an empty or missing directory. All users may
// read the files that are made, because Create clears those bits of the process's umask.
func Create(dir string) (*Writer, error) {
	unix.Umask(0o022)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	some, err := os.ReadDir(dir)
	if err != nil || len(some) == 0 {
		return &Writer{dir: dir}, err
	}
	ids, err := readList(dir)
	if err != nil {
		return nil, fmt.Errorf("%s: neither empty nor a layer", dir)
	}
	w := &Writer{dir: dir}
	for _, id := range ids {
		w.ids = append(w.ids, id.String())
	}
	return w, nil
}

// Add writes a build of a bundle, once for each request that it answers. keyID is the id of the key
// that signed it, "" if unsigned.
func (w *Writer) Add(ctx context.Context, from *portable.Bundle, card *portable.Card,
	says portable.Predicate,
	keyID string) error {
	says.Requests = append([]portable.Request{portable.RequestOf(card.Config.Record)},
		says.Requests...)
	first := ""
	for _, r := range says.Requests {
		b, manifest, err := buildOf(card, &says, r, keyID)
		if err != nil {
			return err
		}
		dir := views.LayerDir(w.dir, b)
		for i, f := range b.Files {
			path := filepath.Join(dir, filepath.FromSlash(f.Name))
			err = makeFile(path, func(to *os.File) error {
				return from.Extract(ctx, card, i, to, nil)
			},
				filepath.Join(first, filepath.FromSlash(f.Name)))
			if err != nil {
				return err
			}
		}
		first = dir
		for path, content := range map[string][]byte{
			index.ManifestPath(w.dir, b.ID):              manifest,
			filepath.Join(w.dir, "cards", b.ID.String()): card.Raw,
		} {
			err := makeFile(path, func(to *os.File) error {
				_, err := to.Write(content)
				return err
			}, "")
			if err != nil {
				return err
			}
		}
		w.ids = append(w.ids, b.ID.String())
	}
	return nil
}

// makeFile makes a file that all may read, and its directories. The file appears complete or not at
// all. If it exists, nothing is done, because its name determines its content. If the file like
// exists, the new one is a link to that.
func makeFile(path string, write func(*os.File) error, like string) (err error) {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if os.Link(like, path) == nil {
		return nil
	}
	to, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return err
	}
	err = errors.Join(write(to), to.Chmod(0o444), to.Sync(), to.Close())
	if err == nil {
		err = os.Rename(to.Name(), path)
	}
	if err != nil {
		err = errors.Join(err, os.Remove(to.Name()))
	}
	return err
}

// Close writes the list of the builds.
func (w *Writer) Close() error {
	slices.Sort(w.ids)
	w.ids = slices.Compact(w.ids)
	path := filepath.Join(w.dir, listName)
	next := path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	text := strings.Join(append([]string{listHead[:len(listHead)-1]}, w.ids...), "\n") + "\n"
	err := makeFile(next, func(to *os.File) error {
		_, err := to.WriteString(text)
		return err
	}, "")
	return cmp.Or(err, os.Chmod(w.dir, 0o755), os.Rename(next, path))
}
