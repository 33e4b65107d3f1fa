package compilers

import (
	"debug/elf"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// ownLibrary describes the EP library at a path. Its Files are itself, the shared libraries in its
// folder, and what the run paths of all of them reach by a way that starts at $ORIGIN.
// libonnxruntime and its Python module are not among them, nor other EPs' plugin libraries: a build
// does not depend on those. System libraries are not either; they change with every update and have
// never been seen to matter.
func ownLibrary(ep, library string) EPLibrary {
	l := EPLibrary{EP: ep, Path: library}
	folder := filepath.Dir(library)
	queue := append([]string{library}, sharedObjects(folder)...)
	for len(queue) > 0 {
		file := queue[0]
		queue = queue[1:]
		if slices.Contains(l.Files, file) || file != library && Foreign(file) {
			continue
		}
		l.Files = append(l.Files, file)
		more, folders := reached(file)
		queue = append(queue, more...)
		l.Elsewhere = l.Elsewhere || slices.ContainsFunc(folders,
			func(f string) bool { return f != folder && f != bundled(folder) })
	}
	slices.Sort(l.Files)
	return l
}

// bundled is the folder in which Python wheels keep the libraries that they brought along.
func bundled(folder string) string { return folder + ".libs" }

// Beside lists the shared libraries that an application shows to a daemon that may have other
// libraries: those in the folder of an EP library and in the bundled one, by their paths relative
// to the folder. The clients in other languages show the same ones.
func Beside(library string) []string {
	folder := filepath.Dir(library)
	var names []string
	for _, file := range append(sharedObjects(folder), sharedObjects(bundled(folder))...) {
		if name, err := filepath.Rel(folder, file); err == nil && file != library {
			names = append(names, name)
		}
	}
	return names
}

// Foreign tells files of ONNX Runtime itself and of other EPs, which are no part of an EP library
// beside them.
func Foreign(file string) bool {
	base := filepath.Base(file)
	if _, isEP := epOfLibrary(base); isEP {
		return true
	}
	return ortName.MatchString(base) || base == "libonnxruntime_providers_shared.so" || strings.HasPrefix(base, "onnxruntime_pybind11_state")
}

// sharedObjects lists the files of a folder that a loader could open, with absolute paths.
func sharedObjects(folder string) []string {
	entries, _ := os.ReadDir(folder) // a run path may name folders that do not exist
	var files []string
	for _, e := range entries {
		name := e.Name()
		if !strings.HasSuffix(name, ".so") && !strings.Contains(name, ".so.") || strings.HasPrefix(name, ".") {
			continue
		}
		path := filepath.Join(folder, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			files = append(files, path)
		}
	}
	return files
}

// reached lists what the loader finds for a library by its run path, and the folders of that. A
// file that is no ELF reaches nothing: whether it loads is for a worker to find out.
func reached(file string) (files, folders []string) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, nil
	}
	defer f.Close() // read only
	needed, err := f.ImportedLibraries()
	if err != nil {
		return nil, nil
	}
	folders = runPaths(f, filepath.Dir(file))
	for _, folder := range folders {
		if strings.HasSuffix(folder, ".libs") { // where Python wheels keep what they brought along; some of it is opened by name
			files = append(files, sharedObjects(folder)...)
			continue
		}
		for _, name := range needed {
			path := filepath.Join(folder, name)
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
				files = append(files, path)
			}
		}
	}
	return files, folders
}

func runPaths(f *elf.File, origin string) []string {
	var folders []string
	for _, tag := range []elf.DynTag{elf.DT_RUNPATH, elf.DT_RPATH} {
		entries, _ := f.DynString(tag) // an error: there is no such entry
		for _, entry := range entries {
			for path := range strings.SplitSeq(entry, ":") {
				path = strings.NewReplacer("${ORIGIN}", "$ORIGIN").Replace(path)
				if rest, ok := strings.CutPrefix(path, "$ORIGIN"); ok {
					folders = append(folders, filepath.Join(origin, rest))
				}
			}
		}
	}
	return folders
}
