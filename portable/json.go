package portable

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// FormatError says that a document is invalid.
type FormatError struct {
	File   string // or the name of a document without a file
	Field  string // "": of the document
	Offset int64  // in the file; negative: unknown
	Text   string
}

// Error names the file, the field and the offset.
func (e *FormatError) Error() string {
	text := e.File
	if e.Field != "" {
		text += ": " + e.Field
	}
	if e.Offset >= 0 {
		text += fmt.Sprintf(": offset %d", e.Offset)
	}
	return text + ": " + e.Text
}

func wrong(file, field, format string, args ...any) *FormatError {
	return &FormatError{file, field, -1, fmt.Sprintf(format, args...)}
}

// Bounds of documents. JSON values take up to 50 times their text in memory, so their number is
// bounded as well as the size.
const (
	maxCard   = 900 << 10 // fits into one frame of the daemon's socket
	maxIndex  = 16 << 20
	MaxPEM    = 64 << 10 // of a file of keys
	maxValues = 1 << 14
	maxCards  = 1 << 12
)

// decode reads one of epcached's own documents, which has one encoding.
func decode(file string, raw []byte, most int, out any) error {
	if err := bounded(file, raw, most, maxValues); err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(out); err != nil {
		return jsonError(file, dec.InputOffset(), err)
	}
	again := encode(out)
	if bytes.Equal(raw, again) {
		return nil
	}
	at := 0
	for at < min(len(raw), len(again)) && raw[at] == again[at] {
		at++
	}
	return &FormatError{file, "", int64(at), "not in the canonical form that epcached writes"}
}

// bounded refuses documents that are too large, or have too many values.
func bounded(file string, raw []byte, most, values int) error {
	if len(raw) > most {
		return wrong(file, "", "%d bytes, more than %d", len(raw), most)
	}
	n := bytes.Count(raw, []byte{','}) + bytes.Count(raw, []byte{'{'}) +
		bytes.Count(raw, []byte{'['})
	if n > values {
		return wrong(file, "", "%d values, more than %d", n, values)
	}
	return nil
}

func jsonError(file string, at int64, err error) error {
	out := &FormatError{File: file, Offset: at, Text: strings.TrimPrefix(err.Error(), "json: ")}
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		out.Offset = syntax.Offset
	case errors.As(err, &kind):
		out.Field, out.Offset = kind.Field, kind.Offset
	}
	return out
}

// encode returns the encoding of one of epcached's own documents.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		// cannot happen: strings and numbers can always be encoded
		panic("portable: " + err.Error())
	}
	return bytes.TrimSuffix(b.Bytes(), []byte{'\n'})
}
