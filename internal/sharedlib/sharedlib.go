// Package sharedlib reads what shared libraries (ELF) state about themselves, without loading them:
// their names, the libraries that they need, and the functions that they export. Preloads finds
// those libraries of a plugin that the dynamic loader would not find.
package sharedlib

import (
	"bytes"
	"debug/elf"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Library is what a shared library states about itself.
type Library struct {
	Name     string   // its SONAME, "" if it has none
	Needed   []string // SONAMEs of the libraries that it needs
	RunPaths []string // the directories of its run path that begin with $ORIGIN
}

// Read reads a library. It returns an error for a file that is not ELF.
func Read(path string) (Library, error) {
	f, err := elf.Open(path)
	if err != nil {
		return Library{}, err
	}
	defer f.Close() // opened for reading
	l := Library{RunPaths: runPaths(f, filepath.Dir(path))}
	if l.Needed, err = f.ImportedLibraries(); err != nil {
		return Library{}, err
	}
	if names, _ := f.DynString(elf.DT_SONAME); len(names) > 0 { // an error means no such entry
		l.Name = names[0]
	}
	return l, nil
}

func runPaths(f *elf.File, origin string) []string {
	var dirs []string
	for _, tag := range []elf.DynTag{elf.DT_RUNPATH, elf.DT_RPATH} {
		entries, _ := f.DynString(tag) // an error means no such entry
		for _, entry := range entries {
			for path := range strings.SplitSeq(entry, ":") {
				path = strings.NewReplacer("${ORIGIN}", "$ORIGIN").Replace(path)
				if rest, ok := strings.CutPrefix(path, "$ORIGIN"); ok {
					dirs = append(dirs, filepath.Join(origin, rest))
				}
			}
		}
	}
	return dirs
}

// Exports reports whether a library exports a function. It looks for the name among those of the
// dynamic symbols, and does not decode these, because some libraries have hundreds of thousands.
func Exports(path, function string) bool {
	f, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer f.Close() // opened for reading
	names := f.Section(".dynstr")
	if names == nil || names.Size > maxNames {
		return false
	}
	text, err := names.Data()
	return err == nil && bytes.Contains(text, []byte("\x00"+function+"\x00"))
}

// maxNames bounds the table of names that Exports reads.
const maxNames = 64 << 20

// InDirectory lists the files of a directory that a loader could open, with absolute paths.
func InDirectory(dir string) []string {
	entries, _ := os.ReadDir(dir) // a run path may name directories that do not exist
	var files []string
	for _, e := range entries {
		name := e.Name()
		if !strings.HasSuffix(name, ".so") && !strings.Contains(name, ".so.") ||
			strings.HasPrefix(name, ".") {
			continue
		}
		if path := filepath.Join(dir, name); IsFile(path) {
			files = append(files, path)
		}
	}
	return files
}

// IsFile reports whether a regular file is at the path, or at the end of a link there.
func IsFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// WheelLibraries returns the directory in which Python wheels have their bundled libraries.
func WheelLibraries(dir string) string { return dir + ".libs" }

// Beside lists the libraries in a plugin's directory, and those that its wheel bundles.
func Beside(plugin string) []string {
	dir := filepath.Dir(plugin)
	return append(InDirectory(dir), InDirectory(WheelLibraries(dir))...)
}

// fromSystem are the libraries that every process has from the system: a second one of a package
// would not work beside them.
var fromSystem = []string{"libc.so.", "libm.so.", "libdl.so.", "librt.so.", "libpthread.so.",
	"ld-linux", "libstdc++.so.", "libgcc_s.so.", "libonnxruntime.so."}

func isFromSystem(name string) bool {
	return slices.ContainsFunc(fromSystem, func(prefix string) bool {
		return strings.HasPrefix(name, prefix)
	})
}

// Preloads lists the libraries beside a plugin that it needs, or another of them, and that no run
// path leads to: their paths, each after those that it needs itself. Loaded in this order, so that
// their symbols are global, they satisfy the loader by their SONAMEs. It is empty for a plugin that
// loads by itself.
func Preloads(plugin string) (paths []string) {
	beside := map[string]string{} // by SONAME and file name; filled at the first need
	seen := map[string]bool{}
	var visit func(path string)
	visit = func(path string) {
		l, err := Read(path)
		if seen[path] || err != nil {
			return // the loader reports a file that is not ELF
		}
		seen[path] = true
		for _, name := range l.Needed {
			if isFromSystem(name) {
				continue
			}
			inRunPath := slices.IndexFunc(l.RunPaths, func(dir string) bool {
				return IsFile(filepath.Join(dir, name))
			})
			if inRunPath >= 0 {
				visit(filepath.Join(l.RunPaths[inRunPath], name))
				continue
			}
			if len(beside) == 0 {
				beside = namesOf(Beside(plugin))
			}
			if found := beside[name]; found != "" && !seen[found] {
				visit(found)
				paths = append(paths, found)
			}
		}
	}
	visit(plugin)
	return paths
}

// Links returns the names under which the libraries beside a plugin are opened, with their paths:
// the loader finds the libraries of a plugin with Preloads in a directory with such links. It is
// empty for a plugin that loads by itself.
func Links(plugin string) map[string]string {
	if len(Preloads(plugin)) == 0 {
		return nil
	}
	names := namesOf(Beside(plugin))
	for name, path := range names {
		if isFromSystem(name) {
			delete(names, name)
			continue
		}
		stem, _, _ := strings.Cut(name, ".so.") // some are opened without their version
		if _, taken := names[stem+".so"]; !taken && stem != name {
			names[stem+".so"] = path
		}
	}
	return names
}

// namesOf returns the paths of libraries by SONAME and by file name.
func namesOf(files []string) map[string]string {
	names := make(map[string]string, 2*len(files))
	for _, path := range files {
		names[filepath.Base(path)] = path
	}
	for _, path := range files {
		l, err := Read(path)
		if err == nil && l.Name != "" && l.Name == filepath.Base(l.Name) && names[l.Name] == "" {
			names[l.Name] = path
		}
	}
	return names
}
