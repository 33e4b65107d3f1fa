package index

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// RestoreJournal writes the journal anew, from memory, if somebody has deleted
// it: the open file goes with the process, and with it what must not be served.
// It tells whether that was so. The state folder has to be this index's still.
func (x *Index) RestoreJournal() (restored bool, err error) {
	if restored, err = x.journal.restore(); err != nil {
		err = fmt.Errorf("restore journal: %w", err)
	}
	return restored, err
}

func (j *journal) restore() (restored bool, err error) {
	j.appending.Lock()
	defer j.appending.Unlock()
	if _, err := os.Lstat(j.path); err == nil {
		return false, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return true, j.rewrite()
}
