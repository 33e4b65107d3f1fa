package cas

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"lukechampine.com/blake3"
	"lukechampine.com/blake3/guts"

	"github.com/epcached/epcached/internal/parallel"
)

// BLAKE3 is a binary tree over chunks of 1 KiB. A piece is a complete subtree, so pieces can be
// hashed on any core, in any order, and joined afterwards; the result is the standard digest.
const (
	groupSize = guts.MaxSIMD * guts.ChunkSize // bytes that one stream of vector instructions hashes
	// a power of two groups; small enough to stay in the cache of a core
	pieceSize = 1 << 20
)

// PieceGate bounds the pieces of large inputs that are hashed at the same time. It blocks until the
// caller may hash one, or ctx ends. leave ends that.
type PieceGate func(ctx context.Context) (leave func(), err error)

type pieceGateKey struct{}

// WithPieceGate returns a context under which [Sum] passes the gate for each piece.
func WithPieceGate(ctx context.Context, gate PieceGate) context.Context {
	return context.WithValue(ctx, pieceGateKey{}, gate)
}

// pieces are shared by everything that hashes: one buffer for each core suffices.
var pieces = sync.Pool{New: func() any { return new([pieceSize]byte) }}

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

// Sum returns the BLAKE3 digest of the n bytes of r that begin at off. Large ranges are hashed on
// all cores, with 1 MiB of memory for each and 32 bytes for each MiB of n. It fails with
// io.ErrUnexpectedEOF if r is shorter, and checks ctx between pieces.
func Sum(ctx context.Context, r io.ReaderAt, off, n int64) (Digest, error) {
	if off < 0 || n < 0 || off > 1<<62 || n > 1<<62 {
		return Digest{}, fmt.Errorf("hash %d bytes at offset %d: not a range", n, off)
	}
	count := max(1, (n+pieceSize-1)/pieceSize)
	nodes := make([][8]uint32, count) // chaining values of the pieces
	var only guts.Node                // the only piece, if there is one
	var next atomic.Int64             // the piece that the next free worker takes
	gate, _ := ctx.Value(pieceGateKey{}).(PieceGate)
	one := func(i int64) error {
		if gate != nil && count > 1 {
			leave, err := gate(ctx)
			if err != nil {
				return err
			}
			defer leave()
		}
		// after the gate, because many goroutines may wait there
		buf := pieces.Get().(*[pieceSize]byte)
		defer pieces.Put(buf)
		at := i * pieceSize
		part := buf[:min(pieceSize, n-at)]
		if k, err := r.ReadAt(part, off+at); k < len(part) {
			if err == nil || err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("read at offset %d: %w", off+at+int64(k), err)
		}
		node := pieceNode(part, uint64(i))
		if count == 1 {
			only = node
		}
		nodes[i] = guts.ChainingValue(node)
		return nil
	}
	work := func() error {
		for i := next.Add(1) - 1; i < count; i = next.Add(1) - 1 {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := one(i); err != nil {
				next.Store(count) // so that the other workers end too
				return err
			}
		}
		return nil
	}
	var workers errgroup.Group
	for range min(int64(parallel.Processors()), count) - 1 {
		workers.Go(work)
	}
	if err := cmp.Or(work(), workers.Wait()); err != nil {
		return Digest{}, err
	}
	if count > 1 {
		only = join(nodes)
	}
	return root(only), nil
}

// SumBytes returns the digest of b.
func SumBytes(b []byte) Digest { return blake3.Sum256(b) }

func root(n guts.Node) (d Digest) {
	n.Flags |= guts.FlagRoot
	words := guts.CompressNode(n)
	for i := range 8 {
		binary.LittleEndian.PutUint32(d[4*i:], words[i])
	}
	return d
}

func parent(left, right [8]uint32) guts.Node { return guts.ParentNode(left, right, &guts.IV, 0) }

// pieceNode hashes the piece of that index. Only the last piece of an input is
// shorter than pieceSize, and only the only one is empty. The capacity of b is
// at least a multiple of groupSize: the vector code loads whole groups.
func pieceNode(b []byte, index uint64) guts.Node {
	chunk := index * (pieceSize / guts.ChunkSize)
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

// join pairs up neighbours until two are left, as BLAKE3 fills its tree. It overwrites cvs.
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
