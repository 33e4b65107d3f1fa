package epmodel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"unicode"
	"unicode/utf8"
)

// likenesses are what people take for an ONNX model most often, by what stands at an offset; less
// than 0: by the first letters of a text, in lower case.
var likenesses = []struct {
	at           int
	begins, what string
}{
	{0, "version https://git-lfs", "a Git LFS pointer: fetch the model itself with git lfs pull"},
	{4, "ORTM", "a model in ORT format"},
	{0, "PK\x03\x04", "a zip archive"},
	{0, "\x1f\x8b", "a gzip file"},
	{0, "OVEP_BIN", "an OpenVINO context binary, and not the ONNX model that refers to it"},
	{4, "TFL3", "what looks like a TFLite model"},
	{0, "GGUF", "what looks like a GGUF file"},
	{0, "\x89HDF\r\n\x1a\n", "what looks like an HDF5 file, as Keras writes"},
	{0, "\x80\x02", "what looks like a Python pickle"},
	{0, "\x80\x04", "what looks like a Python pickle"},
	{0, "\x80\x05", "what looks like a Python pickle"},
	{0, "\x7fELF", "what looks like a program or a library"},
	{-1, "<?xml", "what looks like XML, as OpenVINO's models are"},
	{-1, "<net", "what looks like XML, as OpenVINO's models are"},
	{-1, "<!doctype html", "what looks like a web page, perhaps an error page in the place of a download"},
	{-1, "<html", "what looks like a web page, perhaps an error page in the place of a download"},
}

const likenessBytes = 64

// unlike says of a file in which no graph was found that it is no ONNX model, and what it looks like. It is asked after the
// walk only, for a model may begin with any of these bytes.
func (r *reader) unlike(began bool) {
	var format *FormatError
	head := r.peek(0, int(min(r.size, likenessBytes)))
	if len(head) == 0 && r.size > 0 || !errors.As(r.err, &format) {
		return
	}
	own := *format
	switch what := likeness(head, r.size); {
	case what != "":
		own.Field, own.Reason = "", "not an ONNX model, but "+what
	case !began:
		own.Reason = "not an ONNX model: " + own.Reason
	}
	r.err = &own
}

func likeness(head []byte, size int64) string {
	text := bytes.TrimLeft(bytes.TrimPrefix(head, []byte("\xef\xbb\xbf")), " \t\r\n")
	for _, one := range likenesses {
		b := bytes.ToLower(text)
		if one.at >= 0 {
			b = head[min(one.at, len(head)):]
		}
		if bytes.HasPrefix(b, []byte(one.begins)) {
			return one.what
		}
	}
	switch {
	case size == 0:
		return "an empty file"
	case len(head) >= 9 && head[8] == '{' && binary.LittleEndian.Uint64(head) < uint64(size):
		return "what looks like weights in safetensors format"
	case bytes.HasPrefix(text, []byte("{")) && isText(head):
		return "what looks like JSON"
	case isText(head):
		return "what looks like text"
	case len(bytes.Trim(head, "\x00")) == 0:
		return "what begins with nothing but zeros, as a download that did not end"
	}
	return ""
}

// isText tells whether the bytes are printable UTF-8, of which the last character may be cut.
func isText(head []byte) bool {
	for len(head) > 0 {
		c, n := utf8.DecodeRune(head)
		switch {
		case c == utf8.RuneError && n == 1:
			return !utf8.FullRune(head)
		case !unicode.IsPrint(c) && !unicode.IsSpace(c):
			return false
		}
		head = head[n:]
	}
	return true
}
