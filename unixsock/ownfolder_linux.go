package unixsock

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// OwnFolder makes a folder for this user alone, with the folders above it, or refuses one that is there and that others may change: what a
// client gets from a daemon's socket it loads, and who owns the folder may put another daemon there. Nothing is made inside of what
// belongs to another user, as with sudo, which leaves HOME as it was.
func OwnFolder(dir string) error {
	switch info, err := os.Stat(dir); {
	case err == nil:
		return checkOwn(dir, info)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	for above := filepath.Dir(dir); ; above = filepath.Dir(above) {
		info, err := os.Stat(above)
		if errors.Is(err, fs.ErrNotExist) && above != filepath.Dir(above) {
			continue
		}
		if err != nil {
			return err
		}
		if owner := ownerOf(info); owner != os.Geteuid() && owner != 0 {
			return fmt.Errorf("%s belongs to user %d: nothing is made in it for user %d", above, owner, os.Geteuid())
		}
		break
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	info, err := os.Stat(dir) // somebody may have been faster
	if err != nil {
		return err
	}
	return checkOwn(dir, info)
}

func checkOwn(dir string, info fs.FileInfo) error {
	switch owner := ownerOf(info); {
	case !info.IsDir():
		return fmt.Errorf("%s is no folder", dir)
	case owner != os.Geteuid():
		return fmt.Errorf("%s belongs to user %d, and this is user %d", dir, owner, os.Geteuid())
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s may be changed by other users: its mode is %04o", dir, info.Mode().Perm())
	}
	return nil
}

func ownerOf(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }
