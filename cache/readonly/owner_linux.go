package readonly

import (
	"errors"
	"os"
	"syscall"
)

// ownerOf returns the user that a file belongs to.
func ownerOf(path string) (uint32, error) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, errors.ErrUnsupported
	}
	return st.Uid, nil
}
