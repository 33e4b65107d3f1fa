// Package journalfile is the format of the index's journal: its header and its records, each with a
// checksum, so that damage and a torn end are distinguished.
package journalfile

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/manifestpb"
)

// FormatVersion is the version of all formats of package index that this epcached writes.
const FormatVersion = 1

// The journal; numbers are little-endian.
//
//	offset  size  what
//	0       8     magic "epcjrnal"
//	8       4     version of the format, 1
//	12      4     zero
//	16      16    first half of the BLAKE3 of bytes 0 to 15
//	32            records
//
// A record:
//
//	0       4     marker "rec\n", to find the next one after damage
//	4       4     n, the length of the body, at most 64 KiB
//	8       16    first half of the BLAKE3 of bytes 0 to 7 and the body
//	24      n     manifestpb.Record
const (
	magic            = "epcjrnal"
	HeaderSize       = 32
	RecordMarker     = "rec\n"
	RecordHeaderSize = 24
	maxRecord        = 64 << 10
)

// Parse calls fn with every valid record. torn reports that the file ends within a record, as after
// a crash. damage is an error if valid records follow an invalid one, or if the header is invalid.
func Parse(file []byte, fn func(*manifestpb.Record) error) (torn bool, damage error) {
	if len(file) < HeaderSize {
		return false, &DamageError{"journal", "its header is truncated"}
	}
	if string(file[:8]) != magic {
		return false, &DamageError{"journal", "it does not begin as a journal does"}
	}
	if v := binary.LittleEndian.Uint32(file[8:]); v > FormatVersion {
		return false, &NewerError{"journal", v}
	}
	if sum := cas.SumBytes(file[:16]); !bytes.Equal(sum[:16], file[16:32]) {
		damage = &DamageError{"journal", "its header has a wrong checksum"}
	}
	for at := HeaderSize; at < len(file); {
		body, n := ParseRecord(file[at:])
		if n == 0 {
			next := nextRecord(file, at+1)
			if next < 0 {
				return true, damage
			}
			damage = &DamageError{"journal", fmt.Sprintf("no valid record at offset %d to "+
				"%d", at, next)}
			at = next
			continue
		}
		var rec manifestpb.Record
		err := proto.Unmarshal(body, &rec)
		if err == nil {
			err = fn(&rec)
		}
		if err != nil {
			damage = &DamageError{"journal", fmt.Sprintf("record at offset %d: %v", at, err)}
		}
		at += n
	}
	return false, damage
}

// ParseRecord returns the body of the record at the beginning of b and the record's length, or 0.
func ParseRecord(b []byte) (body []byte, n int) {
	if len(b) < RecordHeaderSize || string(b[:4]) != RecordMarker {
		return nil, 0
	}
	size := binary.LittleEndian.Uint32(b[4:])
	if size > maxRecord || int(size) > len(b)-RecordHeaderSize {
		return nil, 0
	}
	body = b[RecordHeaderSize : RecordHeaderSize+int(size)]
	if sum := recordSum(b[:8], body); !bytes.Equal(sum[:], b[8:24]) {
		return nil, 0
	}
	return body, RecordHeaderSize + int(size)
}

// nextRecord returns the offset of the next valid record, or -1.
func nextRecord(file []byte, from int) int {
	for from < len(file) {
		i := bytes.Index(file[from:], []byte(RecordMarker))
		if i < 0 {
			return -1
		}
		if _, n := ParseRecord(file[from+i:]); n > 0 {
			return from + i
		}
		from += i + 1
	}
	return -1
}

func recordSum(head, body []byte) [16]byte {
	sum := cas.SumBytes(slices.Concat(head, body))
	return [16]byte(sum[:])
}

func AppendHeader(b []byte) []byte {
	start := len(b)
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, FormatVersion)
	b = binary.LittleEndian.AppendUint32(b, 0)
	sum := cas.SumBytes(b[start:])
	return append(b, sum[:16]...)
}

func AppendRecords(b []byte, records ...*manifestpb.Record) ([]byte, error) {
	for _, rec := range records {
		body, err := proto.MarshalOptions{Deterministic: true}.Marshal(rec)
		if err != nil {
			return b, err
		}
		if len(body) > maxRecord {
			return b, fmt.Errorf("journal record of %d bytes, more than %d", len(body), maxRecord)
		}
		start := len(b)
		b = append(b, RecordMarker...)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))
		sum := recordSum(b[start:], body)
		b = append(append(b, sum[:]...), body...)
	}
	return b, nil
}
