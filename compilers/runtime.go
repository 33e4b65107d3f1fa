package compilers

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Runtime is one ONNX Runtime with the EP libraries that stand beside it. All paths are absolute.
type Runtime struct {
	Directory  string // the folder that Find was given
	ORTLibrary string // libonnxruntime.so.X.Y.Z
	ORTVersion string // from the file's name; empty if the name does not tell, then Probe does
	EPs        []EPLibrary
}

// EPLibrary is a plugin EP library and everything that makes it what it is.
type EPLibrary struct {
	EP   string // canonical EP name
	Path string
	// Files are the absolute paths, sorted, of the files whose bytes are the library's identity: the library, the shared libraries in its
	// folder, and those in package folders that its run path reaches. Never libonnxruntime: builds do not depend on its version.
	Files []string
	// Elsewhere: a run path leads, from $ORIGIN, to other folders than the library's own and the
	// one that [Beside] names. What an application shows of its own library then does not tell
	// whether it is this one.
	Elsewhere bool
	// Tool stands for what a vendor's own compiler is told that compiles in the library's place; its files are among Files. Empty: there is
	// none.
	Tool string
	// Absent: the library is not here, and Path is the tool's program.
	Absent bool
}

// Library gives the runtime's library for an EP, or an error that wraps ErrNotFound and tells which EPs there are.
func (r Runtime) Library(ep string) (EPLibrary, error) {
	var have []string
	for _, lib := range r.EPs {
		if lib.EP == ep {
			return lib, nil
		}
		have = append(have, lib.EP)
	}
	if len(have) == 0 {
		have = []string{"none"}
	}
	return EPLibrary{}, fmt.Errorf("library for %q in runtime %q: %w (it has: %s)", ep, r.Directory, ErrNotFound, strings.Join(have, ", "))
}

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
