package crashfs

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
)

// Loss is the effect of a power cut on unsynced changes.
type Loss int

const (
	Nothing    Loss = iota // the program was killed: the kernel keeps everything
	Everything             // all unsynced changes are lost
	Some                   // each name and each file on its own, at random
)

// Crash copies the tree to the directory to, which exists and is empty, as it
// could be after a power cut now. seed decides what Some loses.
func (f *FS) Crash(to string, loss Loss, seed uint64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := &crash{fs: f, loss: loss, random: rand.New(rand.NewPCG(seed, 0)),
		made: make(map[key]string)}
	return c.dir(f.root, to)
}

type crash struct {
	fs     *FS
	loss   Loss
	random *rand.Rand
	made   map[key]string // copies, so that two names of a file stay one file
}

// lost decides whether one unsynced change is lost.
func (c *crash) lost() bool {
	switch c.loss {
	case Nothing:
		return false
	case Everything:
		return true
	}
	return c.random.IntN(2) == 0
}

// names returns the directory's entries after the crash: each name as of the last sync, or as now.
func (c *crash) names(path string, now map[string]key) map[string]key {
	synced := c.fs.dirs[path]
	if c.loss == Nothing {
		return now
	}
	all := make([]string, 0, len(now))
	for name := range now {
		all = append(all, name)
	}
	for name := range synced {
		if _, there := now[name]; !there {
			all = append(all, name)
		}
	}
	slices.Sort(all) // so that a seed has the same effect every time
	after := make(map[string]key)
	for _, name := range all {
		k, is := now[name]
		old, was := synced[name]
		if is == was && k == old {
			after[name] = k
			continue
		}
		if c.lost() {
			k, is = old, was
		}
		if is {
			after[name] = k
		}
	}
	return after
}

func (c *crash) dir(from, to string) error {
	now, err := keysIn(from)
	if err != nil {
		return err
	}
	names := c.names(from, now)
	sorted := make([]string, 0, len(names))
	for name := range names {
		sorted = append(sorted, name)
	}
	slices.Sort(sorted)
	for _, name := range sorted {
		k, target := names[name], filepath.Join(to, name)
		if k.dir {
			if err := os.Mkdir(target, 0o700); err != nil {
				return err
			}
			if now[name] != k {
				continue // a removed directory is back, and empty
			}
			if err := c.dir(filepath.Join(from, name), target); err != nil {
				return err
			}
			continue
		}
		if err := c.file(k, filepath.Join(from, name), target); err != nil {
			return err
		}
	}
	return nil
}

func (c *crash) file(k key, from, to string) error {
	if made, ok := c.made[k]; ok {
		return os.Link(made, to)
	}
	c.made[k] = to
	held, err := c.content(k, from)
	if err != nil {
		return err
	}
	return held.write(to)
}

// content returns a file's content after the crash.
func (c *crash) content(k key, from string) (content, error) {
	file := c.fs.files[k]
	if file == nil { // not made through FS, as by bbolt
		f, err := os.Open(from)
		if errors.Is(err, fs.ErrNotExist) {
			return content{}, nil // it was renamed; an empty file is a possible loss too
		} else if err != nil {
			return content{}, err
		}
		defer f.Close() // opened for reading
		return contentOf(f)
	}
	now, err := file.content()
	if err != nil {
		return content{}, err
	}
	if !c.lost() {
		return now, nil
	}
	if c.loss == Everything || c.random.IntN(3) == 0 || now.size <= file.synced.size {
		return file.synced, nil
	}
	// The new size is on the disk, but some bytes are not.
	torn := now.flat()
	tail := torn[file.synced.size:]
	clear(tail[c.random.IntN(len(tail)+1):])
	return content{now.size, []run{{0, torn}}}, nil
}
