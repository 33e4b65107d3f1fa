package compilers

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/compilers/dialogue"
)

// TakesOpen implements Opener. A worker opens the file again, by its descriptor, so its user must be allowed to. Not where what the model refers to is
// looked for beside it, or is made a part of the artefact afterwards.
func (o *ORT) TakesOpen(job Job) bool {
	if job.ModelFile == nil || len(job.Share) > 0 || job.Initializers.InSource || Weightless(job.SessionOptions) {
		return false
	}
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		return false
	}
	if o.opts.User == nil {
		return true
	}
	info, err := job.ModelFile.Stat()
	if err != nil || !o.inScratch(filepath.Dir(job.Model)) {
		return false
	}
	uid, _, _ := ownerOf(info)
	return uid == o.opts.User.UID && info.Mode()&0o400 != 0 || uid != o.opts.User.UID && info.Mode()&0o004 != 0
}

// linkModel makes the link at a request's model that leads a worker to the open file, and gives what removes it.
func linkModel(req dialogue.Request) (remove func(), err error) {
	if req.ModelFile == nil {
		return func() {}, nil
	}
	if err := os.Symlink(dialogue.ModelLink, req.Model); err != nil {
		return nil, fmt.Errorf("model for the worker: %w", err)
	}
	return func() {
		if err := os.Remove(req.Model); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return // it is in the job's folder, which is removed as a whole
		}
	}, nil
}
