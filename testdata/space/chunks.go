package main

import (
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	cdc "github.com/PlakarKorp/go-cdc-chunkers"
	_ "github.com/PlakarKorp/go-cdc-chunkers/chunkers/fastcdc"
	"github.com/jotfs/fastcdc-go"
	"github.com/zeebo/blake3"
	"golang.org/x/sync/errgroup"
)

// A chunk store as simple and fast as it can be: chunks are cut by a library,
// named by their BLAKE3 digest, and those that are new are appended to one file
// for each core. Two files are taken in at a time, and each is synced at its end,
// while the next ones are taken in. Nothing of it is compressed or encrypted, there is no server,
// no snapshot and no lock.

// cutter calls fn with each chunk of a file, which is fn's until it returns.
type cutter func(r io.Reader, fn func(chunk []byte) error) error

func fastCDC(average int) cutter {
	return func(r io.Reader, fn func([]byte) error) error {
		c, err := cdc.NewChunker("fastcdc", r,
			&cdc.ChunkerOpts{MinSize: average / 4, NormalSize: average, MaxSize: average * 8})
		if err != nil {
			return err
		}
		for {
			chunk, err := c.Next()
			if len(chunk) > 0 {
				if err := fn(chunk); err != nil {
					return err
				}
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
		}
	}
}

// gear64 cuts as Xet does: a gear hash without normalisation, 64 KiB on average, 8 at least, 128 at
// most.
func gear64(r io.Reader, fn func([]byte) error) error {
	c, err := fastcdc.NewChunker(r, fastcdc.Options{AverageSize: 64 << 10, MinSize: 8 << 10,
		MaxSize: 128 << 10, DisableNormalization: true, BufSize: 1 << 20})
	if err != nil {
		return err
	}
	for {
		chunk, err := c.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := fn(chunk.Data); err != nil {
			return err
		}
	}
}

const cores = 2

// chunk says where its bytes are.
type chunk struct {
	Pack   int
	At     int64
	Length int
}

func chunked(cut cutter) method {
	return method{
		takeIn: func(c corpus, store string) ([]int64, error) { return chunksIn(c, store, cut) },
		restore: func(c corpus, store, into string) error {
			return chunksOut(c, store, into)
		},
	}
}

type chunkStore struct {
	syncing errgroup.Group // of packs; no more than mostSyncing at a time

	mu    sync.Mutex // guards all below
	packs []*os.File
	known map[[32]byte]chunk
	lists map[string][][32]byte // by path
}

func chunksIn(c corpus, store string, cut cutter) ([]int64, error) {
	s := &chunkStore{known: map[[32]byte]chunk{}, lists: map[string][][32]byte{}}
	s.syncing.SetLimit(mostSyncing)
	files := make(chan fileInfo)
	var wg sync.WaitGroup
	failed := make([]error, cores)
	for i := range cores {
		wg.Go(func() {
			failed[i] = s.work(c, files, cut, i, filepath.Join(store, fmt.Sprint(i)))
			for range files { // after an error
			}
		})
	}
	for _, f := range c.files() {
		files <- f
	}
	close(files)
	wg.Wait()
	failed = append(failed, s.syncing.Wait())
	for _, pack := range s.packs {
		failed = append(failed, pack.Close())
	}
	if err := errors.Join(failed...); err != nil {
		return nil, err
	}
	if err := s.save(filepath.Join(store, "index")); err != nil {
		return nil, err
	}
	packs := int64(0)
	for _, k := range s.known {
		packs += int64(k.Length) + 40 // what an index needs for a chunk, at the least
	}
	for _, list := range s.lists {
		packs += 32 * int64(len(list))
	}
	return []int64{packs}, nil
}

func (s *chunkStore) work(c corpus, files <-chan fileInfo, cut cutter, number int,
	path string) error {
	pack, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() {
		s.mu.Lock()
		s.packs = append(s.packs, pack)
		s.mu.Unlock()
	}()
	at := int64(0)
	for f := range files {
		in, err := os.Open(c.path(f))
		if err != nil {
			return err
		}
		var list [][32]byte
		err = cut(in, func(b []byte) error {
			digest := blake3.Sum256(b)
			list = append(list, digest)
			s.mu.Lock()
			_, there := s.known[digest]
			if !there {
				s.known[digest] = chunk{number, at, len(b)}
			}
			s.mu.Unlock()
			if there {
				return nil
			}
			at += int64(len(b))
			_, err := pack.Write(b)
			return err
		})
		in.Close()
		if err != nil {
			return err
		}
		s.syncing.Go(pack.Sync)
		s.mu.Lock()
		s.lists[f.Path] = list
		s.mu.Unlock()
	}
	return nil
}

func (s *chunkStore) save(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	e := gob.NewEncoder(f)
	if err := e.Encode(s.known); err != nil {
		return err
	}
	if err := e.Encode(s.lists); err != nil {
		return err
	}
	return f.Sync()
}

func chunksOut(c corpus, store, into string) error {
	f, err := os.Open(filepath.Join(store, "index"))
	if err != nil {
		return err
	}
	defer f.Close()
	s := &chunkStore{}
	d := gob.NewDecoder(f)
	if err := errors.Join(d.Decode(&s.known), d.Decode(&s.lists)); err != nil {
		return err
	}
	var packs [cores]*os.File
	for i := range packs {
		if packs[i], err = os.Open(filepath.Join(store, fmt.Sprint(i))); err != nil {
			return err
		}
		defer packs[i].Close()
	}
	files := make(chan fileInfo)
	var wg sync.WaitGroup
	failed := make([]error, cores)
	for i := range cores {
		wg.Go(func() {
			buf := make([]byte, 1<<20)
			for f := range files {
				if err := s.join(f, packs[:], buf, filepath.Join(into, f.Path)); err != nil {
					failed[i] = errors.Join(failed[i], err)
				}
			}
		})
	}
	for _, f := range c.files() {
		files <- f
	}
	close(files)
	wg.Wait()
	return errors.Join(failed...)
}

// join writes a file from its chunks, and hashes each as every chunk store does.
func (s *chunkStore) join(f fileInfo, packs []*os.File, buf []byte, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	for _, digest := range s.lists[f.Path] {
		k := s.known[digest]
		b := buf[:k.Length]
		if _, err := packs[k.Pack].ReadAt(b, k.At); err != nil {
			return err
		}
		if blake3.Sum256(b) != digest {
			return fmt.Errorf("chunk %x is damaged", binary.BigEndian.Uint64(digest[:]))
		}
		if _, err := out.Write(b); err != nil {
			return err
		}
	}
	return nil
}
