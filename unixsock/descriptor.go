package unixsock

import (
	"fmt"
	"os"
	"strconv"

	"github.com/epcached/epcached/unixsock/wire"
)

func descriptorRefusal(format string, args ...any) *Error {
	return &Error{Class: wire.ErrorClass_BAD_REQUEST, Text: fmt.Sprintf(format, args...)}
}

// checkAcquire checks the descriptors of a request against its fields. slow is checkFD's result,
// for any of them.
func checkAcquire(a *wire.Acquire, fds []int) (slow bool, err error) {
	if a.GetModel() == nil {
		return false, descriptorRefusal("acquire: no model")
	}
	return checkDescriptors("acquire", fds, func(name namer) {
		for _, m := range append([]*wire.Model{a.GetModel()}, a.GetGroup()...) {
			name(m.GetFd(), "model", m.GetName())
			for _, x := range m.GetExternal() {
				name(x.GetFd(), "external data", x.GetLocation())
			}
		}
		for _, ep := range a.GetEps() {
			for option, fd := range ep.GetOptionFds() {
				name(fd, "file of option", option)
			}
		}
		for _, lib := range a.GetRuntime().GetEpLibraries() {
			if lib.Fd != nil {
				name(lib.GetFd(), "library of", lib.GetEp())
			}
			for _, x := range lib.GetBeside() {
				name(x.GetFd(), "library beside that of", lib.GetEp())
			}
		}
	})
}

func checkPut(p *wire.Put, fds []int) (slow bool, err error) {
	if len(p.GetFiles()) == 0 {
		return false, descriptorRefusal("put: no files")
	}
	if int64(p.GetGraphs()) > int64(len(p.GetFiles())) {
		return false, descriptorRefusal("put: %d graphs among %d files", p.GetGraphs(),
			len(p.GetFiles()))
	}
	return checkPutFiles("put", p.GetFiles(), fds)
}

func checkImport(i *wire.Import, fds []int) (slow bool, err error) {
	return checkPutFiles("import", i.GetFiles(), fds)
}

func checkPutFiles(request string, files []*wire.PutFile, fds []int) (slow bool, err error) {
	return checkDescriptors(request, fds, func(name namer) {
		for _, f := range files {
			name(f.GetFd(), "file", f.GetName())
		}
	})
}

// namer is a function that is called for each descriptor that a request names.
type namer func(fd uint32, kind, name string)

// checkDescriptors fails unless every index that the request names has a descriptor, and all may be
// read. A descriptor may be named twice, or not at all, because a later protocol may use it.
func checkDescriptors(request string, fds []int, names func(namer)) (slow bool, wrong error) {
	what := make([]struct{ kind, name string }, len(fds))
	names(func(fd uint32, kind, name string) {
		switch {
		case wrong != nil:
		case int64(fd) >= int64(len(fds)):
			wrong = descriptorRefusal("%s: %s %q is descriptor %d of %d", request, kind, name,
				fd, len(fds))
		default:
			what[fd].kind, what[fd].name = kind, name
		}
	})
	for i, fd := range fds {
		if wrong != nil {
			break
		}
		one, err := checkFD(fd)
		slow = slow || one
		if err == nil {
			continue
		}
		is := what[i]
		e := &Error{Class: wire.ErrorClass_BAD_REQUEST, Err: err,
			Facts: map[string]string{"fd": strconv.Itoa(i)},
			Text:  fmt.Sprintf("%s: descriptor %d %v", request, i, err)}
		if is.kind != "" {
			e.Facts["file"] = is.name
			e.Text = fmt.Sprintf("%s: descriptor of %s %q %v", request, is.kind, is.name, err)
			e.Hint = "send a regular file that was opened for reading"
		}
		return slow, e
	}
	return slow, wrong
}

func toFiles(fds []int) []*os.File {
	files := make([]*os.File, len(fds))
	for i, fd := range fds {
		files[i] = os.NewFile(uintptr(fd), "descriptor "+strconv.Itoa(i))
	}
	return files
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		// Read-only descriptors lose nothing when closing fails, and a backend may have closed one
		// already.
		_ = f.Close()
	}
}
