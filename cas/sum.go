package cas

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"

	"lukechampine.com/blake3/guts"
)

// BLAKE3 is a binary tree over chunks of 1 KiB. A piece is a complete subtree,
// so pieces can be hashed on any core, in any order, and joined afterwards;
// the result is the standard digest.
const (
	groupSize = guts.MaxSIMD * guts.ChunkSize // what one vector instruction stream hashes
	pieceSize = 1 << 20                       // a power of two groups; small enough to stay in the cache of a core
)

// pieces are shared by everything that hashes: a daemon hashes often, and a
// buffer a core is all that hashing needs, however large the input.
var pieces = sync.Pool{New: func() any { return new([pieceSize]byte) }}

// Sum returns the BLAKE3 digest of the n bytes of r that begin at off. Large
// ranges are hashed on all cores, in memory that does not depend on n. Fewer
// than n bytes are io.ErrUnexpectedEOF; ctx is looked at between pieces.
func Sum(ctx context.Context, r io.ReaderAt, off, n int64) (Digest, error) {
	return sum(ctx, r, off, n, nil)
}

// SumFile returns the digest of the whole file at path.
func SumFile(ctx context.Context, path string) (Digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return Digest{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return Digest{}, err
	}
	return Sum(ctx, f, 0, info.Size())
}

// sum is Sum that tells how far it is. progress may be nil; calls to it do not
// overlap and done never shrinks.
func sum(ctx context.Context, r io.ReaderAt, off, n int64, progress func(done, total int64)) (Digest, error) {
	if off < 0 || n < 0 || off > 1<<62 || n > 1<<62 {
		return Digest{}, fmt.Errorf("hash %d bytes at offset %d: not a range", n, off)
	}
	count := max(1, (n+pieceSize-1)/pieceSize)
	workers := min(int64(runtime.GOMAXPROCS(0)), count)
	h := &pieceSum{r: r, off: off, n: n, count: count, progress: progress}
	if workers == 1 {
		h.work(ctx)
		return h.result()
	}
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() { h.work(ctx) })
	}
	wg.Wait()
	return h.result()
}

// pieceSum hands out the pieces of one range to its workers.
type pieceSum struct {
	r        io.ReaderAt
	off, n   int64
	count    int64 // pieces
	progress func(done, total int64)

	mu   sync.Mutex // guards all below
	next int64      // the piece that the next free worker takes
	done int64      // bytes
	tree tree
	err  error
}

func (h *pieceSum) work(ctx context.Context) {
	buf := pieces.Get().(*[pieceSize]byte)
	defer pieces.Put(buf)
	for i, ok := h.take(); ok; i, ok = h.take() {
		if err := ctx.Err(); err != nil {
			h.fail(err)
			return
		}
		at := i * pieceSize
		part := buf[:min(pieceSize, h.n-at)]
		if k, err := h.r.ReadAt(part, h.off+at); k < len(part) {
			if err == nil || err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			h.fail(fmt.Errorf("read at offset %d: %w", h.off+at+int64(k), err))
			return
		}
		h.put(i, pieceNode(part, uint64(i)), len(part))
	}
}

func (h *pieceSum) take() (int64, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err != nil || h.next == h.count {
		return 0, false
	}
	h.next++
	return h.next - 1, true
}

func (h *pieceSum) put(i int64, n guts.Node, bytes int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tree.add(i, n)
	h.done += int64(bytes)
	if h.progress != nil {
		h.progress(h.done, h.n)
	}
}

func (h *pieceSum) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err == nil {
		h.err = err
	}
}

func (h *pieceSum) result() (Digest, error) {
	if h.err != nil {
		return Digest{}, h.err
	}
	return h.tree.root(), nil
}

// tree joins the subtrees of pieces into the root. Pieces may arrive in any
// order; what is early waits. Callers do their own locking.
type tree struct {
	joined int64       // pieces that stand in stack
	stack  [][8]uint32 // complete subtrees, largest first
	last   guts.Node   // the piece after those: held back, because the last one of all is treated apart
	have   bool
	early  map[int64]guts.Node
}

func (t *tree) add(i int64, n guts.Node) {
	expect := t.joined
	if t.have {
		expect++
	}
	if i != expect {
		if t.early == nil {
			t.early = make(map[int64]guts.Node)
		}
		t.early[i] = n
		return
	}
	t.append(n)
	for {
		n, ok := t.early[t.joined+1]
		if !ok {
			return
		}
		delete(t.early, t.joined+1)
		t.append(n)
	}
}

// append takes the piece that follows all before it. That another one came
// shows that the one held back is not the last, so it may be joined.
func (t *tree) append(n guts.Node) {
	if t.have {
		cv := guts.ChainingValue(t.last)
		t.joined++
		for k := t.joined; k%2 == 0; k /= 2 {
			cv = guts.ChainingValue(parent(t.stack[len(t.stack)-1], cv))
			t.stack = t.stack[:len(t.stack)-1]
		}
		t.stack = append(t.stack, cv)
	}
	t.last, t.have = n, true
}

// root finishes the tree: at least one piece has been added, none is missing.
func (t *tree) root() Digest {
	n := t.last
	for i := len(t.stack) - 1; i >= 0; i-- {
		n = parent(t.stack[i], guts.ChainingValue(n))
	}
	n.Flags |= guts.FlagRoot
	words := guts.CompressNode(n)
	var d Digest
	for i := range 8 {
		binary.LittleEndian.PutUint32(d[4*i:], words[i])
	}
	return d
}

func parent(left, right [8]uint32) guts.Node {
	return guts.ParentNode(left, right, &guts.IV, 0)
}

// pieceNode hashes the piece of that index. Only the last piece of an input is
// shorter than pieceSize, and only the only one is empty. The capacity of b is
// at least a multiple of groupSize: the vector code loads whole groups.
func pieceNode(b []byte, index uint64) guts.Node {
	chunk := index * (pieceSize / guts.ChunkSize)
	if len(b) == pieceSize {
		if n, ok := fullPiece(b, chunk); ok {
			return n
		}
	}
	return groupsNode(b, chunk)
}

// groupsNode hashes a piece group by group, on any processor.
func groupsNode(b []byte, chunk uint64) guts.Node {
	var nodes [pieceSize / groupSize][8]uint32
	count := 0
	for len(b) > groupSize {
		nodes[count] = guts.ChainingValue(groupNode(b[:groupSize], chunk))
		b, chunk, count = b[groupSize:], chunk+guts.MaxSIMD, count+1
	}
	n := groupNode(b, chunk)
	if count == 0 {
		return n
	}
	nodes[count] = guts.ChainingValue(n)
	return join(nodes[:count+1])
}

func groupNode(b []byte, chunk uint64) guts.Node {
	return guts.CompressBuffer((*[groupSize]byte)(b[:groupSize]), len(b), &guts.IV, chunk, 0)
}

// join pairs up neighbours until two are left; an odd one moves up unpaired,
// which is how BLAKE3 fills its tree from the left. It overwrites cvs.
func join(cvs [][8]uint32) guts.Node {
	for len(cvs) > 2 {
		k := 0
		for i := 0; i+1 < len(cvs); i += 2 {
			cvs[k] = guts.ChainingValue(parent(cvs[i], cvs[i+1]))
			k++
		}
		if len(cvs)%2 == 1 {
			cvs[k] = cvs[len(cvs)-1]
			k++
		}
		cvs = cvs[:k]
	}
	return parent(cvs[0], cvs[1])
}
