package crashfs

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
)

// Loss is what a power cut does to what was not synced.
type Loss int

const (
	Nothing    Loss = iota // the program was killed: the kernel keeps everything
	Everything             // nothing that was not synced is left
	Some                   // each name and each file on its own, at random
)

// Crash copies the tree to the folder to, which exists and is empty, as it
// could be after a power cut now. seed decides what Some loses.
func (f *FS) Crash(to string, loss Loss, seed uint64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := &crash{fs: f, loss: loss, random: rand.New(rand.NewPCG(seed, 0)), made: make(map[key]string)}
	return c.folder(f.root, to)
}

type crash struct {
	fs     *FS
	loss   Loss
	random *rand.Rand
	made   map[key]string // copies, so that two names of a file stay one file
}

// lost tosses a coin for one thing that was not synced.
func (c *crash) lost() bool {
	switch c.loss {
	case Nothing:
		return false
	case Everything:
		return true
	}
	return c.random.IntN(2) == 0
}

// names returns what the folder leads to after the crash: for each name what
// it led to when it was synced, or what it leads to now.
func (c *crash) names(path string) (map[string]key, error) {
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	now := make(map[string]key)
	for _, e := range entries {
		k, err := keyOf(filepath.Join(path, e.Name()))
		if err != nil {
			return nil, err
		}
		now[e.Name()] = k
	}
	synced := c.fs.dirs[path]
	if c.loss == Nothing {
		return now, nil
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
	slices.Sort(all) // so that a seed means the same every time
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
	return after, nil
}

func (c *crash) folder(from, to string) error {
	names, err := c.names(from)
	if err != nil {
		return err
	}
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
			if now, err := keyOf(filepath.Join(from, name)); err != nil || now != k {
				continue // a folder that was removed and is back, whatever has its name now: empty
			}
			if err := c.folder(filepath.Join(from, name), target); err != nil {
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
	b, err := c.bytes(k, from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o600)
}

// bytes returns what a file holds after the crash.
func (c *crash) bytes(k key, from string) ([]byte, error) {
	file := c.fs.files[k]
	if file == nil { // made behind our back, as bbolt does
		b, err := os.ReadFile(from)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil // it has another name by now; empty is as good a loss as any
		}
		return b, err
	}
	now, err := file.bytes()
	if err != nil {
		return nil, err
	}
	if !c.lost() {
		return now, nil
	}
	if c.loss == Everything || c.random.IntN(3) == 0 {
		return file.synced, nil
	}
	// The size made it to the disk, some of the bytes did not.
	torn := slices.Clone(now)
	if len(torn) > len(file.synced) {
		tail := torn[len(file.synced):]
		clear(tail[c.random.IntN(len(tail)+1):])
	} else {
		torn = file.synced
	}
	return torn, nil
}
