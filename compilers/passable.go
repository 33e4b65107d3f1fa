package compilers

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// CanPass finds the first folder above a path that the user cannot pass, by the folders' modes alone. A path that is "" or not there is passed as
// far as it goes.
func (c *Credential) CanPass(path string) error {
	if path == "" {
		return nil
	}
	for _, folder := range above(path) {
		info, err := os.Stat(folder)
		if err != nil {
			return nil // who needs it will say that it is not there
		}
		if !c.may(info, 1) {
			return fmt.Errorf("uid %d cannot pass %q, which is above %q: chmod o+x %s", c.UID, folder, path, folder)
		}
	}
	return nil
}

// CanRun tells whether the user may execute a file.
func (c *Credential) CanRun(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !c.may(info, 1) {
		return fmt.Errorf("uid %d cannot run %q: chmod o+x %s", c.UID, path, path)
	}
	return nil
}

// may looks at the mode's bits for the user: 4 to read, 2 to write, 1 to execute or to pass.
func (c *Credential) may(info os.FileInfo, bit fs.FileMode) bool {
	owner := statOf(info)
	switch {
	case owner.Uid == c.UID:
		bit <<= 6
	case owner.Gid == c.GID || slices.Contains(c.Groups, owner.Gid):
		bit <<= 3
	}
	return info.Mode()&bit != 0
}

func above(path string) []string {
	var folders []string
	for dir := filepath.Dir(filepath.Clean(path)); ; dir = filepath.Dir(dir) {
		folders = append(folders, dir)
		if dir == filepath.Dir(dir) {
			slices.Reverse(folders)
			return folders
		}
	}
}
