package compilers

import (
	"fmt"
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
