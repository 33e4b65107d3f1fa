package compilers

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/internal/sharedlib"
)

// Find reads the runtime in dir: a directory of `pip install --target`, a virtual environment, or a
// plain directory of libraries. It loads no library and reads only names and ELF headers. Without a
// libonnxruntime, or without any library of a known EP, the error wraps ErrNotFound and says what
// Find searched for.
func Find(dir string) (Runtime, error) {
	r, err := FindORT(dir)
	if err != nil {
		return Runtime{}, err
	}
	r.EPs = findEPs(libraryDirs(r.Directory))
	if len(r.EPs) == 0 {
		return Runtime{},
			fmt.Errorf("runtime %q: EP library: %w beside ONNX Runtime: looked for those of %s",
				r.Directory, ErrNotFound, strings.Join(EPNames(), ", "))
	}
	return r, nil
}

// FindORT is Find for a directory without libraries of known EPs; the runtime then has none.
func FindORT(dir string) (Runtime, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Runtime{}, fmt.Errorf("runtime %q: %w", dir, err)
	}
	if _, err := os.ReadDir(dir); err != nil {
		return Runtime{}, fmt.Errorf("runtime: %w", err)
	}
	for _, directory := range libraryDirs(dir) {
		if path, version := newestORT(directory); path != "" {
			return Runtime{Directory: dir, ORTLibrary: path, ORTVersion: version}, nil
		}
	}
	return Runtime{},
		fmt.Errorf(
			"runtime %q: libonnxruntime.so*: %w, neither there nor in lib, lib64, "+
				"python3*/site-packages/onnxruntime/capi", dir, ErrNotFound)
}

func libraryDirs(dir string) []string {
	roots := []string{dir, filepath.Join(dir, "lib"), filepath.Join(dir, "lib64")}
	for _, pattern := range []string{"lib*/python3*/site-packages", "lib*/python3*/dist-packages",
		"python3*/site-packages", "python3*/dist-packages"} {
		found, err := filepath.Glob(filepath.Join(globQuote(dir), pattern))
		if err != nil {
			continue // the pattern is ours; only a malformed one fails
		}
		roots = append(roots, found...)
	}
	var dirs []string
	add := func(directory string) {
		if !slices.Contains(dirs, directory) {
			dirs = append(dirs, directory)
		}
	}
	for _, root := range roots {
		add(root)
		add(filepath.Join(root, "onnxruntime", "capi"))
		entries, _ := os.ReadDir(root) // most of the places do not exist
		for _, e := range entries {
			if info, err := os.Stat(filepath.Join(root, e.Name())); err == nil && info.IsDir() {
				add(filepath.Join(root, e.Name()))
			}
		}
	}
	return dirs
}

// globQuote keeps a directory's own brackets and stars from being read as a pattern.
func globQuote(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

var ortName = regexp.MustCompile(`^libonnxruntime\.so(?:\.(\d+(?:\.\d+)*))?$`)

func newestORT(dir string) (path, version string) {
	entries, _ := os.ReadDir(dir) // most of the places do not exist
	for _, e := range entries {
		if !ortName.MatchString(e.Name()) {
			continue
		}
		candidate := filepath.Join(dir, e.Name())
		v := versionOf(candidate)
		if path == "" || CompareVersions(v, version) > 0 || v == version &&
			len(e.Name()) > len(filepath.Base(path)) {
			path, version = candidate, v
		}
	}
	return path, version
}

func versionOf(path string) string {
	names := []string{filepath.Base(path)}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		names = []string{filepath.Base(real), names[0]}
	}
	for _, name := range names {
		if m := ortName.FindStringSubmatch(name); m != nil && strings.Count(m[1], ".") == 2 {
			return m[1]
		}
	}
	return ""
}

// CompareVersions compares two versions of ONNX Runtime, as [cmp.Compare] does. An unknown version
// is lower than any other.
func CompareVersions(a, b string) int { return slices.Compare(numbers(a), numbers(b)) }

// numbers returns the numbers of a dotted version. An unknown version is lower than any other.
func numbers(version string) (list []int) {
	for part := range strings.SplitSeq(version, ".") {
		n, err := strconv.Atoi(part)
		if err != nil {
			n = -1
		}
		list = append(list, n)
	}
	return list
}

func findEPs(dirs []string) []EPLibrary {
	var libs []EPLibrary
	for _, dir := range dirs {
		entries, _ := os.ReadDir(dir) // most of the places do not exist
		for _, e := range entries {
			ep, ok := EPOfLibrary(e.Name())
			if !ok || slices.ContainsFunc(libs, func(l EPLibrary) bool { return l.EP == ep }) {
				continue
			}
			path := filepath.Join(dir, e.Name())
			if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
				continue // a dangling link does not count
			}
			libs = append(libs, describeLibrary(ep, path))
		}
	}
	sortEPs(libs)
	return libs
}

func sortEPs(libs []EPLibrary) {
	slices.SortFunc(libs, func(a, b EPLibrary) int { return strings.Compare(a.EP, b.EP) })
}

