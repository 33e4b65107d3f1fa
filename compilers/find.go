package compilers

import (
	"context"
	"fmt"
	"io"
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
// plain directory of libraries. It loads no library and reads only names, ELF headers, and what
// Python packages state. Without a libonnxruntime, or without any plugin, the error wraps
// ErrNotFound and says what Find searched for.
func Find(dir string) (Runtime, error) {
	r, err := FindORT(dir)
	if err != nil {
		return Runtime{}, err
	}
	r.EPs = findEPs(libraryDirs(r.Directory))
	if len(r.EPs) == 0 {
		return Runtime{}, fmt.Errorf("runtime %q: EP library: %w beside ONNX Runtime%s: no file "+
			"of %s, and none that exports CreateEpFactories; one that is elsewhere is named by "+
			"ep_libraries in [[runtime]]", r.Directory, ErrNotFound, builtIn(r.ORTLibrary),
			strings.Join(EPNames(), ", "))
	}
	return r, nil
}

// builtIn says which EPs are parts of an ONNX Runtime, "" if none has a library of its own.
func builtIn(ort string) string {
	const prefix = "libonnxruntime_providers_"
	var names []string
	for _, path := range sharedlib.InDirectory(filepath.Dir(ort)) {
		name, part := strings.CutPrefix(filepath.Base(path), prefix)
		name = strings.TrimSuffix(name, ".so")
		if part && name != "shared" {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s: built into this ONNX Runtime, for which only applications compile)",
		strings.Join(names, ", "))
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
				add(filepath.Join(root, e.Name(), "lib"))
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
	add := func(ep, path string) {
		has := slices.ContainsFunc(libs, func(l EPLibrary) bool { return l.EP == ep })
		if ep != "" && !has && sharedlib.IsFile(path) { // a dangling link does not count
			libs = append(libs, describeLibrary(ep, path))
		}
	}
	for _, dir := range dirs {
		entries, _ := os.ReadDir(dir) // most of the places do not exist
		known := false
		for _, e := range entries {
			if ep, ok := EPOfLibrary(e.Name()); ok {
				known = true
				add(ep, filepath.Join(dir, e.Name()))
			}
		}
		if !known {
			for _, path := range pluginsIn(dir, entries) {
				add(pluginName(path), path)
			}
		}
	}
	sortEPs(libs)
	return libs
}

// pluginsIn lists the plugins of a directory without libraries of known EPs: the files that export
// the function that ONNX Runtime calls first. Libraries in ONNX Runtime's own directory are parts
// of it.
func pluginsIn(dir string, entries []os.DirEntry) (plugins []string) {
	if filepath.Base(dir) == "capi" {
		return nil
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasSuffix(path, ".so") && !pythonModule.MatchString(path) && !IsForeign(path) &&
			sharedlib.Exports(path, "CreateEpFactories") {
			plugins = append(plugins, path)
		}
	}
	return plugins
}

var (
	// Python packages of plugins state the name that applications use.
	statedName = regexp.MustCompile(`(?m)"([A-Za-z0-9_]+ExecutionProvider)"|` +
		`^(?:EP_NAME|REGISTRATION_NAME)\b[^=\n]*= *["']([A-Za-z0-9_.-]+)["']`)
	pythonModule = regexp.MustCompile(`\.(cpython-[^/]*|abi3)\.so$`)
	pluginFile   = regexp.MustCompile(
		`^lib(?:onnxruntime_)?(?:providers_|ep_)?(.+?)(?:_plugin|_ep)?\.so$`)
)

// maxPackageText bounds what is read of a Python package's text.
const maxPackageText = 64 << 10

// pluginName returns the name of the EP of a plugin that no table describes: the one that its
// Python package states, or else what its file's name has. [[runtime]] ep_libraries has others.
func pluginName(path string) string {
	dir := filepath.Dir(path)
	for _, dir := range []string{dir, filepath.Dir(dir)} {
		f, err := os.Open(filepath.Join(dir, "__init__.py"))
		if err != nil {
			continue // no package
		}
		text, _ := io.ReadAll(io.LimitReader(f, maxPackageText)) // best effort
		f.Close()                                                // opened for reading
		if m := statedName.FindSubmatch(text); m != nil {
			return string(m[1]) + string(m[2])
		}
	}
	if m := pluginFile.FindStringSubmatch(filepath.Base(path)); m != nil {
		return m[1]
	}
	return ""
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
			if path := filepath.Join(dir, name); sharedlib.IsFile(path) {
				files = append(files, path)
			}
		}
	}
	return files, l.RunPaths
}
