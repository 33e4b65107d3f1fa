package cas

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// What the quarantine keeps at most. It is there to look into a damage, not to
// fill the disk with it; the newest thing stays whatever its size.
const (
	maxQuarantined     = 64      // things, each with its note
	maxQuarantineBytes = 1 << 30 // of all things together
)

// SetAside moves the file at path, something of the state folder dir that failed a check, into the
// quarantine and writes a note why beside it. The oldest things go when there are too many. The
// caller syncs the folder that the file came from.
func SetAside(fsys FS, dir, path, why string) error {
	quarantine := filepath.Join(dir, quarantineName)
	if err := fsys.Mkdir(quarantine); err != nil {
		return err
	}
	now := time.Now().UTC()
	name := now.Format("20060102T150405.000000000Z") + "-" + filepath.Base(path) // sorts by age
	to := filepath.Join(quarantine, name)
	if err := fsys.Rename(path, to); err != nil {
		return err
	}
	note := fmt.Sprintf("%s\nmoved here on %s: %s\n", path, now.Format(time.RFC3339), why)
	return errors.Join(WriteFile(fsys, to+".txt", []byte(note)), trimQuarantine(fsys, quarantine))
}

func trimQuarantine(fsys FS, quarantine string) error {
	names, err := fsys.ReadDir(quarantine)
	if err != nil {
		return err
	}
	things, bytes := 0, int64(0)
	for i := len(names) - 1; i >= 0; i-- { // newest first
		if strings.HasSuffix(names[i], ".txt") {
			continue
		}
		path := filepath.Join(quarantine, names[i])
		info, err := os.Lstat(path)
		if err != nil {
			continue // somebody emptied the quarantine meanwhile
		}
		things++
		bytes += info.Size()
		if things == 1 || things <= maxQuarantined && bytes <= maxQuarantineBytes {
			continue
		}
		bytes -= info.Size()
		for _, p := range []string{path, path + ".txt"} {
			if err := fsys.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}
