//go:build linux && (amd64 || arm64)

package ort

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"
)

// OldestMinor is the oldest ORT that is supported: 1.OldestMinor.
const OldestMinor = 24

// API is an open ONNX Runtime library. It stays loaded until the process ends: EP libraries leave
// threads running that need their code.
type API struct {
	// Version is the version that the library states, e.g. "1.31.1".
	Version string

	// Build is the library's build information, e.g. "ORT Build Info: git-branch=..., build
	// type=Release, cmake cxx flags: ...".
	Build string

	minor   int
	tables  map[table]handle
	library string
}

// Error is a status that ORT returned.
type Error struct {
	Doing string // the C function
	Code  int    // OrtErrorCode
	Text  string
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s: ort error %d: %s", e.Doing, e.Code, e.Text)
}

// Open loads libonnxruntime from an absolute path.
func Open(path string) (*API, error) {
	lib, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("load %q: %w", path, err)
	}
	entry, err := purego.Dlsym(lib, "OrtGetApiBase")
	if err != nil {
		return nil, fmt.Errorf("load %q: not an ONNX Runtime library: %w", path, err)
	}
	base := handle(call(handle(entry)))
	a := &API{library: path, tables: map[table]handle{apiBase: base}}
	a.Version = text(handle(call(functionAt(base, fnGetVersionString.slot))))
	if err := a.parseVersion(); err != nil {
		return nil, err
	}
	// All accepted versions return the same table, and every library accepts the oldest supported
	// one.
	api := handle(call(functionAt(base, fnGetApi.slot), uint32(OldestMinor)))
	if api == 0 {
		return nil, fmt.Errorf("load %q: version %s has no API %d: ONNX Runtime 1.%d or later "+
			"is required", path, a.Version, OldestMinor, OldestMinor)
	}
	a.tables[apiTable] = api
	a.Build = text(handle(call(functionAt(api, fnGetBuildInfoString.slot))))
	if a.tables[compileAPI] = handle(a.raw(fnGetCompileApi)); a.tables[compileAPI] == 0 {
		return nil, fmt.Errorf("%s: ONNX Runtime %s does not provide "+
			"it", fnGetCompileApi.field, a.Version)
	}
	return a, nil
}

// Preload loads a library so that later ones, which need it, find it by its SONAME.
func Preload(path string) error {
	if _, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_GLOBAL); err != nil {
		return fmt.Errorf("load %q: %w", path, err)
	}
	return nil
}

func (a *API) parseVersion() error {
	parts := strings.SplitN(a.Version, ".", 3)
	if len(parts) < 2 || parts[0] != "1" {
		return fmt.Errorf("load %q: version %q is not of the 1.x line", a.library, a.Version)
	}
	minor, err := strconv.Atoi(parts[1])
	if err != nil {
		return fmt.Errorf("load %q: version %q: %w", a.library, a.Version, err)
	}
	if minor < OldestMinor {
		return fmt.Errorf("load %q: version %s is too old: ONNX Runtime 1.%d or later is "+
			"required", a.library, a.Version, OldestMinor)
	}
	a.minor = minor
	return nil
}

// entry returns a function, or an error if the library is too old to have it.
func (a *API) entry(f function) (handle, error) {
	if f.minor > a.minor {
		return 0, fmt.Errorf("%s: came with ONNX Runtime 1.%d, this is %s", f.field,
			f.minor, a.Version)
	}
	return functionAt(a.tables[f.table], f.slot), nil
}

func (a *API) do(f function, args ...any) error {
	fn, err := a.entry(f)
	if err != nil {
		return err
	}
	status := handle(call(fn, args...))
	if status == 0 {
		return nil
	}
	defer call(functionAt(a.tables[apiTable], fnReleaseStatus.slot), status)
	return &Error{
		Doing: f.field,
		Code:  int(int32(call(functionAt(a.tables[apiTable], fnGetErrorCode.slot), status))),
		Text:  text(handle(call(functionAt(a.tables[apiTable], fnGetErrorMessage.slot), status))),
	}
}

// callSequence calls functions one after the other, up to the first that fails.
type callSequence struct {
	*API
	err error
}

