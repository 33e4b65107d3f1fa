package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/url"
	"time"

	"github.com/epcached/epcached/remote"
)

// engine reads and writes objects by name. Only store.go makes names. Errors are of package
// remote's classes, or classify finds their class.
type engine interface {
	can() remote.Can
	// get reads length bytes from an offset on, or all of the object if length is negative. An
	// engine without ranges returns more, and sets object.from.
	get(ctx context.Context, name string, from, length int64) (*object, error)
	stat(ctx context.Context, name string) (*object, error) // without a body
	// put fails with errExists if the condition does not hold.
	put(ctx context.Context, name string, body *io.SectionReader, sha256 string,
		when condition) error
	// touch resets the age of the object.
	touch(ctx context.Context, name string, size int64) error
	// list returns at most most names, without the prefix.
	list(ctx context.Context, prefix string, most int) ([]string, error)
	// walk calls fn with all objects below a prefix, with their whole names.
	walk(ctx context.Context, prefix string, fn func(name string, o *object) error) error
	remove(ctx context.Context, name string) error
	clock() time.Time // the server's, as far as it is known
}

// all is the Can of an engine that supports all operations.
var all = remote.Can{Read: true, Write: true, CreateOnly: true, Range: true, List: true}

// object is an object for reading.
type object struct {
	body     io.ReadCloser
	from     int64 // the offset of the first byte of body
	size     int64 // of the whole object; below 0: not known
	etag     string
	modified time.Time
}

// condition is the condition of a put.
type condition struct {
	create bool   // the object must not exist
	match  string // the object must have this ETag
}

// errExists says that the condition of a put does not hold.
var errExists = errors.New("the condition does not hold")

func fail(class, format string, args ...any) *remote.Error {
	return &remote.Error{Class: class, Text: fmt.Sprintf(format, args...)}
}

// classify converts an error to a remote.Error with its class.
func classify(err error) *remote.Error {
	var e *remote.Error
	switch {
	case errors.As(err, &e):
		out := *e
		return &out
	case errors.Is(err, fs.ErrNotExist):
		return fail("missing", "%v", err)
	case errors.Is(err, fs.ErrPermission):
		return fail("refused", "%v", err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return fail("unreachable", "no answer within the budget")
	}
	text := err.Error()
	if u, is := errors.AsType[*url.Error](err); is {
		text = u.Err.Error() // without the URL, which has keys
	}
	if op, is := errors.AsType[*net.OpError](err); is && op.Addr != nil {
		text = fmt.Sprintf("%s %s: %v", op.Op, op.Addr, op.Err)
	}
	if t, is := errors.AsType[net.Error](err); is && t.Timeout() {
		text = "no answer within the time for one step: " + text
	}
	return fail("unreachable", "%s", text)
}

// isClass reports whether there is an error, and of that class.
func isClass(err error, class error) bool { return err != nil && errors.Is(classify(err), class) }

// transient reports whether the same request may succeed at once.
func transient(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == nil && isClass(err, remote.ErrUnreachable) &&
		callOf(ctx).retryAfter.Load() == 0
}

// small reads an object of at most most bytes.
func small(ctx context.Context, e engine, name string, most int64) ([]byte, *object, error) {
	o, err := e.get(ctx, name, 0, -1)
	if err != nil {
		return nil, nil, err
	}
	defer o.body.Close()
	if o.size > most {
		return nil, nil, fail("damaged", "%s has %d bytes, more than %d", name, o.size, most)
	}
	raw, err := io.ReadAll(io.LimitReader(o.body, most+1))
	switch {
	case err != nil:
		return nil, nil, err
	case int64(len(raw)) > most:
		return nil, nil, fail("damaged", "%s has more than %d bytes", name, most)
	case o.size >= 0 && int64(len(raw)) != o.size:
		return nil, nil, fail("unreachable", "%s ended after %d of %d bytes", name,
			len(raw), o.size)
	}
	return raw, o, nil
}
