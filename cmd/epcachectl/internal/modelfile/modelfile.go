// Package modelfile opens models with the caller's rights: because the daemon opens no client's
// file by name.
package modelfile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/clients/epcache/modelsource"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/modelname"
	"github.com/epcached/epcached/unixsock"
)

// Model is a model that this process opened with its own rights.
type Model struct {
	*modelsource.Source
	Path         string
	openedStamps map[string]os.FileInfo // by path: the file as it was opened
}

// Open opens a model. Caches of model hubs consist of links, and have external data either beside
// the links or beside their targets. So it is searched beside the path as spelled, then beside its
// target.
func Open(path string) (*Model, error) {
	source, err := modelsource.Open(path)
	if err != nil {
		return nil, PlainPathError(err)
	}
	m := &Model{Source: source, Path: path, openedStamps: make(map[string]os.FileInfo)}
	if err := m.record(source.File); err != nil {
		return nil, errors.Join(err, source.Close())
	}
	return m, nil
}

// record checks that a file is a regular one, and keeps its identity.
func (m *Model) record(f *os.File) (err error) {
	if err = checkRegular(f); err == nil {
		m.openedStamps[f.Name()], err = f.Stat()
	}
	return err
}

// Name returns the model's file name, as the daemon receives it.
func (m *Model) Name() string { return strings.ToValidUTF8(filepath.Base(m.Path), "\uFFFD") }

// Absolute returns the model's absolute path, "" if it is unknown or too long to send.
func (m *Model) Absolute() string { return Absolute(m.Path) }

// Absolute returns the absolute path of a model, "" if it is unknown or too long to send.
func Absolute(path string) string {
	absolute, err := filepath.Abs(path)
	if err != nil || len(absolute) > modelname.MaxPath || !utf8.ValidString(absolute) {
		return ""
	}
	return absolute
}