// do calls a function, unless an earlier one has failed, and reports whether none has failed.
func (c *callSequence) do(f function, args ...any) bool {
	if c.err == nil {
		c.err = c.API.do(f, args...)
	}
	return c.err == nil
}

// raw calls a function that returns a value instead of a status. It is for functions that every
// supported version has, because Open refuses older libraries.
func (a *API) raw(f function, args ...any) uintptr {
	fn, err := a.entry(f)
	if err != nil {
		panic(err) // a mistake in functions.go
	}
	return call(fn, args...)
}

func (a *API) pairs(h handle) map[string]string {
	m := map[string]string{}
	if h == 0 {
		return m
	}
	var keys, values handle
	var count uintptr
	a.raw(fnGetKeyValuePairs, h, &keys, &values, &count)
	k, v := elementsAt[handle](keys, count), elementsAt[handle](values, count)
	for i := range k {
		m[text(k[i])] = text(v[i])
	}
	return m
}

// handle is a pointer to C memory, which Go's garbage collector ignores.
type handle uintptr

// call enters C. It is the only place where Go memory becomes an address: each pointer, string and
// slice among args is pinned until the function has returned. Strings get a terminating zero.
// Arguments are handles, integers, strings, []string (as char**), slices, and pointers for results.
// The result is the raw return register, so convert it to the C type's width first.
func call(fn handle, args ...any) uintptr {
	var pins runtime.Pinner
	defer pins.Unpin()
	var words [15]uintptr
	for i, arg := range args {
		words[i] = argumentWord(&pins, arg)
	}
	result, _, _ := purego.SyscallN(uintptr(fn), words[:len(args)]...)
	runtime.KeepAlive(args)
	return result
}

// argumentWord returns the machine word for an argument. It accepts only types with the same layout
// in C, and panics for others, which would be a mistake in this package.
func argumentWord(pins *runtime.Pinner, arg any) uintptr {
	switch v := arg.(type) {
	case nil:
		return 0
	case handle:
		return uintptr(v)
	case int:
		return uintptr(v)
	case int32:
		return uintptr(v)
	case int64:
		return uintptr(v)
	case uint32:
		return uintptr(v)
	case uintptr:
		return v
	case bool:
		if v {
			return 1
		}
		return 0
	case string:
		return pinned(pins, append([]byte(v), 0))
	case []string:
		addresses := make([]uintptr, 0, len(v))
		for _, s := range v {
			addresses = append(addresses, pinned(pins, append([]byte(s), 0)))
		}
		return pinned(pins, addresses)
	case []byte:
		return pinned(pins, v)
	case []handle:
		return pinned(pins, v)
	case []int64:
		return pinned(pins, v)
	case *handle:
		return pinnedPointer(pins, v)
	case *uintptr:
		return pinnedPointer(pins, v)
	case *int32:
		return pinnedPointer(pins, v)
	}
	panic(fmt.Sprintf("ort: argument of type %T", arg))
}

func pinned[T any](pins *runtime.Pinner, s []T) uintptr {
	if len(s) == 0 {
		return 0
	}
	return pinnedPointer(pins, &s[0])
}

func pinnedPointer[T any](pins *runtime.Pinner, p *T) uintptr {
	pins.Pin(p)
	return uintptr(unsafe.Pointer(p))
}

// pointer converts a handle to a pointer. The detour avoids vet's warning about pointers in
// integers.
func pointer(h handle) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&h)) }

const maxText = 1 << 20 // bounds strings from C; longer ones are cut

func text(h handle) string {
	if h == 0 {
		return ""
	}
	p := pointer(h)
	n := 0
	for n < maxText && *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// elementsAt returns C memory as a slice, valid as long as the memory.
func elementsAt[T byte | handle](h handle, count uintptr) []T {
	if h == 0 || count == 0 {
		return nil
	}
	return unsafe.Slice((*T)(pointer(h)), count)
}

func functionAt(table handle, slot int) handle {
	return *(*handle)(unsafe.Add(pointer(table), uintptr(slot)*unsafe.Sizeof(table)))
}
