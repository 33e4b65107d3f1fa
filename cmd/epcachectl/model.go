package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/epmodel"
)

// modelFile is a model that this process opened with its own rights. The daemon opens nothing of a client's by name.
type modelFile struct {
	path    string
	file    *os.File
	folders []string               // where its external data is looked for, in order
	shown   map[string]os.FileInfo // by path: what was opened
}

// openModel opens a model. Caches of model hubs are full of links, and put either the links or what they point to
// side by side: external data is looked for beside the path as it is spelled, then beside what it points to.
func openModel(path string) (*modelFile, error) {
	f, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	m := &modelFile{path: path, file: f, folders: []string{filepath.Dir(path)}, shown: make(map[string]os.FileInfo)}
	if err := m.note(path, f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if real, err := filepath.EvalSymlinks(path); err == nil && filepath.Dir(real) != filepath.Dir(path) {
		m.folders = append(m.folders, filepath.Dir(real))
	}
	return m, nil
}

// openRegular does not wait for the other end of a FIFO, and takes nothing but files.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, plainPathError(err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("it is no regular file (%s)", kindName(info.Mode()))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// plainPathError leaves the path out: the message names it already.
func plainPathError(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

func kindName(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "a folder"
	case mode&fs.ModeNamedPipe != 0:
		return "a FIFO"
	case mode&fs.ModeDevice != 0:
		return "a device"
	}
	return mode.Type().String()
}

// external opens external data by its location in the model. A location that leads out of the folder by its
// spelling is refused; links inside the folder are followed, with the rights of this process.
func (m *modelFile) external(location string) (*os.File, error) {
	if !filepath.IsLocal(filepath.FromSlash(location)) {
		return nil, fmt.Errorf("file %q lies outside the model's folder", location)
	}
	var failed error
	for _, folder := range m.folders {
		path := folder + "/" + location // as it is spelled, because the system resolves "s/../w.bin" by what "s" is
		f, err := openRegular(path)
		if err == nil {
			if err = m.note(path, f); err == nil {
				return f, nil
			}
			err = errors.Join(err, f.Close())
		}
		if failed == nil || errors.Is(failed, fs.ErrNotExist) {
			failed = fmt.Errorf("file %q in %q: %w", location, folder, err)
		}
	}
	return nil, failed
}

// references lists the names of the files that a compiled model needs beside it: those that the
// graph refers to, and those that its context binaries refer to.
func (m *modelFile) references(ctx context.Context) (names []string, err error) {
	source, err := epmodel.FileSource(m.file)
	if err != nil {
		return nil, err
	}
	model, err := epmodel.Read(ctx, m.path, source)
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
		more, err := m.binaryReferences(name)
		if err != nil {
			return nil, err
		}
		refs = append(refs, more...)
	}
	return names, nil
}

func (m *modelFile) binaryReferences(name string) (refs []epmodel.Reference, err error) {
	f, err := m.external(name)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read from
	source, err := epmodel.FileSource(f)
	if err != nil {
		return nil, err
	}
	return epmodel.BinaryReferences(name, source)
}

// note remembers what an opened file was.
func (m *modelFile) note(path string, f *os.File) error {
	info, err := f.Stat()
	if err == nil {
		m.shown[path] = info
	}
	return err
}

// digest is the model digest, computed here.
func (m *modelFile) digest(ctx context.Context) (cas.Digest, error) {
	source, err := epmodel.FileSource(m.file)
	if err != nil {
		return cas.Digest{}, err
	}
	model, err := epmodel.Read(ctx, m.path, source)
	if err != nil {
		return cas.Digest{}, err
	}
	var opened []*os.File
	defer func() {
		for _, f := range opened {
			f.Close() // only read from
		}
	}()
	open := func(location string) (epmodel.Source, error) {
		f, err := m.external(location)
		if err != nil {
			return nil, err
		}
		opened = append(opened, f)
		return epmodel.FileSource(f)
	}
	d, err := epmodel.Digest(ctx, model, source, open, sumOf)
	return cas.Digest(d), err
}

// close needs no result: the file was only read from.
func (m *modelFile) close() { _ = m.file.Close() }
