package dedupe

import (
	"errors"
	"fmt"
	"strings"

	"github.com/epcached/epcached/cas"
)

// ErrNewer says that a recipe or sketch was written by a newer epcached. It is
// not damaged, and is to be left where it is.
var ErrNewer = errors.New("written by a newer epcached")

// FormatError says what is wrong with a recipe or a sketch, and where.
type FormatError struct {
	Offset int64  // in the file, of the field at fault; -1 where a Recipe in memory is meant
	Field  string // such as "extent 3: from"; "" for the file as a whole
	Reason string // what was found, and what was expected
}

func (e *FormatError) Error() string {
	var b strings.Builder
	if e.Offset >= 0 {
		fmt.Fprintf(&b, "offset %d: ", e.Offset)
	}
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	b.WriteString(e.Reason)
	return b.String()
}

// ContainerError says that a container is not what the recipe was made from, or could not be opened
// or read. Err may be a *cas.CorruptError or cas.ErrNotFound.
type ContainerError struct {
	Digest cas.Digest // of the container
	Err    error
}

func (e *ContainerError) Error() string { return fmt.Sprintf("container %s: %v", e.Digest, e.Err) }

func (e *ContainerError) Unwrap() error { return e.Err }
