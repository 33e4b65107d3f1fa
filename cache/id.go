package cache

import (
	"crypto/rand"
	"encoding/hex"
)

// newID gives an id that was never used before and cannot be guessed.
func newID() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // it never fails
	return hex.EncodeToString(b[:])
}
