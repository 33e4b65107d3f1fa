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
	Guard  *Guard // says the same as long as it stands; nil: the stamps alone tell
}

// Watch begins to watch files. Those whose times will not be believed are guarded, where there are guards and it can be done: it tells more, and a file
// that was just written need not be written back for it. The guard is the caller's to release.
func Watch(files []*os.File, began time.Time, guards *Guards, believable bool) (*Files, error) {
	w := &Files{files: files, began: began}
	if err := w.stamp(false); err != nil {
		return nil, err
	}
	if guards != nil && !(believable && w.Old()) {
		w.Guard = guards.Take(w.files)
	}
	if w.Guard != nil {
		return w, nil
	}
	return w, w.stamp(true)
}

// stamp takes the stamps of all files.
func (w *Files) stamp(settled bool) error {
	w.stamps = nil
	for _, f := range w.files {
		if settled {
			// A store through a dirty mapping changes no time until it is written back. Writing back write-protects
			// the pages, so that every later store faults and moves the times that we compare.
			if err := Settle(f); err != nil {
				return err
			}
		}
		s, err := cas.StampOf(f)
		if err != nil {
			return err
		}
		w.stamps = append(w.stamps, s)
	}
	return nil
}

// Unchanged says what moved since Watch, nil: nothing did.
func (w *Files) Unchanged() error {
	if w.Guard.Stands() {
		return nil
	}
	for i, f := range w.files {
		if err := Settle(f); err != nil {
			return err
		}
		s, err := cas.StampOf(f)
		if err != nil {
			return err
		}
		if s != w.stamps[i] {
			return fmt.Errorf("%q: size or times moved", f.Name())
		}
	}
	return nil
}

// Old tells whether every file had been left alone for a while when the reading began; a time in the future is never
// believed. What counts is the beginning: a page that was dirtied between the writing back and the stamp can be
// stored to again without a trace, however long the hashing takes.
func (w *Files) Old() bool { return LeftAlone(w.began, w.stamps...) }

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
