package watch

import (
	"crypto/sha256"
	"errors"
	"io/fs"
	"syscall"
)

// stamp is what is compared to find changes that no event told. Two stamps of
// one path are equal unless something became of what the path leads to.
type stamp struct {
	dev, ino     uint64
	mode         fs.FileMode
	size         int64
	mtime, ctime int64  // nanoseconds since 1970
	says         string // a link's target, the content where times say nothing, or the error: it cannot be looked at
	failed       bool   // says is an error
}

func failedStamp(err error) stamp {
	var no syscall.Errno
	if errors.Is(err, fs.ErrNotExist) {
		err = fs.ErrNotExist
	} else if errors.As(err, &no) {
		err = no // the same words for the same reason, whatever the path
	}
	return stamp{says: err.Error(), failed: true}
}

func (s stamp) isMissing() bool { return s.failed && s.says == fs.ErrNotExist.Error() }

func (s stamp) isLink() bool { return !s.failed && s.mode&fs.ModeSymlink != 0 }

func (s stamp) isFolder() bool { return !s.failed && s.mode.IsDir() }

// identity is what matters of a folder that is only passed: that it is the same
// one and may be passed. What else comes and goes in it is not the subject's.
func (s stamp) identity() stamp {
	if s.failed {
		return s
	}
	return stamp{dev: s.dev, ino: s.ino, mode: s.mode}
}

// timeless is the stamp of something in /sys or /proc: numbers and times there
// are made up when somebody looks, and made up anew when memory was short.
func (s stamp) timeless() stamp {
	if s.failed {
		return s
	}
	return stamp{mode: s.mode, says: s.says}
}

// smallFile is how much of a file in /sys or /proc is compared, in bytes.
const smallFile = 4096

// withContent adds what a small file says to its stamp.
func (s stamp) withContent(path string) stamp {
	if s.failed || !s.mode.IsRegular() {
		return s
	}
	b, err := readSmall(path, smallFile)
	if err != nil {
		s.says = err.Error()
		return s
	}
	sum := sha256.Sum256(b)
	s.says = string(sum[:])
	return s
}

// fsKind is what matters of a file system.
type fsKind struct {
	deaf     string // why watching finds nothing on it; "" where it does
	timeless bool   // what lies on it is compared by content
}
