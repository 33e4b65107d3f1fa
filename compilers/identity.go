package compilers

import (
	"debug/elf"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// identityFiles lists the files that make an EP library what it is: itself, the shared libraries in its folder, and what the run paths of all
// of them reach by a way that starts at $ORIGIN. libonnxruntime and its Python module are not among them, nor other EPs' plugin libraries: a build
// does not depend on those. System libraries are not either; they change with every update and have never been seen to matter.
func identityFiles(library string) []string {
	queue := append([]string{library}, sharedObjects(filepath.Dir(library))...)
	var files []string
	for len(queue) > 0 {
		file := queue[0]
		queue = queue[1:]
		if slices.Contains(files, file) || file != library && foreign(file) {
			continue
		}
		files = append(files, file)
		queue = append(queue, reached(file)...)
	}
	slices.Sort(files)
	return files
}

// foreign tells files of ONNX Runtime itself and of other EPs.
func foreign(file string) bool {
	base := filepath.Base(file)
	if _, isEP := epOfLibrary(base); isEP {
		return true
	}
	return ortName.MatchString(base) || base == "libonnxruntime_providers_shared.so" || strings.HasPrefix(base, "onnxruntime_pybind11_state")
}

// sharedObjects lists the files of a folder that a loader could open, with absolute paths.
func sharedObjects(folder string) []string {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil // a run path may name folders that do not exist
	}
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

// reached lists what the loader finds for a library by its run path. A file that is no ELF reaches nothing: whether it loads is for a worker to
// find out.
func reached(file string) []string {
	f, err := elf.Open(file)
	if err != nil {
		return nil
	}
	defer f.Close() // read only
	needed, err := f.ImportedLibraries()
	if err != nil {
		return nil
	}
	var files []string
	for _, folder := range runPaths(f, filepath.Dir(file)) {
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
	return files
}

func runPaths(f *elf.File, origin string) []string {
	var folders []string
	for _, tag := range []elf.DynTag{elf.DT_RUNPATH, elf.DT_RPATH} {
		entries, err := f.DynString(tag)
		if err != nil {
			continue // no such entry
		}
		for _, entry := range entries {
			for _, path := range strings.Split(entry, ":") {
				path = strings.NewReplacer("${ORIGIN}", "$ORIGIN").Replace(path)
				if rest, ok := strings.CutPrefix(path, "$ORIGIN"); ok {
					folders = append(folders, filepath.Join(origin, rest))
				}
			}
		}
	}
	return folders
}
