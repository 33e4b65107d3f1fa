package main

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/dedupe/exact"
)

// leastRun is that of the any-offset bound, in doc/concepts.md.
const leastRun = 64

func bound(c corpus, _ string) ([]int64, error) {
	m := exact.NewMatcher(leastRun, c.size()/4)
	var fresh []int64
	for _, a := range c.Artefacts {
		fresh = append(fresh, 0)
		for _, f := range a.Files {
			n, err := newBytes(m, c.path(f), f.Size)
			if err != nil {
				return nil, err
			}
			fresh[len(fresh)-1] += n
		}
	}
	return fresh, nil
}

func newBytes(m *exact.Matcher, path string, size int64) (int64, error) {
	in, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	b, err := unix.Mmap(int(in.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	return m.New(b), nil // which keeps b
}