// OpenRegular opens a regular file. It does not block on a FIFO, and refuses other kinds of files.
func OpenRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, PlainPathError(err)
	}
	if err := checkRegular(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func checkRegular(f *os.File) error {
	info, err := f.Stat()
	if err != nil || info.Mode().IsRegular() {
		return err
	}
	err = fmt.Errorf("it is not a regular file (%s)", KindName(info.Mode()))
	if info.IsDir() {
		err = exit.Hint(err, "name a model's file; to compile all models of a directory: "+
			"epcachectl warm DIR")
	}
	return err
}

// PlainPathError removes the path from an error, because the message names it already.
func PlainPathError(err error) error {
	if path, is := errors.AsType[*fs.PathError](err); is {
		return path.Err
	}
	return err
}

// KindName names the kind of file of a mode.
func KindName(mode fs.FileMode) string {
	switch {
	case mode.IsRegular():
		return "a file"
	case mode.IsDir():
		return "a directory"
	case mode&fs.ModeNamedPipe != 0:
		return "a FIFO"
	case mode&fs.ModeDevice != 0:
		return "a device"
	}
	return mode.Type().String()
}

// External opens external data by its location in the model.
func (m *Model) External(location string) (*os.File, error) {
	f, err := m.Source.External(location)
	if err != nil {
		return nil, err
	}
	if err := m.record(f); err != nil {
		return nil, errors.Join(fmt.Errorf("file %q: %w", f.Name(), err), f.Close())
	}
	return f, nil
}

// ExternalSize returns the size of external data, which it opens.
func (m *Model) ExternalSize(location string) (int64, error) {
	f, err := m.External(location)
	if err != nil {
		return 0, err
	}
	defer f.Close() // opened for reading
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// Read reads the graph.
func (m *Model) Read(ctx context.Context) (*epmodel.Model, epmodel.Source, error) {
	source, err := epmodel.FileSource(m.File)
	if err != nil {
		return nil, nil, err
	}
	model, err := epmodel.Read(ctx, m.Path, source)
	return model, source, err
}

// CloseFiles closes files that were opened for reading.
func CloseFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// References lists the names of the files that a compiled model needs beside it: those that the
// graph refers to, and those that its context binaries refer to.
func (m *Model) References(ctx context.Context) (names []string, err error) {
	model, _, err := m.Read(ctx)
	if err != nil {
		return nil, err
	}
	for refs := model.Sidecars(); len(refs) > 0; refs = refs[1:] {
		name := path.Clean(refs[0].Name)
		if slices.Contains(names, name) {
			continue
		}
		names = append(names, name)
		if refs[0].Attribute != "ep_cache_context" {
			continue
		}
		f, err := m.External(name)
		if err != nil {
			return nil, err
		}
		defer f.Close() // opened for reading; there are few
		source, err := epmodel.FileSource(f)
		if err != nil {
			return nil, err
		}
		more, err := epmodel.BinaryReferences(name, source)
		if err != nil {
			return nil, err
		}
		refs = append(refs, more...)
	}
	return names, nil
}

// Digest computes the model digest.
func (m *Model) Digest(ctx context.Context) (cas.Digest, error) {
	model, source, err := m.Read(ctx)
	if err != nil {
		return cas.Digest{}, err
	}
	var opened []*os.File
	defer func() { CloseFiles(opened) }()
	open := func(location string) (epmodel.Source, error) {
		f, err := m.External(location)
		if err != nil {
			return nil, err
		}
		opened = append(opened, f)
		return epmodel.FileSource(f)
	}
	sum := func(ctx context.Context, r io.ReaderAt, off, n int64) ([32]byte, error) {
		d, err := cas.Sum(ctx, r, off, n)
		return [32]byte(d), err
	}
	d, err := epmodel.Digest(ctx, model, source, open, sum)
	return cas.Digest(d), err
}

// Close closes the file. It returns no error because the file was opened for reading.
func (m *Model) Close() { _ = m.Source.Close() }

// Linked makes a link to the model beside a job's directory, where the daemon has its models, with
// the name that the daemon would use, and returns its path. ONNX Runtime hashes the spelling of the
// path into names, so the artefact then has the same bytes for every path of the model. It returns
// the model's own path if the model has external data, which ONNX Runtime looks for beside it.
func (m *Model) Linked(dir, output string) (string, error) {
	model, err := filepath.Abs(m.Path)
	if err != nil || len(m.openedStamps) > 1 {
		return model, err
	}
	link := filepath.Join(filepath.Dir(dir), "model",
		strings.TrimSuffix(output, "_ctx.onnx")+".onnx")
	if err := os.MkdirAll(filepath.Dir(link), 0o700); err != nil {
		return "", err
	}
	return link, os.Symlink(model, link)
}

// Unchanged fails if the model's files are not those any more that the daemon has seen. The daemon
// cannot check that itself.
func (m *Model) Unchanged() error {
	for path, then := range m.openedStamps {
		now, err := os.Stat(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err != nil || !os.SameFile(then, now) || then.Size() != now.Size() ||
			!then.ModTime().Equal(now.ModTime()) {
			return fmt.Errorf("%q changed while it was compiled", path)
		}
	}
	return nil
}

// OpenAll opens models in order. After an error none is open, and it returns the path that failed.
func OpenAll(paths []string) ([]*Model, string, error) {
	var models []*Model
	for _, path := range paths {
		m, err := Open(path)
		if err != nil {
			CloseAll(models)
			return nil, path, err
		}
		models = append(models, m)
	}
	return models, "", nil
}

// CloseAll closes models.
func CloseAll(models []*Model) {
	for _, m := range models {
		m.Close()
	}
}

// Entry replaces the path of a model by its digest. An existing file takes precedence over a key or
// name in the store.
func Entry(ctx context.Context, arg string) (string, error) {
	if info, err := os.Stat(arg); err != nil || !info.Mode().IsRegular() {
		return arg, nil
	}
	m, err := Open(arg)
	if err != nil {
		return "", err
	}
	defer m.Close()
	d, err := m.Digest(ctx)
	return d.String(), err
}

// Entries calls Entry for each argument.
func Entries(ctx context.Context, args []string) ([]string, error) {
	entries := make([]string, len(args))
	for i, arg := range args {
		entry, err := Entry(ctx, arg)
		if err != nil {
			return nil, exit.WithOperation("read", arg, err)
		}
		entries[i] = entry
	}
	return entries, nil
}

// AsGiven replaces digests in an error by the arguments of the call.
func AsGiven(err error, args, entries []string) error {
	e, is := errors.AsType[*unixsock.Error](err)
	if !is {
		return err
	}
	own := *e
	for i, entry := range entries {
		if entry != args[i] {
			own.Text = strings.ReplaceAll(own.Text, strconv.Quote(entry), strconv.Quote(args[i]))
			own.Hint = strings.ReplaceAll(own.Hint, entry, args[i])
		}
	}
	return &own
}
