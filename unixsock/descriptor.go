package unixsock

import (
	"fmt"
	"os"
	"strconv"

	"github.com/epcached/epcached/unixsock/wire"
)

func refused(format string, args ...any) *Error {
	return &Error{Class: wire.ErrorClass_BAD_REQUEST, Text: fmt.Sprintf(format, args...)}
}

// checkAcquire holds the descriptors of a request against what it says about them.
func checkAcquire(a *wire.Acquire, fds []int) error {
	if a.GetModel() == nil {
		return refused("acquire: no model")
	}
	named := newDescriptors("acquire", len(fds))
	for _, m := range append([]*wire.Model{a.GetModel()}, a.GetGroup()...) {
		named.name(m.GetFd(), "model", m.GetName())
		for _, x := range m.GetExternal() {
			named.name(x.GetFd(), "external data", x.GetLocation())
		}
	}
	for _, ep := range a.GetEps() {
		for option, fd := range ep.GetOptionFds() {
			named.name(fd, "file of option", option)
		}
	}
	for _, lib := range a.GetRuntime().GetEpLibraries() {
		if lib.Fd != nil {
			named.name(lib.GetFd(), "library of", lib.GetEp())
		}
		for _, x := range lib.GetBeside() {
			named.name(x.GetFd(), "library beside that of", lib.GetEp())
		}
	}
	return named.check(fds)
}

func checkPut(p *wire.Put, fds []int) error {
	if len(p.GetFiles()) == 0 {
		return refused("put: no files")
	}
	if int64(p.GetGraphs()) > int64(len(p.GetFiles())) {
		return refused("put: %d graphs among %d files", p.GetGraphs(), len(p.GetFiles()))
	}
	named := newDescriptors("put", len(fds))
	for _, f := range p.GetFiles() {
		named.name(f.GetFd(), "file", f.GetName())
	}
	return named.check(fds)
}

// descriptors is what a request says of those that came with it. One that is named twice is all right, and so is one
// that nothing names: a later protocol may have a use for it.
type descriptors struct {
	request string
	what    []described
	err     error // of the first name that is none of a descriptor
}

type described struct{ kind, name string }

func newDescriptors(request string, n int) *descriptors {
	return &descriptors{request: request, what: make([]described, n)}
}

func (d *descriptors) name(fd uint32, kind, name string) {
	switch {
	case d.err != nil:
	case int64(fd) >= int64(len(d.what)):
		d.err = refused("%s: %s %q is descriptor %d of %d", d.request, kind, name, fd, len(d.what))
	default:
		d.what[fd] = described{kind, name}
	}
}

// check proves that every index in the request has a descriptor, and looks at what those are.
func (d *descriptors) check(fds []int) error {
	if d.err != nil {
		return d.err
	}
	for i, fd := range fds {
		if err := checkFD(fd); err != nil {
			return d.describe(err, i)
		}
	}
	return nil
}

// describe says which descriptor was refused, in the words of the request.
func (d *descriptors) describe(cause error, index int) *Error {
	e := &Error{Class: wire.ErrorClass_BAD_REQUEST, Err: cause, Facts: map[string]string{"fd": strconv.Itoa(index)}}
	what := d.what[index]
	if what.kind == "" {
		e.Text = fmt.Sprintf("%s: descriptor %d %v", d.request, index, cause)
		return e
	}
	e.Facts["file"] = what.name
	e.Text = fmt.Sprintf("%s: descriptor of %s %q %v", d.request, what.kind, what.name, cause)
	e.Hint = "send a regular file that was opened for reading"
	return e
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
		// Read-only descriptors lose nothing when closing fails, and a backend may have closed one already.
		_ = f.Close()
	}
}
