package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

type corpus struct {
	dir       string
	Artefacts []artefact `json:"artefacts"`
}

type artefact struct {
	Name     string     `json:"name"`
	Why      string     `json:"why"`
	Compiler string     `json:"compiler"` // and its version
	Files    []fileInfo `json:"files"`
}

type fileInfo struct {
	Path string `json:"path"` // relative to the corpus
	Size int64  `json:"size"` // bytes
}

func readCorpus(dir string) (corpus, error) {
	c := corpus{dir: dir}
	b, err := os.ReadFile(filepath.Join(dir, "corpus.json"))
	if err != nil {
		return c, err
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return c, fmt.Errorf("corpus.json: %w", err)
	}
	if len(c.Artefacts) == 0 {
		return c, fmt.Errorf("corpus.json: no artefacts")
	}
	return c, nil
}

func (c corpus) files() (all []fileInfo) {
	for _, a := range c.Artefacts {
		all = append(all, a.Files...)
	}
	return all
}

func (c corpus) size() (n int64) {
	for _, f := range c.files() {
		n += f.Size
	}
	return n
}

func (c corpus) path(f fileInfo) string { return filepath.Join(c.dir, f.Path) }

// warm reads everything once, so that every method finds the files in memory.
func (c corpus) warm() error {
	for _, f := range c.files() {
		in, err := os.Open(c.path(f))
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, in)
		in.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// same compares what was restored below dir with the corpus, byte for byte.
func (c corpus) same(dir string) error {
	a, b := make([]byte, 1<<20), make([]byte, 1<<20)
	for _, f := range c.files() {
		if err := sameFile(c.path(f), filepath.Join(dir, f.Path), a, b); err != nil {
			return fmt.Errorf("restored %s: %w", f.Path, err)
		}
	}
	return nil
}

func sameFile(want, got string, a, b []byte) error {
	w, err := os.Open(want)
	if err != nil {
		return err
	}
	defer w.Close()
	g, err := os.Open(got)
	if err != nil {
		return err
	}
	defer g.Close()
	for off := int64(0); ; {
		n, err := io.ReadFull(w, a)
		k, gerr := io.ReadFull(g, b)
		if n != k || string(a[:n]) != string(b[:k]) {
			return fmt.Errorf("other bytes than in the corpus, from offset %d on", off)
		}
		off += int64(n)
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return nil
		}
		if err != nil || gerr != nil {
			return fmt.Errorf("read: %w, %w", err, gerr)
		}
	}
}
