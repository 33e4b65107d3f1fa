package cache

import (
	"fmt"
	"os"
	"time"

	"github.com/epcached/epcached/cas"
)

// witness remembers the stamps of a model's files, to tell whether anything moved while they were read.
type witness struct {
	began  time.Time // before the first file was looked at
	files  []*os.File
	stamps []cas.Stamp
	guard  *guard // says the same as long as it stands; nil: the stamps alone tell
}

// newWitness begins to watch files. Those whose times will not be believed are guarded, where there are guards and it can be done: it tells more, and a file
// that was just written need not be written back for it. The guard is the caller's to release.
func newWitness(files []*os.File, began time.Time, guards *guards, believable bool) (*witness, error) {
	w := &witness{files: files, began: began}
	if err := w.stamp(false); err != nil {
		return nil, err
	}
	if guards != nil && !(believable && w.old()) {
		w.guard = guards.take(w.files)
	}
	if w.guard != nil {
		return w, nil
	}
	return w, w.stamp(true)
}

// stamp takes the stamps of all files.
func (w *witness) stamp(settled bool) error {
	w.stamps = nil
	for _, f := range w.files {
		if settled {
			// A store through a dirty mapping changes no time until it is written back. Writing back write-protects
			// the pages, so that every later store faults and moves the times that we compare.
			if err := settle(f); err != nil {
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

func (w *witness) unchanged() error {
	if w.guard.stands() {
		return nil
	}
	for i, f := range w.files {
		if err := settle(f); err != nil {
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

// old tells whether every file had been left alone for a while when the reading began; a time in the future is never
// believed. What counts is the beginning: a page that was dirtied between the writing back and the stamp can be
// stored to again without a trace, however long the hashing takes.
func (w *witness) old() bool { return leftAlone(w.began, w.stamps...) }

// quiet is how long a file must have been left alone before its times are believed: a file system's clock may
// tick slowly, and two changes within one tick look like one.
const quiet = 2 * time.Second

// leftAlone tells whether files with these stamps had been left alone for a while at a time.
func leftAlone(at time.Time, stamps ...cas.Stamp) bool {
	limit := at.Add(-quiet).UnixNano()
	for _, s := range stamps {
		if s.Mtime > limit || s.Ctime > limit {
			return false
		}
	}
	return true
}
