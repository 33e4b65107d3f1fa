package epmodel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"unicode"
	"unicode/utf8"
)

// sniff recognises what people take for an ONNX file most often, to say so instead of "bad tag at offset 0". None of these
// can begin a model.
func (r *reader) sniff() error {
	if r.size == 0 {
		return r.fail(0, "", "the file is empty: not an ONNX model")
	}
	head, err := r.peek(0, int(min(r.size, likenessBytes)))
	if err != nil {
		return err
	}
	switch {
	case bytes.HasPrefix(head, []byte("version https://git-lfs")):
		return r.fail(0, "", "a Git LFS pointer, not the model itself: fetch it with git lfs pull")
	case len(head) >= 8 && string(head[4:8]) == "ORTM":
		return r.fail(0, "", "a model in ORT format, not ONNX")
	case bytes.HasPrefix(head, []byte("PK\x03\x04")):
		return r.fail(0, "", "a zip archive, not an ONNX model")
	case bytes.HasPrefix(head, []byte("\x1f\x8b")):
		return r.fail(0, "", "a gzip file, not an ONNX model")
	case bytes.HasPrefix(head, []byte("OVEP_BIN")):
		return r.fail(0, "", "an OpenVINO context binary, not the ONNX model that refers to it")
	}
	return nil
}

// likenessBytes is how much of a file is looked at to tell what it is.
const likenessBytes = 64

// unlike says of a file in which no graph was found that it is no ONNX model, and what it looks like. It is asked after the
// walk only, for a model may begin with any of these bytes.
func (r *reader) unlike(err error, began bool) error {
	var format *FormatError
	if !errors.As(err, &format) {
		return err
	}
	head, err2 := r.peek(0, int(min(r.size, likenessBytes)))
	if err2 != nil {
		return err
	}
	own := *format
	switch what := likeness(head, r.size); {
	case what != "":
		own.Field, own.Reason = "", "not an ONNX model, but "+what
	case !began:
		own.Reason = "not an ONNX model: " + own.Reason
	}
	return &own
}

// likeness tells what a file is by its first bytes, "" where they do not tell.
func likeness(head []byte, size int64) string {
	text := bytes.TrimLeft(bytes.TrimPrefix(head, []byte("\xef\xbb\xbf")), " \t\r\n")
	switch {
	case len(head) >= 9 && head[8] == '{' && binary.LittleEndian.Uint64(head) < uint64(size):
		return "what looks like weights in safetensors format"
	case len(head) >= 8 && string(head[4:8]) == "TFL3":
		return "what looks like a TFLite model"
	case bytes.HasPrefix(head, []byte("GGUF")):
		return "what looks like a GGUF file"
	case bytes.HasPrefix(head, []byte("\x89HDF\r\n\x1a\n")):
		return "what looks like an HDF5 file, as Keras writes"
	case bytes.HasPrefix(head, []byte("\x80\x02")), bytes.HasPrefix(head, []byte("\x80\x04")), bytes.HasPrefix(head, []byte("\x80\x05")):
		return "what looks like a Python pickle"
	case bytes.HasPrefix(head, []byte("\x7fELF")):
		return "what looks like a program or a library"
	case bytes.HasPrefix(text, []byte("<?xml")), bytes.HasPrefix(text, []byte("<net")):
		return "what looks like XML, as OpenVINO's models are"
	case bytes.HasPrefix(bytes.ToLower(text), []byte("<!doctype html")), bytes.HasPrefix(bytes.ToLower(text), []byte("<html")):
		return "what looks like a web page, perhaps an error page in the place of a download"
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
