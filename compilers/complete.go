package compilers

import (
	"fmt"
	"os"
	"path/filepath"
)

// Complete fills in what follows from the libraries that r names: the files that make up each EP library's identity, and ONNX Runtime's version
// where the file's name tells. It is for runtimes that are given library by library; those in one folder are for Find. It loads nothing.
func Complete(r Runtime) (Runtime, error) {
	if err := library("libonnxruntime", r.ORTLibrary); err != nil {
		return Runtime{}, err
	}
	full := Runtime{Directory: r.Directory, ORTLibrary: r.ORTLibrary, ORTVersion: r.ORTVersion}
	if v := versionOf(r.ORTLibrary); v != "" {
		full.ORTVersion = v
	}
	for _, l := range r.EPs {
		if err := library(l.EP, l.Path); err != nil {
			return Runtime{}, err
		}
		full.EPs = append(full.EPs, ownLibrary(l.EP, l.Path))
	}
	if len(full.EPs) == 0 {
		return Runtime{}, fmt.Errorf("runtime %q: EP library: %w: none is named", r.ORTLibrary, ErrNotFound)
	}
	return full, nil
}

func library(what, path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("library of %s: %q is not an absolute path", what, path)
	}
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("library of %s: %w", what, err)
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("library of %s: %q is not a regular file", what, path)
	}
	return nil
}