// FindAll searches well-known directories and the user's Python environments for runtimes with at
// least one EP library.
func FindAll(ctx context.Context) []Runtime {
	var found []Runtime
	seen := map[string]bool{}
	for _, dir := range wellKnownDirs() {
		if ctx.Err() != nil {
			return found
		}
		r, err := Find(dir)
		if err != nil || seen[r.ORTLibrary] {
			continue // most directories have none, and two paths may lead to the same one
		}
		seen[r.ORTLibrary] = true
		found = append(found, r)
	}
	return found
}

func wellKnownDirs() []string {
	patterns := []string{"/opt/onnxruntime*", "/opt/epcached/*", "/usr/local", "/usr",
		"/usr/lib/*-linux-gnu", "/usr/local/lib/onnxruntime*", "/opt/venv", "/opt/*/venv",
		"/opt/conda"}
	if home, err := os.UserHomeDir(); err == nil {
		for _, p := range []string{".local", ".venv", ".virtualenvs/*", "venvs/*", "miniconda3",
			"miniconda3/envs/*", "anaconda3", "anaconda3/envs/*", ".pyenv/versions/*",
			".local/share/virtualenvs/*", ".local/share/epcached/runtimes/*"} {
			patterns = append(patterns, filepath.Join(globQuote(home), p))
		}
	}
	dirs := environments()
	for _, pattern := range patterns {
		// only a malformed pattern fails, and these are ours
		if found, err := filepath.Glob(pattern); err == nil {
			dirs = append(dirs, found...)
		}
	}
	return dirs
}

// environments lists the Python environments to search: the activated one, that of this program,
// that of the first Python in PATH, and those in the working directory.
func environments() (dirs []string) {
	for _, variable := range []string{"VIRTUAL_ENV", "CONDA_PREFIX"} {
		if dir := os.Getenv(variable); filepath.IsAbs(dir) {
			dirs = append(dirs, dir)
		}
	}
	programs := []string{}
	if self, err := os.Executable(); err == nil {
		programs = append(programs, self)
		if real, err := filepath.EvalSymlinks(self); err == nil {
			programs = append(programs, real)
		}
	}
	if python, err := exec.LookPath("python3"); err == nil && filepath.IsAbs(python) {
		// without resolving links, because an environment's python is a link to the system's
		programs = append(programs, python)
	}
	for _, program := range programs {
		if bin := filepath.Dir(program); filepath.Base(bin) == "bin" {
			dirs = append(dirs, filepath.Dir(bin))
		}
	}
	if here, err := os.Getwd(); err == nil {
		for _, name := range []string{".venv", "venv", "env", "runtime"} {
			dirs = append(dirs, filepath.Join(here, name))
		}
	}
	return dirs
}

// describeLibrary describes the EP library at a path. Its Files are itself, the shared libraries in
// its directory, and the libraries in their run paths that begin with $ORIGIN. libonnxruntime and
// its Python module are not among them, nor other EPs' plugin libraries: a build does not depend on
// those. System libraries are not either; they change with every update and have never been seen to
// matter.
func describeLibrary(ep, library string) EPLibrary {
	l := EPLibrary{EP: ep, Path: library}
	dir := filepath.Dir(library)
	queue := append([]string{library}, sharedlib.InDirectory(dir)...)
	for len(queue) > 0 {
		file := queue[0]
		queue = queue[1:]
		if slices.Contains(l.Files, file) || file != library && IsForeign(file) {
			continue
		}
		l.Files = append(l.Files, file)
		more, dirs := runPathFiles(file)
		queue = append(queue, more...)
		l.Elsewhere = l.Elsewhere || slices.ContainsFunc(dirs,
			func(f string) bool { return f != dir && f != sharedlib.WheelLibraries(dir) })
	}
	slices.Sort(l.Files)
	return l
}

// LibrariesBeside lists the shared libraries that an application shows to the daemon besides the
// EP's own: those in the directory of an EP library and in the bundled one, by their paths relative
// to the directory. The clients in other languages show the same ones.
func LibrariesBeside(library string) []string {
	dir := filepath.Dir(library)
	var names []string
	for _, file := range sharedlib.Beside(library) {
		if name, err := filepath.Rel(dir, file); err == nil && file != library {
			names = append(names, name)
		}
	}
	return names
}

// IsForeign reports files of ONNX Runtime and other EPs, which belong to no library beside them.
func IsForeign(file string) bool {
	base := filepath.Base(file)
	if _, isEP := EPOfLibrary(base); isEP {
		return true
	}
	return ortName.MatchString(base) || base == "libonnxruntime_providers_shared.so" ||
		strings.HasPrefix(base, "onnxruntime_pybind11_state")
}

// runPathFiles lists the files and directories on a library's run path: none for a file that is not
// ELF.
func runPathFiles(file string) (files, dirs []string) {
	l, err := sharedlib.Read(file)
	if err != nil {
		return nil, nil
	}
	for _, dir := range l.RunPaths {
		// bundled libraries of Python wheels, some of which are opened by name
		if strings.HasSuffix(dir, ".libs") {
			files = append(files, sharedlib.InDirectory(dir)...)
			continue
		}
		for _, name := range l.Needed {
			path := filepath.Join(dir, name)
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
				files = append(files, path)
			}
		}
	}
	return files, l.RunPaths
}
