package main

import (
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
)

// part is what files or directories of one kind take below a state directory.
type part struct {
	name   string
	files  int
	bytes  int64 // their lengths; 0 of directories
	blocks int64 // on disk
}

// partsOf tells what a state directory consists of, each file once whatever names it has: what
// blobs and recipes are by themselves, which is printed beside the bound, and what comes on top
// of it.
func partsOf(dir string) ([]part, error) {
	parts := []part{{name: "blobs"}, {name: "recipes"}, {name: "manifests"}, {name: "reserve"},
		{name: "index.db"}, {name: "other files"}, {name: "directories"}}
	seen := make(map[uint64]bool)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		if seen[st.Ino] {
			return nil
		}
		seen[st.Ino] = true
		below, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(path, dir), "/"), "/")
		of := &parts[len(parts)-2]
		switch below {
		case "objects":
			of = &parts[0]
		case "recipes", "manifests", "reserve", "index.db":
			for i := range parts {
				if parts[i].name == below {
					of = &parts[i]
				}
			}
		}
		if d.IsDir() {
			of = &parts[len(parts)-1]
		} else {
			of.bytes += info.Size()
		}
		of.files++
		of.blocks += 512 * st.Blocks
		return nil
	})
	return parts, err
}

func printParts(to io.Writer, dir string) error {
	parts, err := partsOf(dir)
	for _, p := range parts {
		fmt.Fprintf(to, "  %-12s %6d of them %12d bytes %12d on disk\n", p.name, p.files,
			p.bytes, p.blocks)
	}
	return err
}
