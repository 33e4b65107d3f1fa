package cas

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
)

// Digest names a blob: the BLAKE3 digest, in its standard 32-byte form, of the
// blob's plain bytes, so that b3sum agrees. The zero Digest names nothing.
type Digest [32]byte

// String returns the digest as 64 lower-case hexadecimal digits.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// IsZero reports whether d is the zero Digest, which names no blob.
func (d Digest) IsZero() bool { return d == Digest{} }

// Compare orders digests by their bytes.
func (d Digest) Compare(other Digest) int { return bytes.Compare(d[:], other[:]) }

// ParseDigest reads what Digest.String wrote. Upper-case digits are refused,
// so that every digest has one spelling and one file name.
func ParseDigest(s string) (d Digest, err error) { return d, ParseHex("digest", s, d[:]) }

// ParseHex reads lower-case hexadecimal digits into all of to. what names them in errors.
func ParseHex(what, s string, to []byte) error {
	if len(s) != 2*len(to) {
		return fmt.Errorf("%s %.80q: %d characters, not %d", what, s, len(s), 2*len(to))
	}
	b, err := hex.DecodeString(s)
	if err != nil {
		return fmt.Errorf("%s %q: %w", what, s, err)
	}
	if hex.EncodeToString(b) != s {
		return fmt.Errorf("%s %q: upper-case digits", what, s)
	}
	copy(to, b)
	return nil
}

// ErrNotFound says that the store has no blob of that digest.
var ErrNotFound = errors.New("blob not found")

// CorruptError says that the bytes stored under Digest are others: they hash
// to Got. The file is left where it is; Quarantine moves it away.
type CorruptError struct {
	Digest Digest
	Got    Digest
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("blob %s is damaged: its bytes hash to %s", e.Digest, e.Got)
}
