package cache

import (
	"crypto/rand"
	"encoding/hex"
)

// newID gives an id that was never used before and cannot be guessed.
func newID() string {
	var b [12]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err) // crypto/rand never fails on a system that works
	}
	return hex.EncodeToString(b[:])
}
