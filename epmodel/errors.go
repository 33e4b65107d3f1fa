package epmodel

import (
	"fmt"
	"strings"
)

// FormatError says what is wrong with a model's bytes, and where.
type FormatError struct {
	File   string // the name given to Read, an external data file's location, or a sidecar's name; "" where the reader knows
	Offset int64  // in File, of the field at fault; -1 where no single offset is meant
	Field  string // in ONNX's words, such as "graph.initializer.external_data"; "" for the file as a whole
	Reason string // what was found, and what was expected
}

func (e *FormatError) Error() string {
	var b strings.Builder
	if e.File != "" {
		b.WriteString(e.File + ": ")
	}
	if e.Offset >= 0 {
		fmt.Fprintf(&b, "offset %d: ", e.Offset)
	}
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	b.WriteString(e.Reason)
	return b.String()
}
