package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/epcached/epcached/internal/tomlfile"
)

// CheckUnpackedDir looks whether unpacked_dir, where there is one, is a folder in which the daemon can make its own: without that it does not
// start. mayWrite tells whether this user may make files in a folder. The error is an Errors.
func (s *Settings) CheckUnpackedDir(mayWrite func(dir string) error) error {
	dir := s.Space.UnpackedDir
	if dir == "" {
		return nil
	}
	const field = "space.unpacked_dir"
	text := ""
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		text = fmt.Sprintf("there is no folder %q: make it, or name one that is there; the daemon makes only its own in it", dir)
	case err != nil:
		text = fmt.Sprintf("%q: %v", dir, tomlfile.WithoutPath(err))
	case !info.IsDir():
		text = fmt.Sprintf("%q is no folder", dir)
	default:
		if err := mayWrite(dir); err != nil {
			text = fmt.Sprintf("user %d may not write into %q: %v; if the daemon runs as another user, check as that one", os.Getuid(), dir, tomlfile.WithoutPath(err))
		}
	}
	if text == "" {
		return nil
	}
	return Errors{{File: s.File, Position: s.positionOf(field), Field: field, Text: text}}
}
