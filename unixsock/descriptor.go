package unixsock

import (
	"errors"
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
	what, err := nameDescriptors(a, len(fds))
	if err != nil {
		return err
	}
	for i, fd := range fds {
		if err := checkFD(fd); err != nil {
			return describe(err, i, what[i])
		}
	}
	return nil
}

// described is what a request says that a descriptor is.
type described struct{ kind, name string }

// nameDescriptors also proves that every index in the request has a descriptor. A descriptor that is named twice is
// all right, and so is one that nothing names: a later protocol may have a use for it.
func nameDescriptors(a *wire.Acquire, n int) ([]described, error) {
	what := make([]described, n)
	var err error
	name := func(fd uint32, kind, name string) {
		if int64(fd) >= int64(n) {
			err = errors.Join(err, refused("acquire: %s %q is descriptor %d of %d", kind, name, fd, n))
			return
		}
		what[fd] = described{kind, name}
	}
	name(a.GetModel().GetFd(), "model", a.GetModel().GetName())
	for _, x := range a.GetModel().GetExternal() {
		if err == nil {
			name(x.GetFd(), "external data", x.GetLocation())
		}
	}
	for _, ep := range a.GetEps() {
		for option, fd := range ep.GetOptionFds() {
			if err == nil {
				name(fd, "file of option", option)
			}
		}
	}
	for _, lib := range a.GetRuntime().GetEpLibraries() {
		if lib.Fd != nil && err == nil {
			name(lib.GetFd(), "library of", lib.GetEp())
		}
	}
	return what, err
}

// describe says which descriptor was refused, in the words of the request.
func describe(cause error, index int, what described) *Error {
	e := &Error{Class: wire.ErrorClass_BAD_REQUEST, Err: cause, Facts: map[string]string{"fd": strconv.Itoa(index)}}
	if what.kind == "" {
		e.Text = fmt.Sprintf("acquire: descriptor %d %v", index, cause)
		return e
	}
	e.Facts["file"] = what.name
	e.Text = fmt.Sprintf("acquire: descriptor of %s %q %v", what.kind, what.name, cause)
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
