//go:build !linux

package watch

import (
	"io"
	"os"
)

// notified is what How says of subjects that are not polled.
const notified = "fsnotify"

func lstat(path string) stamp {
	info, err := os.Lstat(path)
	if err != nil {
		return failedStamp(err)
	}
	s := stamp{mode: info.Mode(), size: info.Size(), mtime: info.ModTime().UnixNano()}
	if s.isLink() {
		if s.says, err = os.Readlink(path); err != nil {
			return failedStamp(err)
		}
	}
	return s
}

// folderID is a folder's path, for want of something better.
type folderID string

func (s stamp) id(path string) folderID { return folderID(path) }

func readSmall(path string, most int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, int64(most)))
}

// kindOf knows of no file system that cannot be watched: the notifier's own error tells.
func kindOf(string) (fsKind, error) { return fsKind{}, nil }
