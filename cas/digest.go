package cas

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
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
		return fmt.Errorf("%s %.80q: it has %d characters instead of %d", what, s, len(s),
			2*len(to))
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

// CorruptError says that the bytes stored under Digest are damaged: their digest is Got. The file
// is left in place; Quarantine moves it.
type CorruptError struct {
	Digest Digest
	Got    Digest
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("blob %s is damaged: its bytes hash to %s", e.Digest, e.Got)
}

// Stamp identifies the state of a file that was verified. Two stamps are equal (==) unless the
// file's content, mode or names changed, or another file replaced it.
type Stamp struct {
	Dev, Ino     uint64
	Size         int64  // bytes
	Mtime, Ctime int64  // nanoseconds since 1970
	Boot         string // "" when the file was synced, else the boot that the stamp dies with
}

// Holds reports whether a file that now has the stamp seen is unchanged since s was taken. The
// stamp of an unsynced file is valid only in the same boot, because after a power cut size and
// times may be intact without the bytes.
func (s Stamp) Holds(seen Stamp) bool {
	if s.Boot != "" && s.Boot != Boot() {
		return false
	}
	seen.Boot = s.Boot
	return s == seen
}

// StampBook remembers the stamps of verified blobs over a restart; package index implements it. If
// a stamp is lost, the blob is only hashed again.
type StampBook interface {
	LoadStamp(Digest) (Stamp, bool)
	SaveStamp(Digest, Stamp) error
	ForgetStamp(Digest) error
}

// stampCache holds stamps in memory, so that a hit opens no transaction and takes no lock.
type stampCache struct {
	book StampBook // nil: stamps are only in memory

	mu     sync.RWMutex // guards held
	stamps map[Digest]Stamp
}

const maxStamps = 1 << 15 // bounds memory to a few megabytes. Others are looked up in the book

func (c *stampCache) load(d Digest) (Stamp, bool) {
	c.mu.RLock()
	s, ok := c.stamps[d]
	c.mu.RUnlock()
	if ok || c.book == nil {
		return s, ok
	}
	if s, ok = c.book.LoadStamp(d); ok {
		c.mu.Lock()
		if now, renewed := c.stamps[d]; renewed {
			s = now // another caller has saved one
		} else {
			c.put(d, s)
		}
		c.mu.Unlock()
	}
	return s, ok
}

// put is called with mu held for writing. Without a book no stamp is dropped, because it could not
// be loaded again.
func (c *stampCache) put(d Digest, s Stamp) {
	if c.book != nil && len(c.stamps) >= maxStamps {
		for other := range c.stamps { // a random one, because Go's order is random
			delete(c.stamps, other)
			break
		}
	}
	c.stamps[d] = s
}

func (c *stampCache) save(d Digest, s Stamp) {
	c.mu.Lock()
	c.put(d, s)
	c.mu.Unlock()
	if c.book != nil {
		// Best effort: without it the blob is hashed after the next start.
		_ = c.book.SaveStamp(d, s)
	}
}

// forget removes it from the book first, so that a load in between cannot bring the stamp back.
func (c *stampCache) forget(d Digest) {
	if c.book != nil {
		// Best effort: a remaining stamp matches no later file, because inode and times differ.
		_ = c.book.ForgetStamp(d)
	}
	c.mu.Lock()
	delete(c.stamps, d)
	c.mu.Unlock()
}
