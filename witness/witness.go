package witness

import (
	"fmt"
	"os"
	"time"

	"github.com/epcached/epcached/cas"
)

// Files are files while they are read, with what tells whether anything moved meanwhile.
type Files struct {
	began  time.Time // before the first file was looked at
	files  []*os.File
	stamps []cas.Stamp
	settle bool // the files are written back before each stamp
}

// Watch begins to watch files. believable: they are on file systems whose times count. The files are
// written back only where their stamps may be believed, because that can take as long as reading
// them. For others Unchanged reports what moved a time, and misses stores through a mapping.
func Watch(files []*os.File, began time.Time, believable bool) (*Files, error) {
	w := &Files{files: files, began: began}
	var err error
	if w.stamps, err = w.stamp(); err != nil {
		return nil, err
	}
	if !believable || !LeftAlone(w.began, w.stamps...) {
		return w, nil
	}
	w.settle = true
	w.stamps, err = w.stamp()
	return w, err
}

// stamp returns the stamps of all files.
func (w *Files) stamp() ([]cas.Stamp, error) {
	var stamps []cas.Stamp
	for _, f := range w.files {
		if w.settle {
			// A store through a dirty mapping changes no time until it is written back. Writing back write-protects
			// the pages, so that every later store faults and moves the times that we compare.
			if err := Settle(f); err != nil {
				return nil, err
			}
		}
		s, err := cas.StampOf(f)
		if err != nil {
			return nil, err
		}
		stamps = append(stamps, s)
	}
	return stamps, nil
}

// Unchanged says what moved since Watch, nil: nothing did.
func (w *Files) Unchanged() error {
	now, err := w.stamp()
	if err != nil {
		return err
	}
	for i, f := range w.files {
		if now[i] != w.stamps[i] {
			return fmt.Errorf("%q: size or times moved", f.Name())
		}
	}
	return nil
}

// Believed reports whether equal stamps prove equal bytes from now on: the times of the file systems
// count, and every file had been left alone for a while when the reading began. A time in the future
// is never believed. The beginning counts because a page that was dirtied between the writing back
// and the stamp can be stored to again without a trace, however long the hashing takes.
func (w *Files) Believed() bool { return w.settle && LeftAlone(w.began, w.stamps...) }

// quiet is how long a file must have been left alone before its times are believed: a file system's clock may
// tick slowly, and two changes within one tick look like one.
const quiet = 2 * time.Second

// LeftAlone tells whether files with these stamps had been left alone for a while at a time.
func LeftAlone(at time.Time, stamps ...cas.Stamp) bool {
	limit := at.Add(-quiet).UnixNano()
	for _, s := range stamps {
		if s.Mtime > limit || s.Ctime > limit {
			return false
		}
	}
	return true
}
