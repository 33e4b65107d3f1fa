package compilers

import (
	"os"
	"path/filepath"
)

// TakesOpen implements Opener. A worker opens the file again, by its descriptor, so its user must be allowed to. Not where what the model refers to is
// looked for beside it, or is made a part of the artefact afterwards.
func (o *ORT) TakesOpen(job Job) bool {
	if _, isTool, err := o.toolFor(job.EPs); isTool || err != nil {
		return false // tools may do what they like with the path that they are given
	}
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
	uid := statOf(info).Uid
	return uid == o.opts.User.UID && info.Mode()&0o400 != 0 || uid != o.opts.User.UID && info.Mode()&0o004 != 0
}
