package cas

import (
	"context"
	"io"
	"os"
	"sync"
)

// Hold keeps the blobs that somebody is about to refer to from being removed
// by RemoveUnless: from the moment at which they are stored, or found to be
// there, until Release. It may be used by several goroutines.
//
// Who stores a blob through a Hold and then writes down that it is needed
// waits for no other removal than one of that very blob.
type Hold struct {
	s *Store

	mu   sync.Mutex // guards kept
	kept []Digest   // as often as it was kept
}

// Hold begins to keep blobs. The caller releases it.
func (s *Store) Hold() *Hold { return &Hold{s: s} }

// Source is what Put reads.
type Source interface {
	io.ReaderAt
	Size() int64
}

// Put stores the bytes of r, and returns their digest and number when they are durable. A blob that
// is there already is kept, if its bytes are right.
func (h *Hold) Put(ctx context.Context, r Source) (Digest, int64, error) {
	return h.s.put(ctx, r, h)
}

// PutFile stores the bytes of the file f, which stays as it is, and returns their digest and length
// when they are durable. It reads through the descriptor at offsets of its own, and shares the
// bytes where the file system can. What is hashed is the store's copy. ErrChanged: the size or the
// time of the last change was another afterwards.
func (h *Hold) PutFile(ctx context.Context, f *os.File) (Digest, int64, error) {
	return h.s.putFile(ctx, f, h)
}

// AdoptHashed makes the staged file at path a blob without copying it, and returns its digest and
// length when it is durable. The file has to be on the store's file system and its writer has to be
// done. If it can be seen that somebody could still write it, it is copied instead. Either way path
// is gone afterwards; after an error it is there still, unless its bytes could not be synced. A
// file that is still as it was when HashAhead or CopyAhead hashed it is not hashed again; of others
// known is the zero Hashed.
func (h *Hold) AdoptHashed(ctx context.Context, path string, known Hashed) (Digest, int64, error) {
	return h.s.adoptHashed(ctx, path, known, h)
}

// Keep keeps a blob that is there already, and reports whether it is.
func (h *Hold) Keep(ctx context.Context, d Digest) (bool, error) {
	unlock, err := h.s.locks.Lock(ctx, d)
	if err != nil {
		return false, err
	}
	defer unlock()
	if !h.s.Has(d) {
		return false, nil
	}
	h.keep(d)
	return true, nil
}

// Kept returns the blobs, each once.
func (h *Hold) Kept() []Digest {
	h.mu.Lock()
	defer h.mu.Unlock()
	seen := make(map[Digest]bool, len(h.kept))
	var out []Digest
	for _, d := range h.kept {
		if !seen[d] {
			seen[d] = true
			out = append(out, d)
		}
	}
	return out
}

// Release lets them go. It may be called more than once.
func (h *Hold) Release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.s.heldMu.Lock()
	defer h.s.heldMu.Unlock()
	for _, d := range h.kept {
		if h.s.held[d]--; h.s.held[d] == 0 {
			delete(h.s.held, d)
		}
	}
	h.kept = nil
}

func (h *Hold) keep(d Digest) {
	if h == nil {
		return
	}
	h.mu.Lock()
	h.kept = append(h.kept, d)
	h.mu.Unlock()
	h.s.heldMu.Lock()
	h.s.held[d]++
	h.s.heldMu.Unlock()
}
