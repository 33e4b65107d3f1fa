package dedupe

import (
	"context"
	"io"
	"math/bits"
	"sync"
)

// heldMost is up to how many bytes a target is held in memory while it is matched.
// Such ones have dense anchors, and short matches and gaps by the ten thousand: a
// read of each from the file takes longer than comparing it.
const heldMost = guidedLeast

// heldStep is how much is read at a time.
const heldStep = 1 << 20

// held is a source in memory.
type held []byte

// heldBefore has the memory of targets that are matched.
var heldBefore sync.Pool // of *held

// holding reads a source, if it is small.
func holding(ctx context.Context, s Source) (Source, error) {
	if s.Size() < 0 || s.Size() > heldMost {
		return s, nil
	}
	var h held
	if p, ok := heldBefore.Get().(*held); ok && int64(cap(*p)) >= s.Size() {
		h = (*p)[:s.Size()]
	} else {
		h = make(held, s.Size(), 1<<bits.Len64(uint64(s.Size()))) // for the next one, which may be larger
	}
	for at := 0; at < len(h); at += heldStep {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := readFull(s, h[at:min(at+heldStep, len(h))], int64(at)); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// letGo says that nobody reads a source any more that holding returned.
func letGo(s Source) {
	if h, ok := s.(held); ok {
		heldBefore.Put(&h)
	}
}

func (h held) Size() int64 { return int64(len(h)) }

// ReadAt is io.ReaderAt.
func (h held) ReadAt(p []byte, off int64) (int, error) {
	if off > int64(len(h)) {
		return 0, io.EOF
	}
	n := copy(p, h[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}
