//go:build linux && (amd64 || arm64)

package ort

import (
	"fmt"
	"runtime"
	"unsafe"

	"github.com/ebitengine/purego"
)

// handle is a pointer that C gave us. Go's garbage collector neither sees nor moves what it points to.
type handle uintptr

// call enters C. It is the only place where Go memory becomes an address: each pointer, string and slice among args is pinned until the function
// has returned. Strings get a terminating zero. Arguments are handles, integers, strings, []string (as char**), slices, and pointers for results.
// The answer is the raw return register: convert it to the C type's width first.
func call(fn handle, args ...any) uintptr {
	var pins runtime.Pinner
	defer pins.Unpin()
	var words [15]uintptr
	for i, arg := range args {
		words[i] = word(&pins, arg)
	}
	result, _, _ := purego.SyscallN(uintptr(fn), words[:len(args)]...)
	runtime.KeepAlive(args)
	return result
}

// word gives the machine word for an argument. Only types whose layout C shares are accepted: another one is a mistake in this package.
func word(pins *runtime.Pinner, arg any) uintptr {
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

// pointer makes C memory readable. The detour keeps vet from taking it for a Go pointer that was hidden in an integer.
func pointer(h handle) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&h)) }

const maxText = 1 << 20 // bounds strings that C gives us: longer ones are cut

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

func array(h handle, count uintptr) []handle {
	if h == 0 || count == 0 {
		return nil
	}
	return append([]handle(nil), unsafe.Slice((*handle)(pointer(h)), count)...)
}

func at(table handle, slot int) handle {
	return *(*handle)(unsafe.Add(pointer(table), uintptr(slot)*unsafe.Sizeof(table)))
}
