package epmodel

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
)

// The container of OpenVINO's EP, in a sidecar or embedded. Numbers are little-endian:
//
//	 0  "OVEP_BIN"
//	 8  version, 8 bytes (1)
//	16  size of this header, 8 bytes (40)
//	24  offset of a BSON document, 8 bytes
//	32  its size, 8 bytes
//
// The document has blob_metadata_map {<partition>: {data_offset, size}} and, when contexts are
// shared and the source model had external data, weights_metadata_map {<tensor>: {data_offset,
// location, size}}, whose locations are files beside the graph.
const (
	openvinoMagic  = "OVEP_BIN"
	openvinoHeader = 40
	maxBSON        = 64 << 20
	maxBSONDepth   = 16
)

// BinaryReferences returns the files that a context binary itself refers to, and checks that its
// own ranges lie inside it. name stands for it in errors and as the references' Node. Only
// OpenVINO's container refers to files: shared contexts of a model with external data need the
// source model's weights beside them. For other binaries it returns nothing, and no error. Offsets
// are in bin.
func BinaryReferences(name string, bin Source) ([]Reference, error) {
	if bin.Size() < openvinoHeader {
		return nil, nil
	}
	var h [openvinoHeader]byte
	if n, err := bin.ReadAt(h[:], 0); n < len(h) {
		return nil, fmt.Errorf("%s: read at offset 0: %w", name, err)
	}
	if string(h[:8]) != openvinoMagic || binary.LittleEndian.Uint64(h[8:]) != 1 {
		return nil, nil // not OpenVINO's, or of a version with an unknown layout
	}
	off, n := binary.LittleEndian.Uint64(h[24:]), binary.LittleEndian.Uint64(h[32:])
	size := uint64(bin.Size())
	if off > size || n > size-off {
		return nil, &FormatError{name, 24, "bson",
			fmt.Sprintf("%d bytes from %d reach beyond the file of %d", n, off, size)}
	}
	if n > maxBSON {
		return nil, &FormatError{name, 32, "bson",
			fmt.Sprintf("%d bytes long, more than %d", n, maxBSON)}
	}
	b := &bson{name: name, size: size, start: int64(off), visited: map[string]bool{}}
	sec := io.NewSectionReader(bin, int64(off), int64(n))
	b.pos = sec
	in := &watchedReader{r: sec}
	b.r = bufio.NewReaderSize(in, 4<<10)
	if err := b.document(nil); err != nil {
		if in.err != nil {
			return nil, fmt.Errorf("%s: read: %w", name, in.err)
		}
		var f *FormatError
		if errors.As(err, &f) {
			return nil, err
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("ends too early")
		}
		return nil, &FormatError{name, b.offset(), "bson", err.Error()}
	}
	return b.refs, nil
}

// bson walks a document without building it.
type bson struct {
	name       string
	size       uint64 // of the whole binary
	start      int64  // of the document in it
	pos        io.Seeker
	r          *bufio.Reader
	visited    map[string]bool
	memoryUsed int
	refs       []Reference
}

// offset in the binary, of the next byte.
func (b *bson) offset() int64 {
	p, err := b.pos.Seek(0, io.SeekCurrent)
	if err != nil {
		return -1 // cannot happen with a section; the offset only serves an error text
	}
	return b.start + p - int64(b.r.Buffered())
}

func (b *bson) document(path []string) error {
	if len(path) >= maxBSONDepth {
		return errors.New("nested too deep")
	}
	if _, err := b.number(4); err != nil {
		return err
	}
	var off, n uint64
	var hasOff, hasSize bool
	for {
		kind, err := b.r.ReadByte()
		if err != nil {
			return err
		}
		if kind == 0 {
			break
		}
		key, err := b.cstring()
		if err != nil {
			return err
		}
		v, err := b.element(kind, append(path, key))
		if err != nil {
			return err
		}
		switch key {
		case "data_offset":
			off, hasOff = v, true
		case "size":
			n, hasSize = v, true
		}
	}
	if len(path) != 2 || path[0] != "blob_metadata_map" || !hasOff || !hasSize {
		return nil
	}
	if off > b.size || n > b.size-off {
		return &FormatError{b.name, b.offset(), "blob_metadata_map",
			fmt.Sprintf("blob %q: %d bytes from %d reach beyond the file of %d", path[1], n,
				off, b.size)}
	}
	return nil
}

func (b *bson) element(kind byte, path []string) (uint64, error) {
	switch kind {
	case 0x01, 0x09, 0x11, 0x12: // double, date, timestamp (nlohmann's uint64), int64
		return b.number(8)
	case 0x10:
		return b.number(4)
	case 0x08:
		return b.number(1)
	case 0x0a:
		return 0, nil
	case 0x02:
		return 0, b.text(path)
	case 0x03, 0x04:
		return 0, b.document(path)
	case 0x05:
		n, err := b.number(4)
		if err != nil {
			return 0, err
		}
		_, err = b.r.Discard(int(min(n, math.MaxInt32)) + 1)
		return 0, err
	}
	return 0, fmt.Errorf("value of the unknown kind 0x%02x", kind)
}

// text reads a string; one under weights_metadata_map with the key location is a reference.
func (b *bson) text(path []string) error {
	at := b.offset()
	n, err := b.number(4)
	if err != nil {
		return err
	}
	if n == 0 {
		return errors.New("a string of length 0")
	}
	if last := len(path) - 1; path[0] != "weights_metadata_map" || path[last] != "location" {
		_, err := b.r.Discard(int(min(n, math.MaxInt32)))
		return err
	}
	if n > maxPath+1 {
		return &FormatError{b.name, at, "weights_metadata_map",
			fmt.Sprintf("a location of %d bytes", n)}
	}
	p := make([]byte, n)
	if _, err := io.ReadFull(b.r, p); err != nil {
		return err
	}
	loc := string(p[:n-1])
	if b.visited[loc] {
		return nil
	}
	if b.memoryUsed += int(n) + 128; b.memoryUsed > maxBSON {
		return errors.New("refers to too many files")
	}
	b.visited[loc] = true
	b.refs = append(b.refs, Reference{Node: b.name, Attribute: "weights_metadata_map", Name: loc,
		Offset: at})
	return nil
}

func (b *bson) number(n int) (uint64, error) {
	var p [8]byte
	_, err := io.ReadFull(b.r, p[:n])
	return binary.LittleEndian.Uint64(p[:]), err
}

func (b *bson) cstring() (string, error) {
	p, err := b.r.ReadSlice(0)
	if err != nil {
		return "", err
	}
	return string(p[:len(p)-1]), nil
}
